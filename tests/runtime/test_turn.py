"""A turn: threads and coroutines of several loops have it one after the other, and nobody who gives up keeps it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from random import Random

import pytest
from thread_helpers import run_all

from asyncpipe.runtime.turn import Turn
from asyncpipe.runtime.waits import Waiting, drive, drive_blocking

SECONDS = 30


def using(turn: Turn, work: Callable[[], object], *, nested: bool) -> Waiting[None]:
    yield from turn.acquired(nested=nested)
    try:
        work()
    finally:
        turn.release()


def test_threads_and_coroutines_of_several_loops_never_have_it_together() -> None:
    turn, inside, most = Turn(), 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1

    def blocking() -> None:
        for _ in range(200):
            drive_blocking(using(turn, work, nested=True))

    def awaiting() -> None:
        async def main() -> None:
            await asyncio.gather(*(drive(using(turn, work, nested=False)) for _ in range(200)))

        asyncio.run(main())

    assert run_all(blocking, awaiting, blocking, awaiting) == [None] * 4
    assert most == 1


async def test_coroutines_have_it_in_the_order_in_which_they_ask() -> None:
    turn, order = Turn(), []
    await drive(turn.acquired(nested=False))
    asked = [asyncio.ensure_future(drive(using(turn, lambda k=k: order.append(k), nested=False))) for k in range(5)]
    await asyncio.sleep(0)
    turn.release()
    await asyncio.gather(*asked)
    assert order == [0, 1, 2, 3, 4]


async def test_a_caller_that_blocks_has_it_while_its_own_thread_has_it() -> None:
    """A hook at the end of a step calls the pipeline; a coroutine of that thread would have to wait for itself."""
    turn, done = Turn(), []
    await drive(turn.acquired(nested=False))
    drive_blocking(using(turn, lambda: done.append(1), nested=True))
    other = threading.Thread(target=lambda: drive_blocking(using(turn, lambda: done.append(2), nested=True)))
    other.start()
    assert done == [1]
    turn.release()
    await asyncio.to_thread(other.join, SECONDS)
    assert done == [1, 2]


@pytest.mark.parametrize("seed", range(6))
async def test_who_is_cancelled_while_it_waits_leaves_the_turn_to_the_next(seed: int) -> None:
    draw, turn, done = Random(seed), Turn(), []
    await drive(turn.acquired(nested=False))
    asked = [asyncio.ensure_future(drive(using(turn, lambda k=k: done.append(k), nested=False))) for k in range(6)]
    await asyncio.sleep(0)
    cancelled = set(draw.sample(range(6), 3))
    if draw.random() < 0.5:
        turn.release()  # The first one is granted the turn, and may be cancelled before it knows.
        for k in cancelled:
            asked[k].cancel()
    else:
        for k in cancelled:
            asked[k].cancel()
        turn.release()
    await asyncio.gather(*asked, return_exceptions=True)
    assert [asked[k].cancelled() for k in sorted(cancelled)] == [True] * 3
    assert [k for k in range(6) if k not in cancelled] == done
    await asyncio.wait_for(drive(using(turn, lambda: done.append(9), nested=False)), SECONDS)
    assert done[-1] == 9
