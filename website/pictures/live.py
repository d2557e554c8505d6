"""A real step's timeline, and the live page of a run, from a short run of the example with Chromium beside it."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from website.browser import open_tab
from website.pages import ROOT

__all__ = ["photograph"]

JOB = "examples/charlm/charlm.toml"
STEPS = 40
"""The page is photographed when it shows as many losses; the run has some more steps."""
SHOWN = "new Promise(done => setInterval(() => curve.querySelector('.line')?.getAttribute('d')"
WAITED = f"{SHOWN}.split(/[ML]/).length > {STEPS} && done(1), 200))"


async def photograph(folder: Path) -> None:
    """Train the example; write ``timeline.svg`` of its last step and ``live.png`` of its page into ``folder``.

    Raises ``FileNotFoundError`` without Chromium, ``RuntimeError`` if the run fails.
    """
    command = (sys.executable, "-m", "asyncpipe", "train", JOB, "--steps", str(STEPS + 20), "--serve", "0")
    arguments = ("--timeline", str(folder / "timeline.svg"))
    run = await asyncio.create_subprocess_exec(
        *command, *arguments, cwd=ROOT, stdout=-1, stderr=asyncio.subprocess.STDOUT
    )
    assert run.stdout is not None
    try:
        async with open_tab() as tab:
            await tab.look(await _page(run.stdout), 1100, height=1000)
            await tab.ask(WAITED)
            await tab.photograph(folder / "live.png")
        printed = await run.stdout.read()
        if await run.wait():
            raise RuntimeError(f"the run ended with status {run.returncode}: {printed.decode()[-2000:]}")
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()


async def _page(printed: asyncio.StreamReader) -> str:
    """The address of the run's live page, which it prints when it begins."""
    async for line in printed:
        print(line.decode(), end="")
        if found := re.match(rb"live view: (\S+)", line):
            return found[1].decode()
    raise RuntimeError("the run ended before it served its page")
