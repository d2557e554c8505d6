"""The example of an application that embeds the service: it trains what is asked of it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncpipe.service.job_states import JobState
from asyncpipe.service.store.job_store import JobStore

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(
        find_spec("fastapi") is None or find_spec("pydantic_settings") is None,
        reason="the example needs FastAPI and pydantic-settings: pip install -e '.[service]'",
    ),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
APP = EXAMPLES / "embedded_service" / "app.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, whose models say little when they are trained."""
    spec = spec_from_file_location("embedded_service_app", APP)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.JOB["parameters"], "sample_length", 2)
    return module


@asynccontextmanager
async def running(example: ModuleType, folder: Path) -> AsyncIterator[Any]:
    """A client of the application, which runs during the block."""
    from aiohttp import ClientSession

    from asyncpipe.observe.http_server import served
    from asyncpipe.service.settings.service_settings import ServiceSettings

    settings = ServiceSettings(
        devices=["cpu:0", "cpu:1"], entries=["charlm:build"], entry_path=EXAMPLES / "charlm", folder=folder
    )
    async with (
        served(example.make_app(settings), "127.0.0.1", 0, "the example") as port,
        ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def post(client: Any, steps: object, key: str | None = None) -> tuple[int, Any]:
    async with client.post(f"/models?steps={steps}", headers={} if key is None else {"Idempotency-Key": key}) as answer:
        return answer.status, await (answer.json() if answer.status < 400 else answer.text())


async def get(client: Any, path: str) -> Any:
    async with client.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await (answer.json() if answer.content_type == "application/json" else answer.text())


async def events(client: Any, job: str) -> list[str]:
    """The names of all events until there are no more."""
    async with client.get(f"/training/v1/jobs/{job}/events") as answer:
        lines = [line.decode() async for line in answer.content]
    return [line.removeprefix("event: ").strip() for line in lines if line.startswith("event: ")]


async def test_it_trains_what_is_asked_of_it(example, tmp_path):
    async with running(example, tmp_path / "service") as client:
        assert "Hello! 0 models are in training" in await get(client, "/")
        status, made = await post(client, 4, "mine")
        assert status == 201
        status, again = await post(client, 4, "mine")
        assert (status, again["id"]) == (200, made["id"])
        told = await events(client, made["id"])
        assert told[-1] == "end"
        assert {"state", "note", "snapshot"} <= set(told)
        async with client.get(f"/training/v1/jobs/{made['id']}/events") as answer:
            text = await answer.text()
        assert "held-out loss" in text
        assert "sample: def " in text, "what the model has learned"
        found = await get(client, f"/models/{made['id']}")
        assert (found["state"], found["step"]) == ("finished", 4)
        assert 0 < found["loss"] < 6
        (job,) = (await get(client, "/training/v1/jobs"))["jobs"]
        assert (job["id"], job["state"], job["snapshot"]) == (made["id"], "finished", "step-4")
        page = await get(client, "/training/")
        assert "<html" in page
        assert (await get(client, "/training/readyz"))["ready"]
        curve = (await get(client, f"/training/v1/jobs/{made['id']}/losses"))["losses"]
        assert [row["step"] for row in curve] == [1, 2, 3, 4]


async def test_it_refuses_in_words(example, tmp_path):
    async with running(example, tmp_path / "service") as client:
        for steps in ("0", "-1"):
            status, text = await post(client, steps)
            assert status == 422
            assert "training.steps: must be an integer from 1 to" in text
        assert (await post(client, "many"))[0] == 422
        async with client.get("/models/nothing") as answer:
            assert answer.status == 404
            assert "nothing" in await answer.text()


async def test_a_model_goes_on_when_the_application_starts_again(example, tmp_path):
    async with running(example, tmp_path / "service") as client:
        _, made = await post(client, 10**9, "long")
        async with client.get(f"/training/v1/jobs/{made['id']}/events") as answer:
            async for line in answer.content:
                if line.startswith(b"event: step"):
                    break
    async with running(example, tmp_path / "service") as client:
        assert (await post(client, 10**9, "long"))[1]["id"] == made["id"]
        async with client.get(f"/training/v1/jobs/{made['id']}/events") as answer:
            text = ""
            async for line in answer.content:
                text += line.decode()
                if "going on after step" in text and line.startswith(b"event: step"):
                    break
        assert (await get(client, f"/models/{made['id']}"))["state"] == "running"
        headers = {"Content-Type": "application/json"}
        async with client.post(f"/training/v1/jobs/{made['id']}/cancel", data=b"{}", headers=headers) as answer:
            assert answer.status == 200
        assert (await events(client, made["id"]))[-1] == "end"
        assert (await get(client, f"/models/{made['id']}"))["state"] == "cancelled"


async def test_uvicorn_ends_it_gracefully_though_a_stream_and_a_page_are_open(tmp_path):
    """As a person runs it, in a process of its own, which SIGTERM ends."""
    command = [sys.executable, "-m", "uvicorn", "--factory", "--app-dir", str(APP.parent), "--port", "0"]
    command += ["--timeout-graceful-shutdown", "1"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "ASYNCPIPE_ISOLATION": "thread"}
    process = await asyncio.create_subprocess_exec(
        *command, "app:application", cwd=tmp_path, env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        said = ""
        while (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", said)) is None:
            line = await process.stderr.readline()
            assert line, said
            said += line.decode()
        job = await watched_to_the_end(found.group(1), process)
        said += (await process.stderr.read()).decode()
        # uvicorn raises the signal again when it has ended.
        assert await process.wait() in (0, -signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "Application shutdown complete" in said
    async with JobStore(tmp_path / "runs" / "embedded" / "jobs.sqlite3") as store:
        record = await store.get(job)
    assert (record.state, record.snapshot is not None) == (JobState.QUEUED, True)


async def watched_to_the_end(url: str, process: asyncio.subprocess.Process) -> str:
    """Submits a job, loads the page, reads the streams while SIGTERM comes, until both end; gives the job."""
    from aiohttp import ClientError, ClientSession

    async with ClientSession(url) as client:
        _, made = await post(client, 10**9)
        assert "<html" in await get(client, "/training/")
        async with (
            client.get(f"/training/v1/jobs/{made['id']}/events") as stream,
            client.get(f"/training/jobs/{made['id']}/events") as page,
        ):
            assert await page.content.readline()
            while not (await stream.content.readline()).startswith(b"event: step"):
                pass
            process.send_signal(signal.SIGTERM)
            for each in (stream, page):
                with suppress(ClientError):  # uvicorn cuts them off.
                    await each.read()
    return str(made["id"])
