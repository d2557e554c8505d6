"""Times of a device become times of the host, whatever its clock shows and however busy its streams are."""

import pytest
import torch

from asyncpipe.core.engine.events import TaskCompleted
from asyncpipe.ops.device import device_clock
from tests.emulated import device as emu
from tests.emulated.helpers import X, layers, piped

DEVICE = torch.device("emu:0")


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
    first = clock.origin()
    assert first.error == pytest.approx(0.5e-5)
    now[0] = 0.5
    clock.tick()
    assert clock.origin() is first, "it is not old"
    now[0] = 2.0
    assert clock.origin() is first, "the step goes on"
    clock.tick()
    second = clock.origin()
    assert second is not first
    now[0], took[0] = 4.0, 0.1
    clock.tick()
    assert clock.origin() is second, "a long round trip tells less than the drift of two seconds"
