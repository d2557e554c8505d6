"""Every known schedule trains the character model: gradients of the unsplit one, whatever is recomputed."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, Shape, TaskError
from asyncpipe.core.graph.export import write_csv
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.core.schedules.protocol import Action, OrderedSchedule, RuledSchedule
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.errors import ScheduleError

MODES = ("always", "except_last")
MICROBATCHES = 5
mse = nn.functional.mse_loss


def charlm() -> Any:
    """The example of ``examples/charlm``: tiny, in float64, with its own loss."""
    folder = str(Path(__file__).parents[2] / "examples" / "charlm")
    sys.path.insert(0, folder)
    try:
        build = __import__("charlm").build
    finally:
        sys.path.remove(folder)
        sys.modules.pop("charlm", None)
    torch.manual_seed(0)
    return build(width=8, heads=2, blocks=4, context=6, max_bytes=50_000, dropout=0.0)


class Example:
    """One batch for the example, and the unsplit model's results."""

    def __init__(self) -> None:
        workload = charlm()
        self._model = workload.model.double()
        self.loss_fn = workload.loss_fn
        self.x, self.target = next(workload.batches(10, torch.Generator().manual_seed(0)))
        bare = self.model()
        torch.autograd.backward(self.loss_fn(bare(self.x), self.target))
        self.gradients = [parameter.grad for parameter in bare.parameters()]

    def model(self) -> nn.Module:
        return copy.deepcopy(self._model)


@pytest.fixture(scope="module")
def example() -> Example:
    return Example()


def shapes(name: str) -> list[tuple[int, int]]:
    """(stages, devices) on two and three devices, as far as six layers go and the schedule allows."""
    schedule = find_schedule(name)
    found = []
    for devices in (2, 3):
        stages = devices * schedule.virtual
        try:
            schedule.check(Shape(stages, MICROBATCHES, devices))
        except ScheduleError:
            continue
        if stages <= 6:
            found.append((stages, devices))
    return found


def cases() -> list[Any]:
    """Every schedule on the most devices that it allows, strict and, of ordered ones, as a hint."""
    found = []
    for name in known_schedules():
        orders = ["strict", "hint"] if isinstance(find_schedule(name), OrderedSchedule) else ["strict"]
        found += [pytest.param(name, order, *shapes(name)[-1], id=f"{name}-{order}") for order in orders]
    return found


@pytest.mark.parametrize(("name", "order", "stages", "devices"), cases())
async def test_gradients_are_those_of_the_unsplit_model(name, order, stages, devices, example):
    for mode in MODES if order == "strict" else MODES[1:2]:
        model = example.model()
        async with Pipeline(
            model,
            [f"cpu:{k}" for k in range(devices)],
            stages=stages,
            microbatches=MICROBATCHES,
            schedule=name,
            order=order,
            checkpoint=mode,
            loss_fn=example.loss_fn,
        ) as pipe:
            await pipe.step(example.x, example.target)
        for ours, theirs in zip(model.parameters(), example.gradients, strict=True):
            assert (ours.grad - theirs).abs().max() < 1e-10, mode


def test_every_schedule_is_tried_on_several_devices():
    assert all(shapes(name) for name in known_schedules())


def linears() -> nn.Sequential:
    """Six layers, of which the first and the last share their weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()
    model[5].weight = model[0].weight
    return model


@pytest.mark.parametrize("name", known_schedules())
def test_calls_ties_and_updates_under_every_schedule(name):
    """Copies of tied parameters, sums and updates are scheduled, and so are forwards alone."""
    x, bare, model = torch.randn(8, 4).double(), linears(), linears()
    theirs = torch.optim.SGD(bare.parameters(), lr=0.1)
    with pipeline(
        model,
        schedule=name,
        checkpoint="never",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ).sync() as pipe:
        for _ in range(3):
            pipe.step(x, x)
            theirs.zero_grad()
            mse(bare(x), x).backward()
            theirs.step()
        for ours, wanted in zip(model.parameters(), bare.parameters(), strict=True):
            assert (ours - wanted).abs().max() < 1e-10
        mse(pipe(x), x).backward()
        theirs.zero_grad()
        mse(bare(x), x).backward()
        for ours, wanted in zip(model.parameters(), bare.parameters(), strict=True):
            assert (ours.grad - wanted.grad).abs().max() < 1e-10
        assert (pipe.eval().step(x).outputs - bare(x)).abs().max() < 1e-10


# Changing the schedule between two steps


def pipeline(model: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse, **options)


def first_backward(result: Any) -> str:
    """At stage 0."""
    return next(time.task.id for time in result.report.tasks if time.task.kind in "BI" and time.task.stage == 0)


async def test_the_schedule_changes_between_two_steps(workload):
    model = workload.model()
    async with pipeline(model, schedule="gpipe", checkpoint="never") as pipe:
        stages = pipe.stages
        for name, order, first in (
            ("gpipe", "strict", "B(3,0)"),
            ("1f1b", "strict", "B(0,0)"),
            ("zb-h1", "strict", "I(0,0)"),
            ("1f1b", "hint", "B(0,0)"),
            ("backward-first", "strict", "B(0,0)"),
            (OneFOneB(), "strict", "B(0,0)"),
        ):
            pipe.change_schedule(name, order=order)
            result = await pipe.step(workload.x, workload.target)
            await result.completed()
            assert workload.worst(model) < 1e-10, name
            assert first_backward(result) == first, name
            assert pipe.stages is stages
            model.zero_grad()
        assert pipe.schedule.name == "1f1b"


async def test_a_schedule_that_would_move_stages_is_refused_and_nothing_changes(workload):
    model = workload.model()
    async with pipeline(model, schedule="interleaved") as pipe:
        with pytest.raises(
            ScheduleError, match=r"'zbv' places stage 2 on cpu:1, but it is on cpu:0, where 'interleaved'"
        ):
            pipe.change_schedule("zbv")
        with pytest.raises(ScheduleError, match="'1f1b' puts one stage on each device, got 4 stages"):
            pipe.change_schedule("1f1b")
        assert pipe.schedule.name == "interleaved"
        pipe.change_schedule("looped-bfs")
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10


def test_a_call_goes_on_with_the_schedule_that_it_began_with(workload):
    model = workload.model()
    with pipeline(model, schedule="1f1b").sync() as pipe:
        output = pipe(workload.x)
        pipe.change_schedule("backward-first")
        mse(output, workload.target).backward()
        assert workload.worst(model) < 1e-10
        model.zero_grad()
        mse(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10


def test_a_copy_of_a_pipeline_has_the_schedule_of_the_moment(workload):
    pipe = pipeline(workload.model(), schedule="gpipe")
    pipe.change_schedule("1f1b", order="hint")
    assert copy.deepcopy(pipe).schedule.name == "1f1b as hint"


# From files, from modules, as objects


def test_a_csv_file_is_a_schedule(tmp_path, workload):
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(find_schedule("zbv"), Shape(4, 4, 2)), encoding="utf-8")
    model = workload.model()
    with pipeline(model, schedule=f"csv:{path}").sync() as pipe:
        pipe.step(workload.x, workload.target)
        assert [stage.device.name for stage in pipe.stages] == ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]
    assert workload.worst(model) < 1e-10


def test_module_and_class_are_a_schedule(workload):
    name = "asyncpipe.core.schedules.gpipe:GPipeSchedule"
    assert pipeline(workload.model(), schedule=name).schedule.name == "gpipe"
    for wrong, told in (
        ("asyncpipe.nowhere:GPipe", "cannot be imported: ModuleNotFoundError"),
        ("asyncpipe.core.schedules.gpipe:Nothing", "cannot be imported: AttributeError"),
        (
            "asyncpipe.core.schedules.protocol:Action",
            "'asyncpipe.core.schedules.protocol:Action' cannot be made: TypeError",
        ),
        ("asyncpipe.core.schedules.protocol:flat", "cannot be made: TypeError"),
        ("builtins:dict", r"'builtins:dict' gives \{\}, which is not a Schedule"),
    ):
        with pytest.raises(ScheduleError, match=told):
            pipeline(workload.model(), schedule=wrong)


# Rules at run time


class Moody(RuledSchedule):
    """A rule that admits all micro-batches or, once ``likes`` is false, none."""

    def __init__(self) -> None:
        self.likes = True

    def priority(self, action: Action, shape: Shape) -> bool:
        return action.kind is TaskKind.FORWARD

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        return self.likes


async def test_a_rule_that_stands_still_fails_its_step_and_the_next_one_is_right(workload, before_task):
    model, schedule = workload.model(), Moody()

    def sulk(task: Any) -> None:
        schedule.likes = False

    async with pipeline(model, schedule=schedule) as pipe:
        before_task(sulk)
        with pytest.raises(
            TaskError, match=r"schedule 'Moody', device cpu:\d: admit does not let F\(\d,\d\) in"
        ) as raised:
            await pipe.step(workload.x, workload.target)
        assert isinstance(raised.value.__cause__, ScheduleError)
        before_task(lambda task: None)
        schedule.likes = True
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10
