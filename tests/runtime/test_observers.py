"""Observers cannot fail or delay a step, and their failures are logged and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from asyncpipe.core.engine.events import Outcome
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.runtime import observers as observing
from asyncpipe.runtime.driver import Driver
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.thread_executor import ThreadExecutor

GRAPH = lower(find_schedule("gpipe"), Shape(1, 1, 1))


def record(step: int = 0) -> StepRecord:
    return StepRecord(step, GRAPH, [], Outcome.OK)


class Keeper:
    """Keeps the numbers of the steps, and calls a function with each record."""

    def __init__(self, also: Callable[[StepRecord], None] = lambda record: None) -> None:
        self.steps: list[int] = []
        self.threads: list[str] = []
        self._also = also

    def step_completed(self, record: StepRecord) -> None:
        self.steps.append(record.step)
        self.threads.append(threading.current_thread().name)
        self._also(record)


def fail(record: StepRecord) -> None:
    raise LookupError("broken")


class Counter(Keeper):
    """Also counts the failures of other observers."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[str] = []

    def observer_failed(self, reason: str) -> None:
        self.troubles.append(reason)


class Clock:
    """Replaces the module's clock; a test can let time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(observing, "time", made)
    return made


@pytest.fixture
def opened() -> Iterator[Callable[..., Observers]]:
    made: list[Observers] = []

    def make(*observers: Keeper) -> Observers:
        made.append(Observers(observers))
        return made[-1]

    yield make
    for observers in made:
        observers.close()
        observers.join()


def slow_once(clock: Clock) -> Keeper:
    def block(record: StepRecord) -> None:
        if record.step == 0:
            clock.now += 1.0

    return Keeper(block)


def test_one_that_raises_is_logged_and_removed_and_the_others_go_on(
    opened: Callable[..., Observers], caplog: pytest.LogCaptureFixture
) -> None:
    first, broken, last = Keeper(), Keeper(fail), Counter()
    observers = opened(first, broken, last)
    observers.show(record(0))
    observers.show(record(1))
    assert (first.steps, broken.steps, last.steps) == ([0, 1], [0], [0, 1])
    assert observers.shown == [first, last]
    assert last.troubles == ["raised"]
    (line,) = caplog.records
    assert "failed and is removed" in line.getMessage()
    assert line.exc_info is not None


def test_one_without_the_method_is_logged_and_removed(
    opened: Callable[..., Observers], caplog: pytest.LogCaptureFixture
) -> None:
    observers = opened(object(), last := Counter())  # type: ignore[arg-type]
    observers.show(record(0))
    assert (observers.shown, last.steps, last.troubles) == ([last], [0], ["raised"])
    assert "failed and is removed" in caplog.text


def test_one_that_is_slow_once_gets_a_thread(
    opened: Callable[..., Observers], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = slow_once(clock), Counter()
    observers = opened(slow, quick)
    for step in range(3):
        observers.show(record(step))
    observers.close()
    observers.join()
    assert slow.steps == quick.steps == [0, 1, 2]
    here = threading.current_thread().name
    assert slow.threads == [here, "asyncpipe observer", "asyncpipe observer"]
    assert set(quick.threads) == {here}
    assert quick.troubles == ["slow"]
    assert ["held up the loop for 1 s" in line.getMessage() for line in caplog.records] == [True]


def test_what_a_blocked_one_cannot_take_is_dropped_and_counted(
    opened: Callable[..., Observers], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    begun, free = threading.Event(), threading.Event()

    def block(record: StepRecord) -> None:
        if record.step == 0:
            clock.now += 1.0
        else:
            begun.set()
            free.wait(30)

    keeper, counter = Keeper(block), Counter()
    observers = opened(keeper, counter)
    observers.show(record(0))
    observers.show(record(1))
    assert begun.wait(30)
    for step in range(2, 2 + observing.MOST_WAITING + 3):
        observers.show(record(step))
    assert counter.troubles == ["slow", *["dropped"] * 3]
    free.set()
    observers.close()
    observers.join()
    assert keeper.steps == list(range(2 + observing.MOST_WAITING))
    assert sum("is too slow; it does not get every record" in line.getMessage() for line in caplog.records) == 1


def test_one_that_raises_in_its_thread_is_removed(
    opened: Callable[..., Observers], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def block(record: StepRecord) -> None:
        clock.now += 1.0
        if record.step:
            raise LookupError

    keeper, counter = Keeper(block), Counter()
    observers = opened(keeper, counter)
    observers.show(record(0))
    observers.show(record(1))
    observers.close()
    observers.join()
    assert observers.shown == [counter]
    assert counter.troubles == ["slow", "raised"]
    assert caplog.records[-1].exc_info is not None


def test_closing_does_not_wait_for_ever(
    opened: Callable[..., Observers], clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observing, "PATIENCE", 0.01)
    begun, free = threading.Event(), threading.Event()

    def block(record: StepRecord) -> None:
        if record.step == 0:
            clock.now += 1.0
        else:
            begun.set()
            free.wait(30)

    observers = opened(Keeper(block))
    observers.show(record(0))
    observers.show(record(1))
    assert begun.wait(30)
    observers.close()
    observers.join()
    assert "its thread is left behind" in caplog.records[-1].getMessage()
    free.set()


async def test_the_driver_notes_how_late_the_loop_was_and_how_long_it_took() -> None:
    times = iter(range(1000))
    records: list[StepRecord] = []

    class Last:
        def step_completed(self, record: StepRecord) -> None:
            records.append(record)

    driver = Driver({"dev:0": ThreadExecutor("dev:0")}, clock=lambda: float(next(times)))
    tenant = Tenant(observers=Observers([Last()]))
    driver.open()
    for _ in range(2):
        execution = await driver.run(GRAPH, lambda task: lambda: None, tenant=tenant)
        await execution.completed()
    driver.close()
    driver.join()
    # Every reading of this clock is a second later: woken, run, done. A wake-up counts for the record that follows it.
    assert len(records) == 2
    assert records[1].notes.wakeups
    assert all(late >= 1 and took == 1 for late, took in records[1].notes.wakeups)
    assert records[0].notes.wakeups is not records[1].notes.wakeups


async def test_devices_are_noted_only_for_observers() -> None:
    noted = []

    driver = Driver({"dev:0": ThreadExecutor("dev:0")})
    driver.open()
    for observers in ([], [Keeper()]):
        tenant = Tenant(observers=Observers(observers, noted.append))
        execution = await driver.run(GRAPH, lambda task: lambda: None, tenant=tenant)
        await execution.completed()
    driver.close()
    driver.join()
    assert len(noted) == 1
