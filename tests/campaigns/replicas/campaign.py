"""Runs cases: one pipeline with all micro-batches, replicas on threads, and replicas in worker processes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe import DevicePool, Pipeline
from asyncpipe.errors import AsyncpipeError
from tests.campaigns.harness import OPTIONS, Campaign, Run, Verdict
from tests.campaigns.replicas.cases import TABLE, Case, draw, make_model

__all__ = ["CAMPAIGN", "judge_all"]

MAPPING = {f"cpu:{number}": "abcd"[number % 4] for number in range(16)}
"""The worker of each device: so a replica has several workers, and a worker stages of several replicas."""
CLOSE = 1e-10
ROUNDED = 0.1
"""How far weights and losses may be from those of sums that were never rounded to bfloat16, after three steps of AdamW,
which turn a small gradient's rounding into a step of 0.01 the other way. ``tests/ops/execute`` has the exact sums."""
TOGETHER = 27
SECONDS = 600.0


def _batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, samples, 6, generator=generator, dtype=torch.float64)
    return x, target


def _counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A mean over some of the samples, with their number; sometimes over none."""
    of_sample, use = (output - target).square().sum(1), target[:, 0] > -0.3
    return of_sample[use].mean() if use.any() else of_sample.sum() * 0, int(use.sum())


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"loss_fn": functional.mse_loss},
    "sum": {"loss_fn": partial(functional.mse_loss, reduction="sum"), "loss_reduction": "sum"},
    "counted": {"loss_fn": _counted},
}
OPTIMIZERS: dict[str, Any] = {
    # Of a gradient that is nothing but rounding, a smaller eps makes a whole step.
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "none": None,
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "bfloat16": {"gradient_dtype": "bfloat16"},
}


async def _trained(case: Case, pool: DevicePool, *, replicated: bool) -> list[Tensor]:
    """Losses, outputs, gradients, and everything in the state."""
    model = make_model(case)
    devices: Any = [f"cpu:{number}" for number in range(case.devices)]
    options: dict[str, Any] = {"microbatches": case.microbatches * case.replicas}
    if replicated:
        devices = [
            [f"cpu:{row * case.devices + number}" for number in range(case.devices)] for row in range(case.replicas)
        ]
        options = {"microbatches": case.microbatches, **WAYS[case.way]}
    options |= {"schedule": case.schedule, "checkpoint": case.checkpoint, "optimizer": OPTIMIZERS[case.optimizer]}
    if case.norm == "batch" and case.seed % 2:
        options["deferred_batch_norm"] = True
    found: list[Tensor] = []
    torch.manual_seed(3)
    async with Pipeline(model, devices, pool=pool, **options, **LOSSES[case.loss]) as pipe:
        batches = [_batch(step, case.size) for step in range(len(case.updates))]
        if case.ahead:
            async for result in pipe.steps(batches, ahead=case.ahead):
                found += [result.loss, result.outputs]
        for (x, target), update in zip(batches, case.updates, strict=True) if not case.ahead else ():
            result = await pipe.step(x, target, update=update)
            found += [result.loss, result.outputs]
            if case.optimizer == "none":
                found += _updated(model)
        pipe.eval()
        found.append((await pipe.step(*_batch(99, case.size))).loss)
        found += [each.double() for each in pipe.state_dict().values()]
        found += [value for state in pipe.optimizer_states().values() for value in state.values()]
    # Without anything that is counted a loss is not a number, in all ways.
    return [each.detach().nan_to_num(nan=-1e30) for each in found]


def _updated(model: nn.Module) -> Iterator[Tensor]:
    """The gradients, which the caller's own optimizer then uses."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad
        parameter.data = parameter.detach() - 0.01 * parameter.grad
        parameter.grad = None


def judge_all(cases: Sequence[Case]) -> Iterator[Verdict]:
    """The verdicts of ``cases``, whose workers they share."""
    warnings.filterwarnings("ignore")
    threads, remote = DevicePool(), DevicePool(workers=MAPPING)
    with asyncio.Runner() as runner:
        runner.run(threads.__aenter__())
        runner.run(remote.__aenter__())
        try:
            yield from (runner.run(_judge(case, threads, remote)) for case in cases)
        finally:
            runner.run(remote.aclose())
            runner.run(threads.aclose())


async def _judge(case: Case, threads: DevicePool, remote: DevicePool) -> Verdict:
    topic = f"{case.way}, {case.schedule}"
    try:
        many = await _trained(case, threads, replicated=True)
        one = await _trained(case, threads, replicated=False)
        close = ROUNDED if case.way == "bfloat16" else CLOSE
        apart = [_apart(*each) for each in zip(one, many, strict=True)]
        if (most := max(apart)) > close:
            return Verdict("wrong", f"{most:.3g} from one pipeline, number {apart.index(most)}", topic=topic)
        if case.workers:
            far = await _trained(case, remote, replicated=True)
            if case.is_ordered and not all(map(torch.equal, many, far)):
                return Verdict("different", "threads and processes have other bits", topic=topic)
            if (most := max(_apart(*each) for each in zip(many, far, strict=True))) > close:
                return Verdict("different", f"{most:.3g} between threads and processes", topic=topic)
    except AsyncpipeError as error:
        return Verdict("error", f"{type(error).__name__}: {error}", topic=topic)
    return Verdict("equal" if case.workers and case.is_ordered else "close", topic=topic)


def _apart(one: Tensor, other: Tensor) -> float:
    """Relative to numbers that are larger than 1."""
    return (one - other).abs().max().item() / max(1.0, one.abs().max().item()) if one.numel() else 0.0


def _work(run: Run) -> None:
    if run.options.cases == 0:
        run.judge([TABLE[first : first + TOGETHER] for first in range(0, len(TABLE), TOGETHER)], judge_all, SECONDS)
    else:
        run.judge((list(map(draw, chunk)) for chunk in run.chunks(TOGETHER)), judge_all, SECONDS)


CAMPAIGN = Campaign(
    "replicas",
    _work,
    {"cases": (500, "how many; 0: the table of all combinations")}
    | {name: OPTIONS[name] for name in ("processes", "case", "here")},
    draw,
    lambda case: f"--case {case.seed}" if case not in TABLE else f"--cases 0  # {case}",
)
