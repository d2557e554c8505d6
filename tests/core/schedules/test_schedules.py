"""The built-in schedules: complete, free of deadlock, and as fast and as sparing as their papers say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
from shapes import DEVICES, MICROBATCHES, held

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules import registry
from asyncpipe.core.schedules.one_f_one_b import EagerOneFOneB
from asyncpipe.core.schedules.protocol import Action, B, F, OrderedSchedule, Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import OptionError, ScheduleError, UnknownScheduleError

COSTS = (Costs(1, 2), Costs(3, 2))


def run(name: str, stages: int, microbatches: int, devices: int, costs: Costs) -> Report:
    graph = lower(find_schedule(name), Shape(stages, microbatches, devices))
    actions = sorted(task[1:4] for task in graph.tasks if task.kind is not TaskKind.COPY)
    everything = product((TaskKind.FORWARD, TaskKind.BACKWARD), range(microbatches), range(stages))
    assert actions == sorted(everything), "each forward and each backward is there once"
    return report(simulate(graph, costs))


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_makespan_and_peaks_have_their_closed_forms(name: str, costs: Costs) -> None:
    for p, m in product(DEVICES, MICROBATCHES):
        times = run(name, p, m, p, costs)
        assert times.seconds == (m + p - 1) * (costs.forward + costs.full_backward), (p, m)
        expected = tuple(m if name == "gpipe" else min(m, p - stage) for stage in range(p))
        assert times.peak_in_flight == expected, (p, m)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", DEVICES)
def test_interleaving_divides_the_bubble(p: int, v: int) -> None:
    """Bubble (p-1)(t_F + t_B)/v where p divides m, with t_F and t_B of all v virtual stages of a device.

    For other m, each of the micro-batches missing from the last round costs at most (v-1)/v of its
    t_F + t_B more, and less than that where there are more rounds to make up for it.
    """
    costs = Costs(1, 2)
    stage = costs.forward + costs.full_backward
    for m in MICROBATCHES:
        times = run("interleaved", p * v, m, p, costs)
        ideal = (m * v + p - 1) * stage
        missing = -m % p
        assert ideal <= times.seconds <= ideal + missing * (v - 1) * stage, m
        if m < p:
            assert times.seconds == ideal + missing * (v - 1) * stage, "the bound is tight where there is one round"
        if missing == 0 and m >= 2 * p:
            assert held(times, [TaskKind.BACKWARD])[0] / v == p + (p - 1) / v, m
        else:
            assert held(times, [TaskKind.BACKWARD])[0] <= p * v + p - 1, m


# Plug-ins. 1F1B as somebody else would write it: 11 lines.


class PlugIn(OrderedSchedule):
    name = "my-1f1b"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        warmup = min(shape.stages - device, shape.microbatches)
        yield from (F(i, device) for i in range(warmup))
        for i in range(shape.microbatches):
            yield B(i, device)
            if i + warmup < shape.microbatches:
                yield F(i + warmup, device)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Entry points of the schedules' group by name; what they load is called to make a schedule."""
    loaded: dict[str, object] = {"my-1f1b": PlugIn, "1f1b": object, "no-schedule": dict}

    def fake(*, group: str, name: str | None = None) -> list[SimpleNamespace]:
        assert group == "asyncpipe.schedules"
        names = loaded if name is None else [name] if name in loaded else []
        return [SimpleNamespace(name=known, load=lambda known=known: loaded[known]) for known in names]

    monkeypatch.setattr(registry, "entry_points", fake)
    return loaded


def assert_is_1f1b(schedule: Schedule) -> None:
    for p, m in product((1, 2, 4), (1, 3, 8)):
        expected = run("1f1b", p, m, p, Costs())
        times = report(simulate(lower(schedule, Shape(p, m, p))))
        assert times.tasks == expected.tasks


@pytest.mark.usefixtures("entry_points")
def test_a_plug_in_is_found_by_its_entry_point_and_built_in_names_win() -> None:
    found = find_schedule("my-1f1b")
    assert isinstance(found, PlugIn)
    assert_is_1f1b(found)
    assert find_schedule("1f1b").name == "1f1b"
    assert [known_schedules().count(name) for name in ("1f1b", "my-1f1b")] == [1, 1]
    with pytest.raises(UnknownScheduleError) as raised:
        find_schedule("gpip")
    known = ", ".join(sorted({*registry.BUILT_IN, "my-1f1b", "no-schedule"}))
    assert str(raised.value) == f"unknown schedule 'gpip'; known schedules: {known}; or give module:Class or csv:FILE"
    with pytest.raises(ScheduleError, match=r"'no-schedule' gives \{\}, which is not a Schedule"):
        find_schedule("no-schedule")


def test_a_name_may_have_options() -> None:
    assert find_schedule("eager-1f1b(cap=5)") == EagerOneFOneB(cap=5)
    assert find_schedule("asyncpipe.core.schedules.one_f_one_b:EagerOneFOneB( cap = 5 )") == EagerOneFOneB(cap=5)
    assert find_schedule("eager-1f1b()") == EagerOneFOneB()
    with pytest.raises(ScheduleError, match=r"options are integers by name, as in eager-1f1b\(cap=5\)"):
        find_schedule("eager-1f1b(5)")
    with pytest.raises(ScheduleError, match=r"'1f1b\(cap=5\)' cannot be made: TypeError"):
        find_schedule("1f1b(cap=5)")
    with pytest.raises(OptionError, match="cap must be a positive integer, got -5"):
        find_schedule("eager-1f1b(cap=-5)")
    with pytest.raises(UnknownScheduleError, match="unknown schedule 'nothing'"):
        find_schedule("nothing(cap=5)")


def test_an_instance_is_itself_and_anything_else_is_refused() -> None:
    assert find_schedule(plug_in := PlugIn()) is plug_in
    with pytest.raises(ScheduleError, match="must be a name or a Schedule instance, got 3"):
        find_schedule(3)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="must be a name or a Schedule instance"):
        find_schedule(PlugIn)  # type: ignore[arg-type]
