"""A case as a pipeline, by its face."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import Arguments, Microbatches, Pipeline, trace
from asyncpipe.compat.torchgpipe import GPipe
from asyncpipe.core.graph.export import write_csv
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.testing import InlineExecutor
from tests.campaigns.differential.cases import CALLS, Case, batch, build, loss_fn, sizes, tensors
from tests.campaigns.differential.hooks import HookCalls
from tests.campaigns.differential.reference import LEARNING_RATE, MOMENTUM, Observed, around, install, updates
from tests.campaigns.models.items import balance

RunStep = Callable[[int, str, Tensor, Tensor], tuple[Tensor | None, Any]]
"""Runs step number … of a kind on an input and a target: the loss, and the output."""


def run_pipelined(case: Case) -> Observed:
    """What the pipeline does."""
    model, layers = build(case)
    calls, observed = HookCalls(), Observed()
    for parameters in (False, True):
        install(layers, calls, parameters=parameters)
    with _opened(case, model) as run:
        for step, kind in enumerate(case.steps):
            x, target = batch(case, step)
            x.requires_grad_("input gradient" in case.options)
            if kind != "eval" and "accumulate" not in case.options:
                model.zero_grad()
            torch.manual_seed(case.seed + step)
            with around(case), nullcontext() if kind != "eval" else torch.no_grad():
                loss, output = run(step, kind, x, target)
            observed.losses.append(loss)
            observed.outputs.append([tensor.detach() for tensor in tensors(output)])
            if kind != "eval":
                observed.saw_gradients(model, x)
    observed.saw_state(model, calls)
    return observed


def loss_at(case: Case, distance: float) -> Tensor:
    """The loss of the first step, ``distance`` from the parameters in ``direction``; no gradients are made."""
    model, _ = build(case)
    with torch.no_grad():
        for (_, p), along in zip(trained(model), direction(case, model), strict=True):
            p.add_(along, alpha=distance)
    x, target = batch(case, 0)
    with _opened(case, model) as run, torch.no_grad():
        torch.manual_seed(case.seed)
        loss, _ = run(0, "train", x, target)
    assert loss is not None
    return loss


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters to train."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def direction(case: Case, model: nn.Module) -> list[Tensor]:
    """A direction in the space of parameters."""
    generator = torch.Generator().manual_seed(case.seed + 77)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for _, p in trained(model)]


@contextmanager
def _opened(case: Case, model: nn.Sequential) -> Iterator[RunStep]:
    loss = loss_fn(case)
    if case.face == "gpipe":
        yield _called(case, _drop_in(case, model), loss)
        return
    pipe = _pipeline(case, model, loss)
    if case.face != "step":
        with pipe.sync() as opened:
            yield _called(case, opened, loss) if case.face in CALLS else _stepped(case, opened, lambda result: result)
        return
    with asyncio.Runner() as runner:
        runner.run(_enter(pipe))
        try:
            yield _stepped(case, pipe, runner.run)
        finally:
            runner.run(pipe.aclose())


async def _enter(pipe: Pipeline) -> None:
    await pipe.__aenter__()


def _stepped(case: Case, pipe: Any, run: Callable[[Any], Any]) -> RunStep:
    def step(number: int, kind: str, x: Tensor, target: Tensor) -> tuple[Tensor | None, Any]:
        pipe.train(kind == "train")
        options = {"return_outputs": "no outputs" not in case.options, "update": updates(case, number)}
        result = run(pipe.step(_batch(case, x), _batch(case, target), **options))
        return result.loss, _gathered(case, result.outputs)

    return step


def _called(case: Case, pipe: Any, loss_fn: Callable[..., Any]) -> RunStep:
    def call(number: int, kind: str, x: Tensor, target: Tensor) -> tuple[Tensor | None, Any]:
        pipe.train(kind == "train")
        returned = pipe(_batch(case, x))
        output = _gathered(case, returned)
        loss = loss_fn(output, target)
        loss = loss[0] if case.loss == "counted" else loss
        if torch.is_grad_enabled():
            with torch.autocast("cpu", enabled=False):
                loss.backward()
        return loss.detach(), output

    return call


def _batch(case: Case, x: Tensor) -> Any:
    return Microbatches(x.split(sizes(case))) if "ready-made" in case.options else x


def _gathered(case: Case, outputs: Any) -> Any:
    """Ready-made micro-batches have a list of outputs; their tensors, gathered."""
    if "ready-made" not in case.options or outputs is None:
        return outputs
    return [torch.cat(column) for column in zip(*map(tensors, outputs), strict=True)]


def _pipeline(case: Case, model: nn.Sequential, loss: Callable[..., Any]) -> Pipeline:
    options: dict[str, Any] = {
        "microbatches": case.microbatches,
        "schedule": _schedule(case),
        "checkpoint": case.checkpoint,
        "order": "hint" if "hint" in case.options else "strict",
        "deferred_batch_norm": "deferred batch norm" in case.options,
    }
    if case.face not in CALLS:
        options |= {"loss_fn": loss, "loss_reduction": "sum" if case.loss == "sum" else "mean"}
    if "inline" in case.options:
        options["executors"] = InlineExecutor
    if "optimizer" in case.options:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM)
    given: Any = model
    if case.face.startswith("trace"):
        given = trace(model, Arguments.of(batch(case, 0)[0]), case.stages)
    else:
        options["balance"] = balance(case.cuts, len(model))
        given = list(model) if "list" in case.options else model
    return Pipeline(given, [f"cpu:{k}" for k in range(case.devices)], **options)


def _schedule(case: Case) -> Any:
    if case.schedule != "csv":
        return case.schedule
    shape = Shape(case.stages, min(case.microbatches, case.samples), case.devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(write_csv(find_schedule("1f1b"), shape), encoding="utf-8")
        return find_schedule(f"csv:{path}")


def _drop_in(case: Case, model: nn.Sequential) -> nn.Module:
    parts = balance(case.cuts, len(model))
    options = {"deferred_batch_norm": "deferred batch norm" in case.options}
    devices = ["cpu"] * case.stages
    return GPipe(model, parts, devices=devices, chunks=case.microbatches, checkpoint=case.checkpoint, **options)
