"""Runs a plan on a pool, and notes all that comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncpipe import Batch, DevicePool, Microbatches, Pipeline, Share
from asyncpipe.errors import AsyncpipeError
from tests.campaigns.models import layers as own
from tests.campaigns.models.items import layers_of
from tests.campaigns.workers.cases import Plan, Step

__all__ = ["Trace", "run_plan"]


@dataclass
class Trace:
    """What a run has given its caller, in order."""

    seen: list[tuple[str, Any]] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    """The steps of the plan that did not come to their end, since they were cancelled in time."""

    def add(self, name: str, value: Any) -> None:
        """Note every tensor in ``value``, and what else there is."""
        for k, leaf in enumerate(tree_leaves(value)):
            self.seen.append((f"{name}[{k}]", leaf.detach().clone() if isinstance(leaf, Tensor) else leaf))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.to(target.dtype), target)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return 0.01 * nn.functional.mse_loss(output.to(target.dtype), target, reduction="sum")


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return mse(output, target), target.numel()


def counted_tensor(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return mse(output, target), (target > 0).sum() + 1


LOSSES = {"mse": mse, "sum": summed, "counted": counted, "counted tensor": counted_tensor, "module": nn.MSELoss()}

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "nesterov foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
}


class _Run:
    """A plan under way."""

    def __init__(self, plan: Plan, cancelled: set[int] | None) -> None:
        self.plan = plan
        self.trace = Trace()
        self.cancelled = cancelled
        self.dtype = getattr(torch, plan.dtype)
        self.generator = torch.Generator()

    def batch(self, step: int, number: int = 0, fails: int = -1) -> tuple[Any, Any]:
        """A mini-batch of its own for each step. Sample, or micro-batch, number ``fails`` is not a number."""
        plan = self.plan
        chance = torch.Generator().manual_seed(plan.seed % 100_003 + 1009 * step + number)

        def pair(samples: int, length: int) -> tuple[Tensor, Tensor]:
            shape = {
                "vector": (own.WIDTH,),
                "sequence": (length, own.WIDTH),
                "image": (own.CHANNELS, own.SIDE, own.SIDE),
            }[plan.kind]
            return self._drawn((samples, *shape), chance), self._drawn((samples, *shape), chance)

        if plan.ready_made:
            pairs = [pair(2 + (plan.seed + i) % 3, plan.length + (i + step) % 2) for i in range(plan.microbatches)]
            if fails >= 0:
                pairs[fails % len(pairs)][0].fill_(torch.nan)
            return Microbatches([x for x, _ in pairs]), Microbatches([target for _, target in pairs])
        x, target = pair(plan.samples, plan.length)
        if fails >= 0:
            x[fails % len(x)] = torch.nan
        return x, target

    def _drawn(self, shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
        # It may begin anywhere in its memory.
        begin = self.plan.seed % 5
        return (
            torch.randn(math.prod(shape) + begin, generator=chance, dtype=torch.float64)
            .to(self.dtype)[begin:]
            .view(shape)
        )

    async def run(self, pool: DevicePool) -> Trace:
        plan = self.plan
        torch.manual_seed(plan.seed)
        layers = [layer.module for item in plan.items for layer in layers_of(plan.kind, item)]
        model = nn.Sequential(*layers)
        model = model.double() if self.dtype is torch.float64 else model.float()
        schedule: Any = plan.find(plan.schedule)
        pipe = Pipeline(
            model,
            list(plan.devices),
            pool=pool,
            schedule=schedule,
            order=plan.order,  # type: ignore[arg-type]
            balance=list(plan.balance),
            microbatches=plan.microbatches,
            checkpoint=plan.checkpoint,
            loss_fn=LOSSES[plan.loss],
            loss_reduction="sum" if plan.loss == "sum" else "mean",
            optimizer=OPTIMIZERS[plan.optimizer],
            deferred_batch_norm=plan.deferred,
            generator=self.generator,
            share=Share(plan.job, background=plan.background) if plan.job else None,
        )
        async with pipe:
            begin = {name: value.clone() for name, value in pipe.state_dict().items()}
            for k, step in enumerate(plan.steps):
                self.generator.manual_seed(plan.seed + k)
                try:
                    with self._autocast():
                        if self.cancelled is None or k not in self.cancelled:
                            await self._do(pipe, k, step, begin)
                        elif step.deed == "cancel and load":
                            await self._load(pipe, k, begin)
                except AsyncpipeError as error:
                    self.trace.add(f"{k} {step.deed}: error", f"{type(error).__name__}: {error}")
            self.trace.add("state", pipe.state_dict())
        return self.trace

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.plan.autocast):
            yield

    async def _do(self, pipe: Pipeline, k: int, step: Step, begin: dict[str, Tensor]) -> None:
        deed, name = step.deed, f"{k} {step.deed}"
        if deed in ("train", "accumulate"):
            self._note(name, await pipe.step(*self.batch(k), update=deed == "train"))
        elif deed.startswith("evaluate"):
            pipe.eval()
            try:
                x, target = self.batch(k)
                self._note(name, await (pipe.step(x) if "without" in deed else pipe.step(x, target)))
            finally:
                pipe.train()
        elif deed == "change":
            pipe.change_schedule(self.plan.find(step.schedule))
        elif deed == "freeze":
            layer = pipe.module[step.number % len(pipe)]  # type: ignore[index]
            for parameter in layer.parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        elif deed == "state":
            self.trace.add(name, pipe.state_dict())
        elif deed == "load":
            pipe.load_state_dict(begin)
        elif deed == "overlap":
            await self._overlap(pipe, k, step.number)
        elif deed == "fail":
            self._note(name, await pipe.step(*self.batch(k, fails=step.number), update=step.number % 2 == 0))
        elif deed == "fail in overlap":
            await self._overlap(pipe, k, step.number, fails=step.number // 2)
        else:
            await self._cancel(pipe, k, step, begin)

    async def _overlap(self, pipe: Pipeline, k: int, count: int, fails: int = -1) -> None:
        batches = [Batch(*self.batch(k, n, fails=n if n == fails else -1)) for n in range(count)]
        n = 0
        async for result in pipe.steps(batches, ahead=1 + k % 2):
            self._note(f"{k} overlap {n}", result)
            n += 1

    async def _cancel(self, pipe: Pipeline, k: int, step: Step, begin: dict[str, Tensor]) -> None:
        if step.deed == "cancel evaluation":
            pipe.eval()
            doing = pipe.step(*self.batch(k))
        else:
            doing = pipe.step(*self.batch(k), update=step.deed == "cancel and load")
        stepping = asyncio.ensure_future(doing)
        try:
            if self.cancelled is None:
                # The instant is what it happens to be: a step that is cancelled in time leaves nothing.
                await asyncio.sleep(0.0004 * (step.number - 1) if step.number else 0)
                stepping.cancel()
            try:
                self._note(f"{k} {step.deed}", await stepping)
            except asyncio.CancelledError:
                self.trace.cancelled.add(k)
        finally:
            pipe.train()
        if step.deed == "cancel and load":
            await self._load(pipe, k, begin)

    async def _load(self, pipe: Pipeline, k: int, begin: dict[str, Tensor]) -> None:
        """Begin again behind a step that may have updated a stage: a whole step uses all that was accumulated."""
        self.generator.manual_seed(self.plan.seed + k)
        await pipe.step(*self.batch(k))
        pipe.load_state_dict(begin)

    def _note(self, name: str, result: Any) -> None:
        self.trace.add(f"{name}: loss", [result.loss, list(result.losses)])
        self.trace.add(f"{name}: outputs", result.outputs)


async def run_plan(plan: Plan, pool: DevicePool, cancelled: set[int] | None = None) -> Trace:
    """What comes of ``plan``. With ``cancelled``, the steps that another run did not complete are left out."""
    return await _Run(plan, cancelled).run(pool)
