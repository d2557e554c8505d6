"""torch.distributed.pipelining reads the CSV that is written here, and what it writes is read here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from asyncpipe.core.graph.export import write_csv
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.csv_notation import CsvSchedule, read_csv, read_schedule
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, Overlap, Schedule, Shape, flat
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import ScheduleError

Entry = Action | Overlap
ORDERED = [name for name in known_schedules() if isinstance(find_schedule(name), OrderedSchedule)]
SHAPES = [Shape(v * p, m, p) for p, v, m in product((1, 2, 3, 4), (1, 2, 4), (1, 3, 4, 8, 9))]


def allowed(schedule: Schedule) -> Iterator[Shape]:
    """The shapes of the table that ``schedule`` can serve."""
    for shape in SHAPES:
        try:
            schedule.check(shape)
        except ScheduleError:
            continue
        yield shape


def stages_of(shape: Shape) -> list[Any]:
    """Stands for torch's stages of rank 0: torch's schedules only ask for some numbers before they run."""
    per_device = shape.stages // shape.devices
    return [
        SimpleNamespace(num_stages=shape.stages, group_size=shape.devices, group_rank=0, submod=None)
        for _ in range(per_device)
    ]


def loaded(path: Path, shape: Shape) -> _PipelineScheduleRuntime:
    """torch's schedule from the file at ``path``; torch checks it and adds its communication."""
    runtime = _PipelineScheduleRuntime(stages_of(shape), shape.microbatches)
    runtime._load_csv(str(path))
    return runtime


def kind_of(action: _Action) -> str:
    """The letters of an action's type. Up to torch 2.10 they are its text, and its value is a number."""
    kind = action.computation_type
    return kind.value if isinstance(kind.value, str) else str(kind)


def ours(action: _Action) -> Entry:
    """torch's action as one of ours."""
    if action.sub_actions is not None:
        assert kind_of(action) == "OVERLAP_F_B"
        first, second = map(ours, action.sub_actions)
        assert isinstance(first, Action)
        assert isinstance(second, Action)
        return Overlap(first, second)
    assert action.microbatch_index is not None
    return Action(TaskKind(kind_of(action)), action.microbatch_index, action.stage_index)


def entries_of(runtime: _PipelineScheduleRuntime) -> tuple[tuple[Entry, ...], ...]:
    """The entries of each rank, without the idle ones."""
    ranks = sorted(runtime.pipeline_order)
    return tuple(tuple(ours(action) for action in runtime.pipeline_order[rank] if action) for rank in ranks)


def dumped(runtime: _PipelineScheduleRuntime, path: Path) -> str:
    """The CSV text that torch writes, with torch's line ends."""
    # Up to torch 2.9, not all schedules are of this class, but this method of it serves them.
    _PipelineScheduleRuntime._dump_csv(runtime, str(path), format="compute_only")
    return path.read_bytes().decode()


@pytest.mark.parametrize("name", ORDERED)
def test_a_schedule_goes_to_torch_and_comes_back(name: str, tmp_path: Path) -> None:
    schedule = find_schedule(name)
    assert isinstance(schedule, OrderedSchedule)
    shapes = list(allowed(schedule))
    assert len(shapes) >= 5, "the table has shapes for every schedule"
    for shape in shapes:
        text = write_csv(schedule, shape)
        path = tmp_path / "ours.csv"
        path.write_text(text)
        runtime = loaded(path, shape)
        orders = tuple(tuple(schedule.order(device, shape)) for device in range(shape.devices))
        assert entries_of(runtime) == orders, shape
        placement = dict(enumerate(schedule.placement(shape)))
        assert runtime.stage_index_to_group_rank == placement, shape
        assert dumped(runtime, tmp_path / "torch.csv") == text.replace("\n", "\r\n"), "idle cells, too"
        back = read_schedule(str(tmp_path / "torch.csv"))
        assert (back.orders, back.shape) == (orders, shape)
        assert write_csv(back, shape) == text


TORCH_SCHEDULES = {
    ScheduleInterleaved1F1B: [Shape(v * p, m, p) for p, v, m in product((1, 2, 4), (1, 2, 3), (4, 8))],
    ScheduleLoopedBFS: [Shape(v * p, m, p) for p, v, m in product((1, 2, 4), (1, 2, 3), (1, 4, 7))],
    ScheduleInterleavedZeroBubble: [Shape(v * p, m, p) for p, v, m in product((1, 2, 4), (1, 2, 3), (4, 8))],
    ScheduleZBVZeroBubble: [Shape(2 * p, m, p) for p, m in product((1, 2, 4), (1, 4, 8, 11))],
    ScheduleDualPipeV: [Shape(2 * p, m, p) for p, m in product((1, 2, 4), (8, 10, 13))],
}


@pytest.mark.parametrize("kind", TORCH_SCHEDULES, ids=lambda kind: kind.__name__)
def test_what_torch_schedules_runs_here(kind: type[_PipelineScheduleRuntime], tmp_path: Path) -> None:
    for shape in TORCH_SCHEDULES[kind]:
        runtime = kind(stages_of(shape), shape.microbatches)
        path = tmp_path / "torch.csv"
        dumped(runtime, path)
        schedule = read_schedule(str(path))
        assert schedule.shape == shape
        assert schedule.orders == entries_of(runtime)
        assert dict(enumerate(schedule.placement(shape))) == runtime.stage_index_to_group_rank
        assert report(simulate(lower(schedule, shape))).seconds >= busiest(schedule)
        path.write_text(write_csv(schedule, shape))
        assert entries_of(loaded(path, shape)) == schedule.orders


def busiest(schedule: CsvSchedule) -> float:
    """The seconds of compute of the device that has the most."""
    costs = {"F": Costs().forward, "B": Costs().full_backward, "I": 1.0, "W": 1.0}
    return max(sum(costs[action.kind.value] for action in flat(order)) for order in schedule.orders)


def test_the_table_has_every_notation() -> None:
    """The tests above cover all types of actions, overlaps and idle cells."""
    kinds: set[str] = set()
    for kind, shapes in TORCH_SCHEDULES.items():
        runtime = kind(stages_of(shapes[-1]), shapes[-1].microbatches)
        for order in runtime.pipeline_order.values():
            kinds |= {"" if action is None else kind_of(action) for action in order}
    assert kinds == {"", "F", "B", "I", "W", "OVERLAP_F_B"}


def test_torch_overlooks_what_is_refused_here(tmp_path: Path) -> None:
    path = tmp_path / "junk.csv"
    path.write_text("0F0junk,0B0\n")
    assert entries_of(loaded(path, Shape(1, 1, 1))) == (
        (Action(TaskKind.FORWARD, 0, 0), Action(TaskKind.BACKWARD, 0, 0)),
    )
    with pytest.raises(ScheduleError, match=r"row 1, column 1 \(both counted from 1\): '0F0junk' is no action"):
        read_schedule(str(path))


@pytest.mark.parametrize("kind", TORCH_SCHEDULES, ids=lambda kind: kind.__name__)
def test_torchs_lowered_form_is_refused(kind: type[_PipelineScheduleRuntime], tmp_path: Path) -> None:
    path = tmp_path / "lowered.csv"
    shape = Shape(8, 8, 4)
    dumped(kind(stages_of(shape), shape.microbatches), path)
    loaded(path, shape)._dump_csv(str(path), format="compute_comms")
    with pytest.raises(ScheduleError, match=r"row 1, column 1 .* '0UNSHARD' belongs to torch's lowered form"):
        read_csv(path.read_text(), "lowered")
