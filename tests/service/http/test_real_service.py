"""The API in front of the real service, which trains a tiny model: whole lives of jobs, and schemathesis meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from http_helpers import job, real

from asyncpipe.service.client import JobClient


async def test_a_job_from_submission_to_its_end(tmp_path: Path) -> None:
    async with real(tmp_path) as api:
        client = JobClient(api.base)

        def live() -> tuple[dict[str, Any], list[Any]]:
            made = client.submit(job())
            return client.wait(made["id"], timeout=40), list(client.events(made["id"]))

        ended, events = await asyncio.to_thread(live)
        assert (ended["state"], ended["step"], ended["asked"]) == ("finished", 20, None)
        assert [event.data["to"] for event in events if event.kind == "state"] == ["queued", "running", "finished"]
        losses = await asyncio.to_thread(lambda: list(client.losses(ended["id"])))
        assert [row["step"] for row in losses] == list(range(1, 21))
        history = await asyncio.to_thread(client.history, ended["id"])
        assert [row["to"] for row in history] == ["queued", "running", "finished"]


async def test_a_running_job_is_watched_paused_changed_and_resumed(tmp_path: Path) -> None:
    async with real(tmp_path) as api:
        _, made, _ = await api.ask("POST", "/v1/jobs", job(steps=10**6))
        place = f"/v1/jobs/{made['id']}"
        async with api.session.get(f"{api.base}{place}/events") as stream:
            await until(stream, "step")
            _, state, _ = await api.ask("GET", f"/jobs/{made['id']}/state")
            assert (state["job"], state["ended"]) == ("demo", False)
            status, changed, _ = await api.ask("PUT", f"{place}/schedule", {"schedule": "1f1b"})
            assert (status, changed["schedule"]) == (200, "1f1b")
            assert (await api.ask("POST", f"{place}/pause", {}))[0] == 200
            while (await until(stream, "state"))["data"]["to"] != "paused":
                pass
            assert (await api.ask("POST", f"{place}/resume", {}))[0] == 200
            await until(stream, "step")
            assert (await api.ask("POST", f"{place}/cancel", {}))[0] == 200
            await until(stream, "end")
        status, answer, _ = await api.ask("POST", f"{place}/resume", {})
        assert (status, answer["state"]) == (409, "cancelled")


async def until(stream: Any, kind: str) -> Any:
    """The data of the next event of this kind."""
    async with asyncio.timeout(40):
        while (line := await stream.content.readline()) != f"event: {kind}\n".encode():
            assert line, f"the stream ended before {kind}"
        return json.loads((await stream.content.readline()).removeprefix(b"data: "))


async def test_a_service_that_drains_says_so(tmp_path: Path) -> None:
    async with real(tmp_path) as api:
        await api.service.drain("the node goes down")
        status, answer, _ = await api.ask("GET", "/readyz")
        assert (status, "the node goes down" in answer["detail"]) == (503, True)
        assert (await api.ask("GET", "/livez"))[0] == 200
        assert (await api.ask("POST", "/v1/jobs", job()))[0] == 503


async def test_a_full_queue_says_when_to_ask_again(tmp_path: Path) -> None:
    async with real(tmp_path, max_queued=1, max_running=1, isolation="thread") as api:
        statuses = []
        for _ in range(6):
            status, _, headers = await api.ask("POST", "/v1/jobs", job(steps=10**6))
            statuses.append(status)
            if status == 503:
                assert int(headers["Retry-After"]) > 0
        assert set(statuses) == {201, 503}


async def test_a_full_queue_lets_no_paused_job_in(tmp_path: Path) -> None:
    async with real(tmp_path, max_queued=1, max_running=1, isolation="thread") as api:
        first = await api.submitted(**job(steps=10**6))
        while (await api.ask("GET", f"/v1/jobs/{first}"))[1]["state"] != "running":
            pass
        place = f"/v1/jobs/{await api.submitted(**job())}"
        assert (await api.ask("POST", f"{place}/pause", {}))[0] == 200
        await api.submitted(**job())
        status, answer, headers = await api.ask("POST", f"{place}/resume", {})
        assert (status, answer["type"].rpartition(":")[2]) == (503, "queue-full")
        assert int(headers["Retry-After"]) > 0
        assert (await api.ask("GET", place))[1]["state"] == "paused"
        assert (await api.ask("POST", f"/v1/jobs/{first}/cancel", {}))[0] == 200
