"""Schedules by name: built-in ones, plug-ins, options, instances."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules import registry
from asyncpipe.core.schedules.one_f_one_b import EagerOneFOneB
from asyncpipe.core.schedules.protocol import Action, B, F, OrderedSchedule, Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import OptionError, ScheduleError, UnknownScheduleError

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
        expected, times = (
            report(simulate(lower(found, Shape(p, m, p)))) for found in (find_schedule("1f1b"), schedule)
        )
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
    hint = f"did you mean 'gpipe'? known schedules: {known}; or give module:Class or csv:FILE"
    assert str(raised.value) == f"unknown schedule 'gpip'; {hint}"
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
