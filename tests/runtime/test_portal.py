"""The portal: results, errors, cancellation and interrupts cross between threads, and nothing is left running."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from asyncpipe.runtime.portal import Call, Portal
from asyncpipe.runtime.waiting import outlast


@pytest.fixture
def portal(no_leaks):
    made = Portal()
    yield made
    made.close()
    made.join()


async def double(number):
    await asyncio.sleep(0)
    return 2 * number


async def fail():
    raise ValueError("no")


def test_call(portal):
    assert portal.call(double(4)) == 8
    with pytest.raises(ValueError, match="no"):
        portal.call(fail())


async def test_run_from_another_loop(portal):
    assert await portal.run(double(4)) == 8
    with pytest.raises(ValueError, match="no"):
        await portal.run(fail())


class Slow:
    """Runs until cancelled, and takes its time to end."""

    def __init__(self):
        self.started, self.release, self.ended = threading.Event(), threading.Event(), threading.Event()

    async def run(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self.release.wait, 30)
            self.ended.set()


async def test_cancellation_waits_for_the_end(portal):
    slow = Slow()
    waiting = asyncio.ensure_future(portal.run(slow.run()))
    await asyncio.to_thread(slow.started.wait, 30)
    waiting.cancel()
    done, _ = await asyncio.wait([waiting], timeout=0)
    assert not done
    slow.release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slow.ended.is_set()


def test_an_interrupt_cancels_and_waits_for_the_end(portal):
    slow = Slow()
    slow.release.set()

    def interrupt():
        assert slow.started.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        portal.call(slow.run())
    assert slow.ended.is_set()
    thread.join()


def test_an_interrupt_before_the_coroutine_reached_the_loop(portal, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        portal.call(double(1))


def test_close_cancels_what_still_runs():
    portal = Portal()
    slow = Slow()
    slow.release.set()
    call = Call(portal._loop, slow.run())
    call.start()
    assert slow.started.wait(30)
    portal.close()
    portal.join()
    portal.close()
    assert slow.ended.is_set()
    assert isinstance(call.future.exception(30), asyncio.CancelledError)


async def test_outlast():
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(outlast(future))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    future.set_result(None)
    await waiting
