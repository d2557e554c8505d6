"""Workers start, stop and are replaced; nothing is left of them, and what they inherit is the controller's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
from forking import in_child, raised_by
from worker_helpers import SECONDS, Recorded, folders, is_alive, is_there, open_files, until

from asyncpipe.errors import OptionError, WorkerLostError, WorkerStartError
from asyncpipe.runtime.workers import supervisor
from asyncpipe.runtime.workers.launcher import Invitation
from asyncpipe.runtime.workers.local_process import LocalProcess
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from asyncpipe.runtime.workers.supervisor import WorkerLimits


async def test_two_workers_answer_and_nothing_is_left():
    recorded = Recorded()
    async with recorded.group as group:
        first, second = await group.start("first", "second")
        assert not folders(), "the socket's folder is gone as soon as all have connected"
        assert group.workers == {"first": first, "second": second}
        answers = await asyncio.gather(first.ask(("echo", 1)), second.ask(("later", 2)), first.ask(("echo", 3)))
        assert answers == [1, 2, 3]
        first.send(("send", *range(100)))
        assert await first.ask(("echo", "behind")) == "behind"
        assert recorded.heard == [("first", number) for number in range(100)]
        pids = {first.pid, second.pid}
        assert len(pids) == 2
        assert os.getpid() not in pids
        assert first.place == second.place
        assert (first.place.host, first.place.address) == (os.uname().nodename, "127.0.0.1")
    assert not any(map(is_there, pids))
    assert group.workers == {}
    assert len(recorded.heard) == 100, "a worker that is stopped is not lost"
    with pytest.raises(WorkerLostError, match="worker 'first' was stopped"):
        first.send(("echo", 1))


async def test_a_worker_has_the_controllers_path_folder_and_environment_and_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("MINE", "environment")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise ImportError('this is no module of Python')")
    invitations = []

    class Watched(ProcessLauncher):
        async def start(self, invitation: Invitation) -> LocalProcess:
            invitations.append(invitation)
            return await super().start(invitation)

    async with Recorded(launcher=Watched({"MORE": "of it"})).group as group:
        workers = await group.start("a", "b")
        facts = await workers[0].ask(("facts",))
    assert facts["path"] == [str(tmp_path / entry) for entry in sys.path]
    assert facts["argv"] == sys.argv
    assert facts["folder"] == str(tmp_path)
    assert (facts["environment"]["MINE"], facts["environment"]["MORE"]) == ("environment", "of it")
    assert not facts["torch"], "what serves no model imports no torch"
    assert facts["threads"] == 2, "the main thread, and the one that answers pings"
    assert facts["stdin"] == ""
    first, second = invitations
    assert (first.secret, len(first.secret)) == (second.secret, 32)
    assert first.token != second.token
    for secret in (first.secret, first.secret.hex().encode(), first.token.hex().encode()):
        assert secret not in facts["command"]
        assert secret not in repr(facts["environment"]).encode()
        assert secret not in repr(first).encode()


@pytest.mark.promise(
    "A lost worker", "A worker that is killed is reported with how it ended, and another one takes its place."
)
async def test_a_worker_that_is_killed_is_lost_and_another_one_takes_its_place():
    recorded = Recorded()
    async with recorded.group as group:
        worker, other = await group.start("worker", "other")
        question = asyncio.create_task(worker.ask(("never",)))
        await worker.ask(("echo", "it has come"))
        worker.kill("F(0,1) hangs")
        loss = await recorded.loss()
        assert str(loss) == "worker 'worker' was killed by its controller: F(0,1) hangs"
        assert loss.exit_status == -signal.SIGKILL
        with pytest.raises(WorkerLostError, match="F\\(0,1\\) hangs"):
            await question
        assert not is_there(worker.pid)
        assert group.workers == {"other": other}
        (successor,) = await group.start("worker")
        assert await successor.ask(("echo", "again")) == "again"
        assert await other.ask(("echo", "still")) == "still"
        with pytest.raises(OptionError, match="taken: other, twice"):
            await group.start("other", "twice", "third", "twice")
        start = asyncio.create_task(group.start("third"))
        await asyncio.sleep(0)
        with pytest.raises(OptionError, match="taken: third"):
            await group.start("third")
        assert [worker.name for worker in await start] == ["third"]
    with pytest.raises(OptionError, match="async with"):
        await group.start("late")


async def test_a_worker_that_is_killed_may_write_down_first_what_it_does(capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "STACK_SECONDS", SECONDS)
    written: list[str] = []

    def is_written() -> bool:
        written.append(capfd.readouterr().err)
        return "in hold_gil" in "".join(written)

    recorded = Recorded()
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        worker.send(("hold_gil",))
        await until("it is inside", lambda: recorded.heard)
        worker.kill("it hangs", stacks=True)
        await until("its stacks are written", is_written)
        os.kill(worker.pid, signal.SIGKILL)  # Its controller would do it at the end of the time.
        loss = await recorded.loss()
    assert loss.how == "was killed by its controller: it hangs"
    assert "in hold_gil" in loss.stderr


async def test_one_that_does_not_stop_is_killed_and_is_not_lost():
    recorded = Recorded(limits=WorkerLimits(ping=0.02, stop=0.05))
    async with recorded.group as group:
        blocked, stopped = await group.start("blocked", "stopped")
        blocked.send(("block",))
        os.kill(stopped.pid, signal.SIGSTOP)
    assert not is_there(blocked.pid)
    assert not is_there(stopped.pid)
    assert recorded.heard == []


async def test_signals_to_the_whole_group_of_processes_are_the_controllers():
    recorded = Recorded()
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker.pid, number)
            assert await worker.ask(("echo", number)) == number
        forked = await worker.ask(("fork",))
        os.kill(forked, signal.SIGTERM)  # Its children are not protected.
        await until("the child has ended", lambda: not is_alive(forked))


class Fails(ProcessLauncher):
    """Gives the worker that is called ``bad`` another entry."""

    def __init__(self, entry: str) -> None:
        super().__init__()
        self.entry = entry
        self.pids: list[int] = []

    async def start(self, invitation: Invitation) -> LocalProcess:
        if invitation.name == "bad":
            invitation = Invitation("bad", self.entry, invitation.address, invitation.secret, invitation.token)
        process = await super().start(invitation)
        self.pids.append(process.pid)
        return process


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("worker_entries:fails", "exited with status 1.*this entry fails before it serves"),
        ("worker_entries:nothing", "exited with status 1.*'worker_entries:nothing' names no function"),
        ("no_such_module:f", "exited with status 1.*No module named 'no_such_module'"),
    ],
)
async def test_if_one_does_not_start_none_is_left(entry, message):
    recorded = Recorded(launcher=(launcher := Fails(entry)))
    async with recorded.group as group:
        with pytest.raises(WorkerStartError, match=f"(?s)worker 'bad' did not start: it {message}"):
            await group.start("good", "bad")
        assert len(launcher.pids) == 2
        assert not any(map(is_there, launcher.pids))
        assert group.workers == {}
        (good,) = await group.start("good")
        assert await good.ask(("echo", 1)) == 1
    assert recorded.heard == []
    assert not folders()


async def test_a_launcher_that_fails_is_a_start_that_fails(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr("asyncpipe.runtime.workers.child_process.get_executable", lambda: "/no/such/python")
    async with Recorded().group as group:
        with pytest.raises(WorkerStartError, match=r"could not be launched .FileNotFoundError") as raised:
            await group.start("worker")
        assert isinstance(raised.value.__cause__, FileNotFoundError)


async def test_a_start_that_is_cancelled_leaves_nothing():
    async with Recorded(launcher=(launcher := Fails("worker_entries:hangs"))).group as group:
        start = asyncio.create_task(group.start("good", "bad"))
        await until("both are started", lambda: len(launcher.pids) == 2)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not any(map(is_there, launcher.pids))
    assert not folders()


async def test_a_group_that_is_dropped_kills_its_workers(new_threads):
    recorded = Recorded()
    group = await recorded.group.__aenter__()
    workers = await group.start("a", "b")
    group.kill()
    assert "was killed with its group" in str(await recorded.loss())
    await recorded.loss()
    assert not any(is_there(worker.pid) for worker in workers)
    await until("its thread has ended", lambda: not new_threads())
    await group.close()


NOT_CLOSED = """
import asyncio, sys
sys.path[:0] = {path!r}
from worker_helpers import Recorded

async def main():
    workers = await (await Recorded().group.__aenter__()).start("one", "two")
    print(*(worker.pid for worker in workers), flush=True)

asyncio.run(main())
"""


@pytest.mark.promise("A lost worker", "No worker outlives its controller.")
def test_a_group_that_is_not_closed_when_the_interpreter_ends_kills_its_workers():
    command = [sys.executable, "-c", NOT_CLOSED.format(path=sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(map(is_there, pids))


async def test_rounds_leave_no_file_and_no_thread(new_threads):
    files = 0
    for turn in range(8):
        async with Recorded().group as group:
            (worker,) = await group.start("worker")
            if turn % 2:
                worker.kill("this is a test")
                await worker.ended.wait()
        files = files or open_files()
        assert open_files() == files
        assert new_threads() == 0
        assert not is_there(worker.pid)


async def test_where_the_path_of_a_socket_would_be_too_long_workers_connect_by_loopback(monkeypatch, tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    async with Recorded().group as group:
        (worker,) = await group.start("worker")
        assert await worker.ask(("echo", 1)) == 1
    assert list(folder.iterdir()) == []


async def test_a_forked_child_can_neither_send_nor_end_the_workers():
    async with Recorded().group as group:
        (worker,) = await group.start("worker")
        told = in_child(lambda: (raised_by(lambda: worker.send(1)), raised_by(lambda: worker.kill("no")), group.kill()))
        assert all("forked child" in text for text in told[:2])
        assert await worker.ask(("echo", 1)) == 1


async def test_silence_counts_only_while_this_process_listens(monkeypatch):
    """The group's thread waits for a terminal that takes nothing, for longer than a worker may be silent."""
    limits = WorkerLimits(ping=0.02, silent=1.0)
    waited = []

    class Terminal:
        def write(self, text: str) -> None:
            waited.append(threading.Event().wait(1.5 * limits.silent))

        def flush(self) -> None:
            pass

    recorded = Recorded(limits=limits)
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        monkeypatch.setattr(sys, "stderr", Terminal())
        worker.send(("write", "to the terminal"))
        await until("it is written", lambda: waited)
        monkeypatch.undo()
        trips = worker.supervisor.clock.round_trips
        await until("pings are answered", lambda: worker.supervisor.clock.round_trips > trips + 5)
    assert recorded.heard == []


@pytest.mark.promise("A lost worker", "A program that blocks its event loop loses no worker.")
async def test_a_caller_that_blocks_its_loop_loses_no_worker():
    recorded = Recorded(limits=WorkerLimits(ping=0.01, silent=SECONDS))
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        trips = worker.supervisor.clock.round_trips
        for _ in range(int(SECONDS / 0.01)):
            if worker.supervisor.clock.round_trips > trips + 20:
                break
            threading.Event().wait(0.01)
        assert worker.supervisor.clock.round_trips > trips + 20, "pings are answered meanwhile"
        assert await worker.ask(("echo", 1)) == 1
    assert recorded.heard == []


@pytest.mark.promise("GPUs", "A worker sees only its own accelerators.")
@pytest.mark.parametrize(("visible", "seen"), [(None, ("1,3", "2", None)), ("7,5,6,4", ("5,4", "6", "7,5,6,4"))])
async def test_a_worker_sees_its_own_accelerators_alone(monkeypatch, visible, seen):
    """So none of its threads can make a context on another one's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    devices = {"a": ("cuda:3", "cuda:1", "cuda:1#1"), "b": ("cuda:2",), "c": ("cpu:0",)}
    async with Recorded().group as group:
        workers = await group.start(*devices, devices=devices)
        facts = [(await worker.ask(("facts",)))["environment"] for worker in workers]
        assert tuple(each.get("CUDA_VISIBLE_DEVICES") for each in facts) == seen
        assert [each["CUDA_DEVICE_MAX_CONNECTIONS"] for each in facts] == ["8"] * 3
        assert [worker.has_own_accelerators for worker in workers] == [True, True, False]
