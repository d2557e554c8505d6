"""Whatever becomes of a worker is noticed, and said by one error; and no worker lives on without its controller."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from thread_helpers import HOLDS_THE_LOCK
from worker_helpers import SECONDS, Recorded, is_alive, is_there, until

from asyncpipe.errors import WorkerLostError, WorkerStartError
from asyncpipe.runtime.workers import channel
from asyncpipe.runtime.workers.launcher import WorkerExit
from asyncpipe.runtime.workers.supervisor import WorkerLimits

ROOT = Path(__file__).parents[3]
MANY = 20_000
"""Messages that no socket holds all of."""
OUTLIVES = 5.0
"""Seconds that a worker may live on without its controller."""


@pytest.mark.parametrize(
    ("deed", "status", "how"),
    [
        (("exit", 3), 3, "exited with status 3"),
        (("exit", 0), 0, "exited with status 0"),
        (("signal", signal.SIGKILL), -9, "was killed by SIGKILL"),
        (("crash",), -signal.SIGSEGV, "was killed by SIGSEGV"),
        (("fail", ValueError("no answer is awaited")), 1, "exited with status 1"),
    ],
)
async def test_a_worker_that_ends_is_lost_behind_its_last_words(deed, status, how, capfd):
    recorded = Recorded()
    async with recorded.group as group:
        worker, other = await group.start("worker", "other")
        questions = [asyncio.create_task(worker.ask(("never",))) for _ in range(3)]
        await asyncio.sleep(0)
        worker.send(("send", "last", "words"))
        worker.send(deed)
        loss = await recorded.loss()
        assert (loss.worker, loss.how, loss.exit_status, loss.running) == ("worker", how, status, ())
        assert [message for _, message in recorded.heard] == ["last", "words", loss]
        errors = await asyncio.gather(*questions, return_exceptions=True)
        assert [str(error) for error in errors] == [str(loss)] * 3
        assert len({id(error) for error in (*errors, loss)}) == 4, "each has a traceback of its own"
        with pytest.raises(WorkerLostError, match=how):
            worker.send(1)
        with pytest.raises(WorkerLostError, match=how):
            await worker.ask(1)
        assert not is_there(worker.pid)
        assert await other.ask(("echo", 1)) == 1
        worker.kill("it is dead")
        await worker.stop()
    written = capfd.readouterr().err
    assert ("Fatal Python error: Segmentation fault" in written) == (deed == ("crash",))
    assert ("no answer is awaited" in written) == (deed[0] == "fail")
    assert loss.stderr.strip() in written


async def test_the_error_has_the_end_of_what_the_worker_wrote(capfd):
    recorded = Recorded()
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        worker.send(("exit", 1, "begin" + "é" * 10_000 + "end"))
        loss = await recorded.loss()
    assert loss.stderr.endswith("éend")
    assert 4000 < len(loss.stderr.encode()) <= 4200
    assert loss.stderr in str(loss)
    assert capfd.readouterr().err == "begin" + "é" * 10_000 + "end"


async def test_what_a_workers_child_holds_open_does_not_delay_its_loss():
    recorded = Recorded()
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        child = await worker.ask(("fork",))
        os.kill(worker.pid, signal.SIGKILL)
        try:
            assert (await recorded.loss()).how == "was killed by SIGKILL"
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("deed", [("signal", signal.SIGSTOP), pytest.param(("hold_gil",), marks=HOLDS_THE_LOCK)])
async def test_a_worker_that_is_frozen_is_lost(deed):
    recorded = Recorded(limits=WorkerLimits(ping=0.02, silent=0.7))
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        worker.send(deed)
        loss = await recorded.loss()
        assert loss.how == "has not answered for 0.7 s"
        assert worker.silent_seconds > 0.6
        assert not is_there(worker.pid)


async def test_a_worker_whose_main_thread_computes_is_not_lost():
    recorded = Recorded(limits=WorkerLimits(ping=0.02, silent=SECONDS, stop=0.01))
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        worker.send(("block",))
        trips = worker.supervisor.clock.round_trips
        await until("pings are answered", lambda: worker.supervisor.clock.round_trips > trips + 20)
    assert recorded.heard == []


async def test_what_a_worker_has_sent_arrives_though_it_has_ended_since(monkeypatch):
    monkeypatch.setattr(channel, "READS_PER_TURN", 1)  # It ends with its messages unread.
    recorded = Recorded()
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        worker.send(("say_and_exit", MANY // 10))
        loss = await recorded.loss()
        assert [message for _, message in recorded.heard] == [*range(MANY // 10), loss]


def test_the_errors_say_what_ran_and_can_be_pickled():
    loss = WorkerLostError("w", str(WorkerExit(-11)), -11, stderr="Fatal").while_running(["F(0,1)", "B(2,0)"])
    assert str(loss) == "worker 'w' was killed by SIGSEGV, while it ran F(0,1), B(2,0); its stderr ends with:\nFatal"
    start = WorkerStartError("w", "exited with status 1", "oh")
    for error in (loss, start):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), vars(again)) == (str(error), vars(error))
    assert [str(WorkerExit(status)) for status in (None, 4, -9, -40)] == [
        "ended, with a status that is not known",
        "exited with status 4",
        "was killed by SIGKILL",
        "was killed by signal 40",
    ]


CONTROLLER = """
import asyncio, os, signal, sys, time
sys.path[:0] = {path!r}
from worker_helpers import Recorded
from asyncpipe.runtime.workers.supervisor import WorkerLimits

async def main():
    group = Recorded(limits=WorkerLimits(silent=1000)).group
    await group.__aenter__()
    workers = await group.start("idle", "computes", "holds the GIL", "is stopped")
    for worker, deed in zip(workers, [("echo", 1), ("block",), ("hold_gil",), ("signal", signal.SIGSTOP)]):
        worker.send(deed)
    child = os.fork()  # Has copies of all that the controller has open.
    if not child:
        time.sleep(1000)
    print(child, *(worker.pid for worker in workers), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_no_worker_outlives_its_controller(number):
    script = CONTROLLER.format(path=[str(ROOT), str(ROOT / "tests/support")])
    command = [sys.executable, "-c", script]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert controller.stdout is not None
    with controller.stdout:
        child, *workers = map(int, controller.stdout.readline().split())
    try:
        assert len(workers) == 4
        states = "/proc/{}/stat"
        await until("one is stopped", lambda: ") T " in Path(states.format(workers[3])).read_text())
        assert all(map(is_alive, workers))
        controller.send_signal(number)
        async with asyncio.timeout(OUTLIVES):
            assert controller.wait() == -number
            await until("no worker is alive", lambda: not any(map(is_alive, workers)))
        assert is_alive(child), "this is a worse case than the usual one"
    finally:
        for pid in (child, controller.pid, *workers):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        controller.wait(SECONDS)
