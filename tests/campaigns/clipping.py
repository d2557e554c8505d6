"""Clipped updates with schedules and parameter groups, against torch's own on the unsplit model.

Random models, schedules, replicas and batches: norms, learning rates, losses and weights of ``pipe.step`` and
``pipe.steps``, on threads and in workers, are those of ``clip_grad_norm_``, one optimizer and one scheduler.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from asyncpipe import DevicePool, LearningRates, Pipeline
from asyncpipe.errors import AsyncpipeError
from tests.campaigns.harness import OPTIONS, Campaign, Run, Verdict
from tests.campaigns.replicas.campaign import LOSSES, MAPPING, OPTIMIZERS
from tests.campaigns.replicas.cases import WIDTH, Head

__all__ = ["CAMPAIGN", "Case", "draw", "judge_all", "reference", "trained"]

CLOSE = 1e-10
TOGETHER = 25
ORDERED = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "hanayo")
RULED = "backward-first"


@dataclass(frozen=True)
class Case:
    """One run of some steps."""

    seed: int = 7
    devices: int = 3
    """Of each replica."""
    schedule: str = "1f1b"
    microbatches: int = 4
    replicas: int = 1
    shards: bool = False
    workers: bool = False
    clip: str = "norm"
    most: float = 0.1
    """What gradients are clipped to."""
    loss: str = "mean"
    optimizer: str = "adamw"
    groups: bool = True
    rates: str = "cosine"
    checkpoint: str = "except_last"
    tie: bool = False
    frozen: bool = False
    """The first layers: their stage has no optimizer."""
    updates: tuple[bool, ...] = (True, False, True, True)
    ahead: int | None = None
    """With ``None`` steps are taken one by one."""


def draw(seed: int) -> Case:
    """The case of ``seed``."""
    chance = random.Random(seed)
    replicas, schedule = chance.choice([1, 1, 1, 2, 3]), chance.choice([*ORDERED, RULED])
    devices = chance.choice([1, 2, 3] if replicas == 3 else [1, 2, 3, 4])
    tie = (replicas == 1 or devices == 1) and chance.random() < 0.3
    ahead = chance.choice([None, 0, 1, 2])
    return Case(
        seed,
        devices,
        schedule,
        2 * devices if schedule in ("interleaved", "zbv", "hanayo") else chance.randint(1, 5),
        replicas,
        replicas > 1 and chance.random() < 0.5,
        chance.random() < 0.15,
        chance.choice(["norm", "norm", "norm", "value"]),
        10.0 ** chance.choice([-4, -2, -1, 0, 2]),
        chance.choice(list(LOSSES)),
        chance.choice(["adamw", "momentum"]),
        chance.random() < 0.5,
        chance.choice(list(RATES)),
        chance.choice(["always", "except_last", "never"]),
        tie,
        not tie and chance.random() < 0.2,
        (*(ahead is not None or chance.random() < 0.7 for _ in range(3)), True),
        ahead,
    )


def _halved(step: int) -> float:
    return 0.5**step


def _rate(step: int) -> float:
    return 0.02 / (step + 1)


RATES: dict[str, Any] = {
    "": None,
    "cosine": partial(CosineAnnealingLR, T_max=5),
    "lambda": partial(LambdaLR, lr_lambda=_halved),
    "by step": LearningRates(_rate),
}


def _group(_: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0, "lr": 0.002} if parameter.ndim < 2 else {"weight_decay": 0.1}


def _model(case: Case) -> nn.Sequential:
    torch.manual_seed(case.seed)
    first = nn.Linear(WIDTH, WIDTH)
    layers = [first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh()]
    layers += [nn.Linear(2 * WIDTH, WIDTH), Head(first) if case.tie else nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).double()
    first.requires_grad_(not case.frozen)
    return model


def _batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    samples = 2 * case.microbatches * case.replicas - case.seed % 2
    generator = torch.Generator().manual_seed(case.seed)
    pairs = torch.randn(len(case.updates), 2, samples, WIDTH, generator=generator, dtype=torch.float64)
    pairs[:, 1, 0, 0] = 0.0  # A sample that counts, whatever the loss.
    return [(x, target) for x, target in pairs]


def reference(case: Case) -> list[Tensor]:
    """What the unsplit model has: losses, norms, learning rates, weights."""
    model, found = _model(case), list[Tensor]()
    trained = [p for p in model.parameters() if p.requires_grad]
    make, halves = OPTIMIZERS[case.optimizer], [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]]
    groups = [{"params": half, **_group("", half[0])} for half in halves]
    optimizer: torch.optim.Optimizer = make(groups if case.groups else trained)
    by_step = case.rates == "by step"
    schedule: LRScheduler | None = None if by_step or not case.rates else RATES[case.rates](optimizer)
    count = 0
    for (x, target), updates in zip(_batches(case), case.updates, strict=True):
        made = LOSSES[case.loss]["loss_fn"](model(x), target)
        loss = made[0] if isinstance(made, tuple) else made
        loss.backward()
        found.append(loss.detach())
        if not updates:
            continue
        for group in optimizer.param_groups if by_step else ():
            group["lr"] = _rate(count) * (0.2 if case.groups and group["weight_decay"] == 0 else 1)
        if case.clip == "norm":
            found.append(nn.utils.clip_grad_norm_(trained, case.most))
        else:
            nn.utils.clip_grad_value_(trained, case.most)
        found += [torch.tensor(optimizer.param_groups[0]["lr"])] if case.rates else []
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        if schedule is not None:
            schedule.step()
    return [*found, *(each.detach() for each in model.state_dict().values())]


def options_of(case: Case) -> dict[str, Any]:
    """Those of the case's pipeline."""
    return {
        "microbatches": case.microbatches,
        "schedule": case.schedule,
        "shard_optimizer": case.shards,
        "optimizer": OPTIMIZERS[case.optimizer],
        "checkpoint": case.checkpoint,
        "parameter_groups": _group if case.groups else None,
        "lr_schedule": RATES[case.rates],
        f"clip_grad_{case.clip}": case.most,
        **LOSSES[case.loss],
    }


async def trained(case: Case, **options: Any) -> list[Tensor]:
    """The same of the pipeline."""
    rows = [[f"cpu:{row * case.devices + number}" for number in range(case.devices)] for row in range(case.replicas)]
    devices: Any = rows if case.replicas > 1 else rows[0]
    found: list[Tensor] = []

    def take(result: Any) -> None:
        found.append(result.loss)
        found.extend(each for each in (result.gradient_norm,) if each is not None)
        found.extend(torch.tensor(each) for each in (result.learning_rate,) if each is not None)

    async with Pipeline(_model(case), devices, **options_of(case) | options) as pipe:
        if case.ahead is not None:
            async for result in pipe.steps(_batches(case), ahead=case.ahead):
                take(result)
        for batch, updates in zip(_batches(case), case.updates, strict=True) if case.ahead is None else ():
            take(await pipe.step(*batch, update=updates))
        return [*found, *(each.detach().clone() for each in pipe.state_dict().values())]


def differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> str:
    """What is not the same within 1e-10, relative to numbers that are larger than 1; empty if all is."""
    if len(one) != len(other):
        return f"{len(one)} numbers in place of {len(other)}"
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        apart = (mine - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
        if not apart < CLOSE:
            return f"{apart:.3g} from the unsplit model, number {number}"
    return ""


def judge_all(cases: Sequence[Case]) -> Iterator[Verdict]:
    """The verdicts of ``cases``, whose workers they share."""
    warnings.filterwarnings("ignore")
    pools: Mapping[bool, DevicePool] = {False: DevicePool(), True: DevicePool(workers=MAPPING)}
    opened = {workers: pools[workers] for workers in {case.workers for case in cases}}
    with asyncio.Runner() as runner:
        for pool in opened.values():
            runner.run(pool.__aenter__())
        try:
            yield from (runner.run(_judge(case, opened[case.workers])) for case in cases)
        finally:
            for pool in opened.values():
                runner.run(pool.aclose())


async def _judge(case: Case, pool: DevicePool) -> Verdict:
    topic = f"{case.clip}, {case.schedule}"
    try:
        wrong = differ(await trained(case, pool=pool), reference(case))
    except AsyncpipeError as error:
        return Verdict("error", f"{type(error).__name__}: {error}", topic=topic)
    return Verdict("wrong" if wrong else "close", wrong, topic=topic)


def _work(run: Run) -> None:
    run.judge((list(map(draw, chunk)) for chunk in run.chunks(TOGETHER)), judge_all, 300.0)


CAMPAIGN = Campaign(
    "clipping",
    _work,
    {"cases": (500, "how many")} | {name: OPTIONS[name] for name in ("processes", "case", "here")},
    draw,
    lambda case: f"--case {case.seed}",
)
