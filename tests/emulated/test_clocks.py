"""Times of a device become times of the host, whatever its clock shows and however busy its streams are."""

import pytest
import torch

from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.ops.device import device_clock
from asyncpipe.ops.device.streams import AcceleratorStream, record
from tests.emulated import device as emu
from tests.emulated.helpers import X, layers, piped

DEVICE = torch.device("emu:0")


@pytest.mark.promise("GPUs", "Task times on a device share one clock, and no thread that issues tasks waits for it.")
def test_lanes_of_a_device_share_a_clock_and_tasks_are_in_order(monkeypatch):
    monkeypatch.setattr(device_clock, "LASTS", 0.0)
    emu._state.offset, emu._state.drift = 12.5, 1e-4
    with piped(layers(), ["emu:0"] * 2) as pipe:
        for _ in range(3):
            record = pipe.step(X).wait().record
            times = {e.task: (e.started, e.ended) for _, e in record.journal if isinstance(e, TaskCompleted)}
            late = [times[edge.dependency][1] - times[edge.task][0] for edge in record.graph.edges()]
            assert max(late) <= 1e-5  # What a float of milliseconds cannot tell.
    assert list(device_clock._clocks) == [DEVICE]


@pytest.mark.promise("GPUs", "Task times on a device share one clock, and no thread that issues tasks waits for it.")
def test_a_new_origin_is_taken_at_the_border_of_two_steps_and_only_a_better_one(monkeypatch):
    now, took = [0.0], [1e-5]
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(device_clock, "LASTS", 1.0)
    real = emu.Event.synchronize

    def synchronize(event):
        now[0] += took[0]
        real(event)

    monkeypatch.setattr(emu.Event, "synchronize", synchronize)
    clock = device_clock.DeviceClock(DEVICE)
    first = clock.origin
    assert first.error == pytest.approx(0.5e-5)
    now[0] = 0.5
    clock.refresh()
    clock.tick()
    assert clock.origin is first, "it is not old"
    now[0] = 2.0
    clock.refresh()
    assert clock.origin is first, "the step goes on"
    clock.tick()
    second = clock.origin
    assert second is not first
    now[0], took[0] = 4.0, 0.1
    clock.refresh()
    clock.tick()
    assert clock.origin is second, "a long round trip tells less than the drift of two seconds"


@pytest.mark.promise("GPUs", "Task times on a device share one clock, and no thread that issues tasks waits for it.")
def test_no_thread_that_issues_tasks_waits_for_the_clock(monkeypatch):
    monkeypatch.setattr(device_clock, "LASTS", 0.0)
    with piped(layers(), ["emu:0"] * 2) as pipe:
        emu.synchronized.clear()
        for _ in range(2):
            pipe.step(X).wait()
    assert set(emu.synchronized) == {"asyncpipe emu:0 completions", "asyncpipe emu:0#1 completions"}


@pytest.mark.promise("GPUs", "Task times on a device share one clock, and no thread that issues tasks waits for it.")
def test_a_task_has_one_event_and_begins_when_what_its_stream_waited_for_has_ended(monkeypatch):
    records = []
    real = emu.Event.record
    monkeypatch.setattr(emu.Event, "record", lambda event, stream=None: records.append(stream) or real(event, stream))
    one, two = AcceleratorStream(DEVICE), AcceleratorStream(DEVICE)

    def task(stream, takes, *after):
        """Its start and end, so many seconds from now by the device's clock."""
        for timing in after:
            stream.follow(timing)
        timing = stream.begin()
        emu._state.offset += takes
        timing.end()
        return timing

    first = task(one, 1.0)
    records.clear()
    second, other = task(two, 0.0), task(one, 2.0)
    third = task(two, 0.5, other)
    assert records == [two.stream, two.stream, one.stream, two.stream], "the first task of a stream has two"
    ends = [timing.wait()[1] for timing in (first, second, other, third)]
    fourth = task(two, 0.25, first)
    assert fourth.wait()[0] == pytest.approx(ends[3], abs=1e-5), "its stream was busy"
    fifth = task(two, 0.25, task(one, 0.5))
    assert fifth.wait()[0] == pytest.approx(fifth.wait()[1] - 0.25, abs=1e-3), "it waited for the other stream"
    emu._state.offset += 3.0
    two.wait(record(one.stream))
    sixth = task(two, 0.25)
    assert sixth.wait()[0] == pytest.approx(sixth.wait()[1] - 0.25, abs=1e-3), "for what is no task, it has a start"
