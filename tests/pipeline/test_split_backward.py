"""Pipelines whose schedules split the backward: the gradients of the unsplit model, and nothing kept after W."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from asyncpipe import Pipeline, TaskError
from asyncpipe.core.schedules.protocol import Action, F, I, OrderedSchedule, Shape, W
from asyncpipe.testing import InlineExecutor

MODES = ("always", "except_last", "selective", "never")
mse = nn.functional.mse_loss


@dataclass(frozen=True)
class Split(OrderedSchedule):
    """1F1B with each backward in halves: W right behind I, or every W at the end, the last micro-batch's first."""

    late: bool = False

    def check(self, shape: Shape) -> None:
        pass

    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        mine = range(device, shape.stages, shape.devices)
        yield from self._order(mine, shape) if len(mine) == 1 else self._breadth_first(mine, shape)

    def _order(self, mine: range, shape: Shape) -> Iterator[Action]:
        (stage,) = mine
        warmup = min(shape.stages - stage, shape.microbatches)
        yield from (F(i, stage) for i in range(warmup))
        for i in range(shape.microbatches):
            yield from self._halves(i, stage)
            if i + warmup < shape.microbatches:
                yield F(i + warmup, stage)
        if self.late:
            yield from (W(i, stage) for i in reversed(range(shape.microbatches)))

    def _breadth_first(self, mine: range, shape: Shape) -> Iterator[Action]:
        yield from (F(i, stage) for stage in mine for i in range(shape.microbatches))
        for stage in reversed(mine):
            for i in range(shape.microbatches):
                yield from self._halves(i, stage)
        if self.late:
            yield from (W(i, stage) for stage in mine for i in range(shape.microbatches))

    def _halves(self, i: int, stage: int) -> Iterator[Action]:
        yield I(i, stage)
        if not self.late:
            yield W(i, stage)


SCHEDULES = [Split(), Split(late=True)]
both = pytest.mark.parametrize("schedule", SCHEDULES, ids=["W after I", "W at the end"])


def pipeline(model: Any, stages: int, devices: int | None = None, **options: Any) -> Pipeline:
    options = {"schedule": SCHEDULES[1], "loss_fn": mse, "microbatches": 4} | options
    return Pipeline(model, [f"cpu:{k}" for k in range(devices or stages)], stages=stages, **options)


@both
@pytest.mark.parametrize(("stages", "devices"), [(1, 1), (3, 3), (4, 2)])
async def test_equal_to_the_unsplit_model(workload, schedule, stages, devices):
    for mode, microbatches in zip(MODES, (5, 1, 5, 1), strict=False):
        threaded, inline = workload.model(), workload.model()
        options = {"schedule": schedule, "checkpoint": mode, "microbatches": microbatches}
        async with pipeline(threaded, stages, devices, **options) as pipe:
            result = await pipe.step(workload.x, workload.target)
        async with pipeline(inline, stages, devices, executors=InlineExecutor, **options) as pipe:
            await pipe.step(workload.x, workload.target)
        kinds = {task.kind.value for task in result.record.graph.tasks}
        assert kinds >= {"F", "I", "W"}
        assert "B" not in kinds
        case = f"{mode}, {microbatches} micro-batches"
        assert workload.worst(threaded) < 1e-10, case
        assert abs(result.loss - workload.loss) < 1e-10, case
        for ours, theirs in zip(threaded.parameters(), inline.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), case


class Several(nn.Module):
    """Two values in, two out and one that needs no gradient; its weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.position = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, y, count = values
        hidden = self.linear(x + self.position).tanh()
        return self.linear(hidden) + y, y * hidden, count + 1


@both
@pytest.mark.parametrize("mode", MODES)
async def test_several_inputs_and_outputs_and_ties(schedule, mode):
    """With a weight that the first and the last stage share, on different devices."""

    def make() -> nn.Sequential:
        torch.manual_seed(5)
        model = nn.Sequential(Several(), Several(), Several())
        model[2].linear.weight = model[0].linear.weight
        return model

    bare, model = make(), make()
    x = torch.randn(8, 6, dtype=torch.float64)
    batch = (x, x.cos(), torch.zeros(8, dtype=torch.long))

    def loss_fn(values, target):
        return mse(values[0], target) + values[1].square().mean()

    loss_fn(bare(batch), x).backward()
    async with pipeline(model, 3, schedule=schedule, checkpoint=mode, loss_fn=loss_fn) as pipe:
        result = await pipe.step(batch, x)
    assert torch.equal(result.outputs[2], torch.full((8,), 3))
    for (name, ours), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-10, name


@both
async def test_gradients_accumulate_over_steps_and_frozen_stages_work(workload, schedule):
    model = workload.model()
    model[0].requires_grad_(False)
    async with pipeline(model, 3, schedule=schedule) as pipe:
        for _ in range(2):
            await pipe.step(workload.x, workload.target)
    for parameter, wanted in zip(model.parameters(), workload.gradients, strict=True):
        if parameter.requires_grad:
            assert (parameter.grad - 2 * wanted).abs().max() < 1e-10
        else:
            assert parameter.grad is None


@both
async def test_dropout_autocast_scaler_and_counts(schedule):
    """The results are those of a whole backward, with the same random streams, casts and weights."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.LayerNorm(16))
    x = torch.randn(8, 16)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def loss_fn(output, target):
        return mse(output.float(), target), torch.tensor(len(target))

    found = []
    for how in ("1f1b", schedule):
        for mode in MODES:
            model.zero_grad()
            torch.manual_seed(6)
            async with pipeline(model, 2, schedule=how, checkpoint=mode, loss_fn=loss_fn) as pipe:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    await pipe.step(x, x, scaler=scaler)
            found.append([p.grad.clone() for p in model.parameters()])
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=1e-2, atol=1e-4)


# What is kept


class Kept:
    """A tensor that autograd saves, wrapped so that it can be counted."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class Saving(nn.Module):
    """Notes the tensors that the graph of its layers saves."""

    def __init__(self, note: Callable[[weakref.ref[Kept]], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
        self._note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            self._note(weakref.ref(kept))
            return kept

        with saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return self.layers(x)


@contextmanager
def collector_off() -> Iterator[None]:
    """Turns the cycle collector off: tensors must be freed without it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@both
@pytest.mark.parametrize("mode", MODES)
async def test_after_w_nothing_of_the_microbatch_is_alive(before_task, schedule, mode):
    saved: defaultdict[tuple[int, int], list[weakref.ref[Kept]]] = defaultdict(list)
    ran: list[Any] = []
    kept = []

    def look(task):
        """Tasks run one at a time, so saved tensors belong to the task that began last."""
        if ran and ran[-1].kind == "W":
            assert not alive(ran[-1]), ran[-1].id
        if task.kind == "W":
            kept.append(alive(task))
        ran.append(task)

    def alive(task):
        return sum(reference() is not None for reference in saved[task.microbatch, task.stage])

    def note(reference):
        saved[ran[-1].microbatch, ran[-1].stage].append(reference)

    before_task(look)
    model = nn.Sequential(*(Saving(note) for _ in range(3)))
    x = torch.randn(8, 6, dtype=torch.float64)
    with collector_off():
        async with pipeline(model, 3, schedule=schedule, checkpoint=mode, executors=InlineExecutor) as pipe:
            await pipe.step(x, x)
        assert len(kept) == 12
        assert all(kept)
        assert not any(reference() is not None for references in saved.values() for reference in references)


# Failure


class Boom(Exception):
    """The fault."""


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("task_id", ["W(1,0)", "W(3,1)"])
async def test_a_failed_step_drops_what_waits_for_w(before_task, mode, task_id):
    """Also while the error, and with it the traceback, is alive."""
    saved: list[weakref.ref[Kept]] = []

    def fault(task):
        if task.id == task_id:
            assert any(reference() is not None for reference in saved)
            raise Boom

    before_task(fault)
    model = nn.Sequential(*(Saving(saved.append) for _ in range(2)))
    x = torch.randn(8, 6, dtype=torch.float64)
    with collector_off():
        async with pipeline(model, 2, checkpoint=mode, executors=InlineExecutor) as pipe:
            with pytest.raises(TaskError) as caught:
                await pipe.step(x, x)
            assert caught.value.task_id == task_id
            assert not any(reference() is not None for reference in saved)


@pytest.mark.parametrize("kind", ["I", "W"])
@pytest.mark.parametrize("mode", ["always", "never"])
async def test_an_error_in_either_half_names_its_task(workload, no_leaks, mode, kind):
    model = workload.model()

    def fail(gradient):
        raise Boom

    class Fails(nn.Module):
        def forward(self, x):
            # The gradient of what is made of the weight alone is W's.
            failing, weight = (x, model[4].weight) if kind == "I" else (model[4].weight * 1,) * 2
            if failing.requires_grad:
                failing.register_hook(fail)
            return nn.functional.linear(x, weight, model[4].bias)

    layers = nn.Sequential(*model[:4], Fails(), *model[5:])
    async with Pipeline(
        layers,
        ["cpu:0", "cpu:1"],
        balance=[3, 5],
        microbatches=2,
        schedule=SCHEDULES[1],
        checkpoint=mode,
        loss_fn=mse,
    ) as pipe:
        with pytest.raises(TaskError) as caught:
            await pipe.step(workload.x, workload.target)
        assert caught.value.kind == kind
        assert isinstance(caught.value.__cause__, Boom)
        del caught
