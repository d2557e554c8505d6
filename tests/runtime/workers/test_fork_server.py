"""What workers are forked from: they are as fresh interpreters, and lose nothing when it is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from worker_helpers import Recorded, is_alive, is_there, open_files, until

from asyncpipe.runtime.portal import new_event_loop
from asyncpipe.runtime.workers import fork_server
from asyncpipe.runtime.workers.fork_server import ForkServer

pytestmark = [
    pytest.mark.skipif(not ForkServer.AVAILABLE, reason="this system has no descriptors of processes"),
]


def listed(pid: int) -> str:
    """Its last argument, as ``ps`` shows it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").rpartition(b"\0")[2].decode()


async def test_workers_are_forked_from_one_process_and_share_nothing_that_they_draw():
    async with Recorded().group as group:
        workers = await group.start("first", "second")
        facts = [await worker.ask(("facts",)) for worker in workers]
        (server,) = {each["parent"] for each in facts}
        assert server != os.getpid()
        assert listed(server) == f"fork server of {os.getpid()}"
        assert [listed(worker.pid) for worker in workers] == ["first", "second"]
        assert facts[0]["drawn"] != facts[1]["drawn"]
        assert [each["threads"] for each in facts] == [2, 2]
        pipes = [{file for file in each["files"] if file.startswith(("pipe:", "socket:"))} for each in facts]
        assert pipes[0]
        assert not pipes[0] & pipes[1], "one has what keeps the other alive"
    await until("it has ended", lambda: not is_there(server))


async def test_a_worker_is_a_fresh_interpreter_where_the_environment_has_changed(monkeypatch):
    async with Recorded().group as group:
        (first,) = await group.start("first")
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        (second,) = await group.start("second")
        facts = await second.ask(("facts",))
        assert facts["environment"]["OMP_NUM_THREADS"] == "3"
        assert facts["parent"] == os.getpid()
        assert (await first.ask(("facts",)))["parent"] != os.getpid()


@pytest.mark.promise(
    "Everything ends",
    "If the process that forks workers stops or dies, workers continue, and later ones start without it.",
)
async def test_a_server_that_is_stopped_is_killed_and_workers_start_without_it(monkeypatch):
    new_event_loop().close()  # libuv opens a pipe for the whole process with its first loop.
    before = open_files()
    async with Recorded().group as group:
        (first,) = await group.start("first")
        server = (await first.ask(("facts",)))["parent"]
        monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.3)
        os.kill(server, signal.SIGSTOP)
        (second,) = await group.start("second")
        assert (await second.ask(("facts",)))["parent"] == os.getpid()
        await until("it has ended", lambda: not is_there(server))
        monkeypatch.undo()
        (third,) = await group.start("third")
        assert (await third.ask(("facts",)))["parent"] not in (server, os.getpid())
        assert [await each.ask(("echo", 1)) for each in (first, second, third)] == [1, 1, 1]
    assert open_files() == before


@pytest.mark.promise(
    "Everything ends",
    "If the process that forks workers stops or dies, workers continue, and later ones start without it.",
)
async def test_workers_outlive_their_server_and_the_next_one_has_another(tmp_path):
    recorded = Recorded()
    before = open_files()
    async with recorded.group as group:
        (first,) = await group.start("first")
        server = (await first.ask(("facts",)))["parent"]
        os.kill(server, signal.SIGKILL)
        await until("it has ended", lambda: not is_there(server))
        assert await first.ask(("echo", 1)) == 1
        (second,) = await group.start("second")
        assert (await second.ask(("facts",)))["parent"] not in (server, os.getpid())
        first.send(("exit", 3))
        loss = await recorded.loss()
        assert loss.worker == "first"
        assert loss.exit_status is None, "nobody knows"
        assert await second.ask(("echo", 2)) == 2
    assert open_files() == before
    assert not is_alive(first.pid)
