"""The pages of a real service: its list of jobs, several losses over the same axes, and a job that has failed."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncpipe.service.client import JobClient
from website.browser import Tab, open_tab
from website.pages import ROOT

__all__ = ["photograph"]

STEPS, RATES = 60, (1e-3, 3e-3, 1e-2, 3e-2)
LONG = 600
"""Steps of the jobs that run or wait while the pictures are taken."""
SHOWN = "new Promise(done => setInterval(() => {0} && done(1), 200))"


async def photograph(folder: Path) -> None:
    """Train small models in a service; write ``jobs.png``, ``jobs-narrow.png``, ``losses.png`` and ``job.png``.

    Raises ``FileNotFoundError`` without Chromium, ``RuntimeError`` if the service does not start.
    """
    with TemporaryDirectory(prefix="asyncpipe-pictures-") as place:
        service = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncpipe", "serve", "--folder", place, "--port", "0", "--metrics-port", "none"),
            *("--entry", "charlm:build", "--entry-path", str(ROOT / "examples/charlm"), "--max-running", "2"),
            *("--devices", "cpu:0,cpu:1,cpu:2,cpu:3", "--log-level", "error"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert service.stdout is not None
        try:
            client = JobClient(await _address(service.stdout))
            failed, compared = await asyncio.to_thread(_train, client)
            async with open_tab() as tab:
                await _photograph_list(tab, client.url, folder)
                await tab.look(f"{client.url}/?by=group&compare={','.join(compared)}", 1100, height=620)
                await tab.ask(SHOWN.format("document.querySelectorAll('#compare-chart .line').length > 2"))
                await tab.photograph(folder / "losses.png", whole=False)
                await tab.look(f"{client.url}/jobs/{failed}/", 1100, height=900)
                await tab.ask(SHOWN.format("document.querySelectorAll('#timeline .task').length"))
                await tab.photograph(folder / "job.png")
        finally:
            service.terminate()
            await service.wait()


async def _photograph_list(tab: Tab, url: str, folder: Path) -> None:
    for name, width in (("jobs", 1100), ("jobs-narrow", 400)):
        await tab.look(f"{url}/", width, height=1100)
        await tab.ask(SHOWN.format("document.querySelectorAll('.spark .line').length > 1"))
        await tab.photograph(folder / f"{name}.png", whole=False)


def _train(client: JobClient) -> tuple[str, list[str]]:
    """The id of a job that failed, and those of jobs to compare; others run, wait and are paused."""
    failed = client.submit(_job("charlm, rate 1e9", 1e9, STEPS))["id"]
    compared = [client.submit(_job(f"charlm, rate {rate:g}", rate, STEPS))["id"] for rate in RATES]
    for job in (failed, *compared):
        client.wait(job)
    running = [client.submit(_job(name, 3e-3, LONG))["id"] for name in ("charlm, long", "charlm, for the demo")]
    client.submit(_job("charlm, nightly", 3e-3, LONG, priority_class="background"))
    client.pause(client.submit(_job("charlm, later", 3e-3, LONG))["id"])
    for job in running:
        while client.show(job)["step"] < STEPS:
            pass
    return failed, compared


def _job(name: str, rate: float, steps: int, **more: Any) -> dict[str, Any]:
    shape = {"width": 32, "blocks": 4, "heads": 2, "context": 32, "sample_length": 4, "max_bytes": 100_000}
    pipeline = {"devices": [f"cpu:{number}" for number in range(4)], "microbatches": 8}
    training = {"steps": steps, "batch_size": 16, "learning_rate": rate}
    tables = {"parameters": shape, "pipeline": pipeline, "training": training, "snapshots": {"every": 20}}
    return {"name": name, "entry": "charlm:build", **tables, **more}


async def _address(printed: asyncio.StreamReader) -> str:
    async for line in printed:
        if found := re.match(rb"service: (\S+)/", line):
            return found[1].decode()
    raise RuntimeError("the service ended before it listened")
