"""What a schedule is: which action runs when, as an order written down or as a rule that decides while a step runs.

An *ordered* schedule says in which order each device runs its actions. A *ruled* one ranks what is ready and says
how many micro-batches a device may hold. The same schedule, both ways::

    class OneFOneB(OrderedSchedule):
        def order(self, device, shape):
            warmup = min(shape.stages - device, shape.microbatches)
            yield from (F(i, device) for i in range(warmup))
            for i in range(shape.microbatches):
                yield B(i, device)
                if i + warmup < shape.microbatches:
                    yield F(i + warmup, device)

    class BackwardFirst(RuledSchedule):
        def priority(self, action, shape):
            return action.kind is TaskKind.FORWARD
        def admit(self, action, live, shape):
            return live < shape.devices - action.stage

A *hinted* schedule is in between: an order that only ranks what is ready. ``lower`` turns each of them into a task
graph; copies, recomputation and streams are not a schedule's business. ``registry.py`` finds them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from asyncpipe.core.kinds import TaskKind
from asyncpipe.errors import MicrobatchError, OptionError, ScheduleError

__all__ = [
    "Action",
    "B",
    "F",
    "HintedSchedule",
    "I",
    "OrderedSchedule",
    "Overlap",
    "RuledSchedule",
    "Schedule",
    "Shape",
    "W",
    "demand_even_stages",
    "flat",
    "loop_placement",
    "zigzag_placement",
]


class Action(NamedTuple):
    """One entry of a schedule: what to do with which micro-batch at which stage."""

    kind: TaskKind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.value}({self.microbatch},{self.stage})"


def F(microbatch: int, stage: int) -> Action:
    """Forward of ``microbatch`` at ``stage``."""
    return Action(TaskKind.FORWARD, microbatch, stage)


def B(microbatch: int, stage: int) -> Action:
    """Full backward (input and weight gradients) of ``microbatch`` at ``stage``."""
    return Action(TaskKind.BACKWARD, microbatch, stage)


def I(microbatch: int, stage: int) -> Action:  # noqa: E743 - the field's letter, as F and B are
    """Input gradients of ``microbatch`` at ``stage``: the half of a backward that earlier stages wait for."""
    return Action(TaskKind.INPUT_GRADIENT, microbatch, stage)


def W(microbatch: int, stage: int) -> Action:
    """Weight gradients of ``microbatch`` at ``stage``: the other half, which nobody waits for."""
    return Action(TaskKind.WEIGHT_GRADIENT, microbatch, stage)


class Overlap(NamedTuple):
    """Two actions of different micro-batches fused in one entry; they run one after the other.

    ``OVERLAP_F_B`` in torch's notation.
    """

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"


def flat(order: Iterable[Action | Overlap]) -> Iterator[Action]:
    """The actions of an order, one after the other."""
    for entry in order:
        if isinstance(entry, Overlap):
            yield from entry
        else:
            yield entry


@dataclass(frozen=True, slots=True)
class Shape:
    """How many stages, micro-batches and devices a step has; all are at least 1."""

    stages: int
    microbatches: int
    devices: int

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise MicrobatchError(f"microbatches must be a positive integer, got {self.microbatches}")
        for name in ("stages", "devices"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be a positive integer, got {getattr(self, name)}")


def loop_placement(shape: Shape) -> list[int]:
    """Stages go round the devices: 0 1 2 0 1 2."""
    return [stage % shape.devices for stage in range(shape.stages)]


def zigzag_placement(shape: Shape) -> list[int]:
    """Stages go to and fro: 0 1 2 2 1 0; with two stages a device this is the V of the zero-bubble family."""
    p = shape.devices
    return [stage % p if stage // p % 2 == 0 else p - 1 - stage % p for stage in range(shape.stages)]


def demand_even_stages(name: str, shape: Shape, unit: int = 1) -> None:
    """Raise ``ScheduleError`` for schedule ``name`` unless each device has as many stages, a multiple of ``unit``."""
    if shape.stages % (unit * shape.devices):
        needs = "the same number of" if unit == 1 else f"a multiple of {unit}"
        raise ScheduleError(
            f"schedule {name!r} needs {needs} stages on each device, got {shape.stages} stages for {shape.devices} "
            f"devices; give a multiple of {unit * shape.devices}"
        )


class Schedule(ABC):  # noqa: B024 - what is abstract is in the two kinds of schedules
    """What ordered and ruled schedules share: a name, where stages are placed, and which shapes they can serve.

    A schedule is pure: the same arguments always give the same answer. It may keep options as attributes that
    do not change; best is a frozen dataclass. Task graphs are lowered once per schedule and shape.
    """

    name: str = ""
    """What messages call it; the name of the class unless set."""
    virtual: int = 1
    """Stages per device when the caller does not say how many stages there are."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def placement(self, shape: Shape) -> Sequence[int]:
        """The device index of each stage; by default the stages go round the devices in a loop."""
        return loop_placement(shape)

    def check(self, shape: Shape) -> None:
        """Raise ``ScheduleError`` where this schedule cannot serve ``shape``; by default one stage a device."""
        if shape.stages != shape.devices:
            raise ScheduleError(
                f"schedule {self.name!r} puts one stage on each device, got {shape.stages} stages for "
                f"{shape.devices} devices; give as many stages as devices, or use 'interleaved'"
            )


class OrderedSchedule(Schedule):
    """Each device's actions in the order in which they run, whatever else is ready. Write ``order``."""

    @abstractmethod
    def order(self, device: int, shape: Shape) -> Iterable[Action | Overlap]:
        """Yield the actions of ``device`` (an index from 0), in the order they shall run.

        Every stage of the device needs, for each micro-batch, an F and a B, or an F, an I and a W.
        """


class RuledSchedule(Schedule):
    """A rule that picks among what is ready, while the step runs. Write ``priority`` and, to bound memory, ``admit``.

    A device that is free runs the ready task with the lowest priority. Both methods are asked about actions, on the
    scheduler's thread; they must be quick and answer the same every time. No rule can make a deadlock: everything
    of a micro-batch that a device holds may run, and micro-batches come to a device in their order, so the oldest
    one always gets through.
    """

    splits_backward: bool = False
    """Whether backwards are I and W, or B."""
    ahead: int = 1
    """Compute tasks that a device holds. With 1 every choice knows all that has ended; with 2 or more an
    asynchronous device need not wait for the scheduler between two tasks, which decides that much earlier."""

    @abstractmethod
    def priority(self, action: Action, shape: Shape) -> Any:
        """The rank of ``action``: anything that compares; lower runs first, and equals by clock cycle.

        Asked once for each action of a shape. A recomputation has the rank of its backward.
        """

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        """Whether a forward may bring one more micro-batch to its device, which holds ``live`` now; by default always.

        A device holds a micro-batch from its first forward there until its last backward there has ended. Asked
        for no other action. A device without a micro-batch must admit one.
        """
        return True

    def actions(self, device: int, shape: Shape) -> Iterable[Action]:
        """What ``device`` has to do, in any order: by default F and B, or F, I and W, of each of its stages."""
        backward = (I, W) if self.splits_backward else (B,)
        for stage, at in enumerate(self.placement(shape)):
            if at == device:
                for make in (F, *backward):
                    yield from (make(i, stage) for i in range(shape.microbatches))


@dataclass(frozen=True)
class HintedSchedule(RuledSchedule):
    """An ordered schedule whose order only ranks what is ready: a device never waits for what is late.

    ``cap`` bounds the micro-batches that a device holds; by default as many as it holds in the strict order, so
    that a hint takes no more memory. The idea is that of RRFP (arXiv 2605.18750).
    """

    hint: OrderedSchedule
    cap: int | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap < 1:
            raise OptionError(f"cap must be a positive integer, got {self.cap}")
        object.__setattr__(self, "name", f"{self.hint.name} as hint")
        object.__setattr__(self, "virtual", self.hint.virtual)

    def placement(self, shape: Shape) -> Sequence[int]:
        return self.hint.placement(shape)

    def check(self, shape: Shape) -> None:
        self.hint.check(shape)

    def priority(self, action: Action, shape: Shape) -> int:
        return _ranking(self.hint, shape).position[action]

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        ranking = _ranking(self.hint, shape)
        return live < (ranking.held[ranking.placement[action.stage]] if self.cap is None else self.cap)

    def actions(self, device: int, shape: Shape) -> Iterable[Action]:
        return flat(self.hint.order(device, shape))


class _Ranking(NamedTuple):
    """What an order says when it is only a hint."""

    position: dict[Action, int]
    """Of each action in its device's order."""
    held: list[int]
    """The most micro-batches that each device holds in the strict order."""
    placement: Sequence[int]


@lru_cache(maxsize=16)
def _ranking(hint: OrderedSchedule, shape: Shape) -> _Ranking:
    orders = [list(flat(hint.order(device, shape))) for device in range(shape.devices)]
    position = {action: k for order in orders for k, action in enumerate(order)}
    return _Ranking(position, [_most_held(order) for order in orders], hint.placement(shape))


def _most_held(order: Sequence[Action]) -> int:
    """The most micro-batches between their first and their last action of ``order``."""
    last = {action.microbatch: k for k, action in enumerate(order)}
    held: set[int] = set()
    most = 0
    for k, action in enumerate(order):
        held.add(action.microbatch)
        most = max(most, len(held))
        if last[action.microbatch] == k:
            held.remove(action.microbatch)
    return most
