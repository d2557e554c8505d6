"""What a case is, drawn from its seed: one or two pipelines on one pool, and what is done with each."""

from __future__ import annotations

import random
from dataclasses import dataclass

from asyncpipe.core.schedules.protocol import OrderedSchedule, Schedule, Shape
from asyncpipe.core.schedules.registry import BUILT_IN, find_schedule
from asyncpipe.errors import ScheduleError
from tests.campaigns.models.items import CONTAINERS, Item, balance, count, draw_items, draw_plain, tags_of
from tests.campaigns.models.pieces import KINDS, Piece
from tests.campaigns.workers.schedules import RandomOrder, RandomRule

__all__ = ["MAPPING", "WORKERS", "Case", "Plan", "Step", "draw"]

WORKERS = "abcd"
SLOTS = 3
"""Devices of each worker for pipelines that run by programs, and as many for the others: a lane that was shared, or had
a rule, is handed one task at a time from then on."""
MAPPING = {f"cpu:{k}": WORKERS[k % len(WORKERS)] for k in range(2 * SLOTS * len(WORKERS))}
"""The worker of each device of the pool that all cases share; a case has some of them."""

VARUNA = "varuna_schedule:Varuna"
SENT = [name for name in CONTAINERS if name not in ("opaque", "function")]
"""What may be between stages."""
BATCH_NORMS = {"vector": "BatchNorm1d", "sequence": "BatchNorm1d over time", "image": "BatchNorm2d"}
SCHEDULES = (*sorted(BUILT_IN), VARUNA, "random rule", "random order", "random rule", "random order")


@dataclass(frozen=True)
class Step:
    """One thing that is done with a pipeline."""

    deed: str
    number: int = 1
    """Of mini-batches, of turns of the loop before a cancellation, of a layer, or of a micro-batch."""
    schedule: str = ""


@dataclass(frozen=True)
class Plan:
    """One pipeline."""

    seed: int
    devices: tuple[str, ...]
    schedule: str
    order: str
    balance: tuple[int, ...]
    kind: str
    items: tuple[Item, ...]
    microbatches: int
    checkpoint: str
    dtype: str
    length: int
    """Of a sequence."""
    samples: int
    ready_made: bool
    """Whether the caller cuts: micro-batches of other sizes and lengths."""
    loss: str
    optimizer: str
    autocast: bool
    deferred: bool
    job: str
    background: bool
    steps: tuple[Step, ...]

    @property
    def is_exact(self) -> bool:
        """Whether threads themselves would give the same bits again: a rule adds up gradients as they come."""
        if "settles" in tags_of(self.kind, self.items):
            return False
        return self.is_ordered or (self.microbatches <= 2 and not self.changes_buffers and not self.has_ties)

    @property
    def is_ordered(self) -> bool:
        """Whether every schedule that it follows has an order."""
        names = (self.schedule, *(step.schedule for step in self.steps if step.schedule))
        return self.order == "strict" and all(isinstance(self.find(name), OrderedSchedule) for name in names)

    @property
    def changes_buffers(self) -> bool:
        """Whether a forward changes buffers."""
        return self.deferred or "changes" in tags_of(self.kind, self.items)

    @property
    def has_ties(self) -> bool:
        """Whether a parameter is used at several places."""
        return any("tie" in each.name for item in self.items for each in item.walk())

    def find(self, name: str) -> Schedule:
        """The schedule of this name."""
        shape = Shape(len(self.balance), self.microbatches, len(self.devices))
        return _find(name, shape, self.seed)


@dataclass(frozen=True)
class Case:
    """What is run, in both ways."""

    seed: int
    plans: tuple[Plan, ...]
    microseconds: int
    """How late messages may be; 0: nothing is delayed."""
    inline_bytes: int = 1 << 12
    """Up to this size messages go on the edge's socket, larger ones through memory or a group of processes."""
    direct_bytes: int = 1 << 18
    """Up to this size they are sent by the thread that has made them, larger ones by the edge's."""


def _find(name: str, shape: Shape, seed: int) -> Schedule:
    if name == "random rule":
        return RandomRule.draw(shape, seed)
    if name == "random order":
        return RandomOrder(seed)
    return find_schedule(name)


def draw(seed: int) -> Case:
    """The case of ``seed``."""
    chance = random.Random(seed)
    jobs = (1, 2) if chance.random() < 0.15 else (0,)
    plans = tuple(_draw_plan(chance.randrange(2**31), chance, job=job) for job in jobs)
    late = chance.choice([0, 0, 50, 300, 1500])
    return Case(seed, plans, late, chance.choice([1 << 12, 1 << 12, 256, 0]), chance.choice([1 << 18, 1 << 18, 512, 0]))


def _draw_plan(seed: int, chance: random.Random, job: int) -> Plan:
    devices = _draw_devices(chance)
    microbatches = chance.choice([1, 2, 2, 3, 4, 4, 5, 6, 8])
    schedule, stages = _draw_schedule(chance, len(devices), microbatches, seed)
    shape = Shape(stages, microbatches, len(devices))
    hint = chance.random() < 0.2 and isinstance(_find(schedule, shape, seed), OrderedSchedule)
    ordered = not hint and isinstance(_find(schedule, shape, seed), OrderedSchedule)
    kind = chance.choices(KINDS, (4, 4, 1))[0]
    samples = chance.choice([2 * microbatches, 2 * microbatches + 1, 3 * microbatches])
    steps = _draw_steps(chance, overlaps=ordered)
    names = {step.schedule for step in steps if step.schedule}
    if any(not _suits(name, stages, microbatches, len(devices), seed, schedule) for name in names):
        steps = tuple(step for step in steps if not step.schedule)
    undone = any(step.deed.startswith(("cancel", "fail")) for step in steps)
    loose = not ordered or any(
        not isinstance(_find(step.schedule, shape, seed), OrderedSchedule) for step in steps if step.schedule
    )
    changing = not loose and not undone
    deferred = changing and chance.random() < 0.15
    items = _draw_items(chance, kind, stages, loose=loose, changing=changing)
    if undone:
        items.append(Item("fails"))
    if deferred:
        items.insert(chance.randint(0, len(items)), Item(BATCH_NORMS[kind]))
    # torch's cache of casts is one for all threads, so what uses a weight several times adds up in another order.
    several = "repeats" in tags_of(kind, items) or any("tie" in each.name for item in items for each in item.walk())
    autocast = not loose and not job and not several and chance.random() < 0.15
    # Adam makes a step of what is nearly nothing, so numbers that are close do not stay so.
    optimizers = ["sgd", "momentum"] + ([] if loose else ["nesterov foreach", "adam", "adam foreach", "adamw"])
    if any(step.deed == "cancel and load" for step in steps):
        optimizers = ["sgd"]
    return Plan(
        seed=seed,
        devices=tuple(f"cpu:{k + (SLOTS * len(WORKERS) if loose or job else 0)}" for k in devices),
        schedule=schedule,
        order="hint" if hint else "strict",
        balance=tuple(balance([chance.random() for _ in range(stages - 1)], count(items))),
        kind=kind,
        items=tuple(items),
        microbatches=microbatches,
        checkpoint=chance.choice(["always", "except_last", "never"]),
        dtype="float64" if loose or (chance.random() < 0.4 and not autocast) else "float32",
        length=chance.choice([3, 3, 5, 5, 48]),
        samples=samples,
        ready_made=chance.random() < 0.2,
        loss=chance.choice(["mse", "mse", "sum", "counted", "counted tensor", "module"]),
        optimizer=chance.choice(optimizers),
        autocast=autocast,
        deferred=deferred,
        job=f"job {job}" if job else "",
        background=job > 1 and chance.random() < 0.3,
        steps=steps,
    )


def _draw_devices(chance: random.Random) -> tuple[int, ...]:
    """The numbers of up to 4 devices in up to 4 workers."""
    workers = chance.sample(range(len(WORKERS)), chance.choice([1, 2, 2, 2, 3, 4]))
    count = chance.randint(1, 4)
    free = [k for k in range(SLOTS * len(WORKERS)) if k % len(WORKERS) in workers]
    return tuple(chance.sample(free, min(count, len(free))))


def _draw_schedule(chance: random.Random, devices: int, microbatches: int, seed: int) -> tuple[str, int]:
    while True:
        name = chance.choice(SCHEDULES)
        stages = devices * chance.choice([1, 1, 2, 2, 3]) + (chance.randint(0, 2) if "random" in name else 0)
        if stages <= 8 and _suits(name, stages, microbatches, devices, seed):
            return name, stages


def _suits(name: str, stages: int, microbatches: int, devices: int, seed: int, like: str | None = None) -> bool:
    """Whether the schedule supports a shape, and has the placement of ``like``."""
    shape = Shape(stages, microbatches, devices)
    try:
        found = _find(name, shape, seed)
        found.check(shape)
    except ScheduleError:
        return False
    if like is None:
        return True
    return list(found.placement(shape)) == list(_find(like, shape, seed).placement(shape))


def _draw_items(chance: random.Random, kind: str, stages: int, *, loose: bool, changing: bool) -> list[Item]:
    """At least one layer a stage. Where gradients are added up as they come, so small differences must stay small."""
    excluded = {"stays", "slow"} | ({"float"} if loose else set()) | (set() if changing else {"changes"})

    def suits(piece: Piece) -> bool:
        return not excluded & piece.tags

    def plain() -> Item:
        return Item(draw_plain(chance, kind, draws=chance.random() < 0.3, suits=suits))

    items = draw_items(chance, plain, SENT)
    while count(items) < stages:
        items.append(plain())
    return items


def _draw_steps(chance: random.Random, *, overlaps: bool) -> tuple[Step, ...]:
    steps = [Step("train")]
    kind = chance.choice(["plain", "plain", "cancel", "fail", "plain"])
    deeds = ["train", "train", "accumulate", "evaluate", "evaluate without loss", "change", "freeze", "state", "load"]
    deeds += ["overlap", "overlap"] if overlaps else ["overlap"]
    if kind == "cancel":
        deeds += ["cancel", "cancel evaluation", "cancel and load"] * 2
    if kind == "fail":
        deeds += ["fail", "fail in overlap"] * 3
    for _ in range(chance.randint(1, 3)):
        deed = chance.choice(deeds)
        number = chance.choice([2, 3, 4]) if "overlap" in deed else chance.randrange(12)
        name = chance.choice([*sorted(BUILT_IN), "random order", VARUNA]) if deed == "change" else ""
        steps.append(Step(deed, number, name))
    return (*steps, Step("train"))
