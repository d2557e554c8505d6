"""The portal: results, errors, cancellation and interrupts cross between threads, and nothing is left running."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from asyncpipe.errors import PipelineClosedError
from asyncpipe.runtime.portal import Portal, PortalCall, wait_uncancelled


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
        self.started, self.cancelled = threading.Event(), threading.Event()
        self.release, self.ended = threading.Event(), threading.Event()

    async def run(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
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

    monkeypatch.setattr(PortalCall, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        portal.call(double(1))


def test_a_second_close_lets_what_is_cancelled_come_to_its_end():
    portal = Portal()
    slow = Slow()
    call = portal.submit(slow.run())
    assert slow.started.wait(30)
    portal.close()
    assert slow.cancelled.wait(30)
    portal.close()
    portal.loop.call_soon_threadsafe(slow.release.set)
    portal.join()
    assert slow.ended.is_set()
    assert isinstance(call.future.exception(30), PipelineClosedError)


async def test_a_wait_that_is_cancelled_goes_on():
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(wait_uncancelled(future))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    future.set_result(None)
    await waiting


class Window:
    """Stops a portal's thread after the loop's stop, where it calls a method of the loop, until ``go_on``."""

    def __init__(self, portal, method):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._real = getattr(portal.loop, method)
        setattr(portal.loop, method, self._stop)

    def _stop(self):
        self.reached.set()
        assert self.go_on.wait(30)
        return self._real()


@pytest.mark.parametrize("method", ["shutdown_asyncgens", "close"])
def test_a_call_between_the_stop_and_the_close_of_the_loop_has_an_end(no_leaks, method):
    """The pipeline was open when the caller checked, and another thread has closed it since."""
    portal = Portal()
    window = Window(portal, method)
    portal.close()
    assert window.reached.wait(30)
    first, second = portal.submit(double(1)), portal.submit(double(2))
    second.cancel()
    assert isinstance(second.future.exception(10), asyncio.CancelledError)
    window.go_on.set()
    assert isinstance(first.future.exception(10), PipelineClosedError)
    portal.join()


def test_what_runs_or_is_about_to_when_the_portal_is_closed(no_leaks):
    portal = Portal()
    slow = Slow()
    slow.release.set()
    running = portal.submit(slow.run())
    assert slow.started.wait(30)
    held, let_go = threading.Event(), threading.Event()

    def hold():
        held.set()
        assert let_go.wait(30)

    portal.loop.call_soon_threadsafe(hold)
    assert held.wait(30)
    waiting = portal.submit(asyncio.Event().wait())
    portal.close()
    let_go.set()
    for call in (running, waiting):
        with pytest.raises(PipelineClosedError, match="the pipeline is closed"):
            call.wait()
    assert slow.ended.is_set()
    portal.join()


async def test_a_closed_portal_says_so(no_leaks):
    portal = Portal()
    done = portal.submit(double(1))
    assert done.wait() == 2
    portal.close()
    portal.join()
    portal.close()
    with pytest.raises(PipelineClosedError, match="the pipeline is closed"):
        portal.call(double(1))
    with pytest.raises(PipelineClosedError, match="the pipeline is closed"):
        await portal.run(double(1))
    done.cancel()
