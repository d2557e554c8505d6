"""What a schedule is: the order of each device's actions, or a rule that picks among them while a step runs.

An *ordered* schedule yields the actions of each device in the order in which they run. A *ruled* one gives each action
a priority and says how many micro-batches a device may hold. ``gpipe.py`` and ``backward_first.py`` are the shortest
examples. A *hinted* schedule is a rule made from an order: positions in the order are the priorities.

``lower`` turns a schedule into a task graph and adds copies and recomputations, so a schedule does not name them.
``registry.py`` finds schedules by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from asyncpipe.core.checks import check_positive
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

    @property
    def prerequisite(self) -> Action | None:
        """The action that must come before this one on its device: F before B and I, I before W."""
        kind, i, j = self
        if kind is TaskKind.FORWARD:
            return None
        return Action(TaskKind.INPUT_GRADIENT if kind is TaskKind.WEIGHT_GRADIENT else TaskKind.FORWARD, i, j)

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
    """Weight gradients of ``microbatch`` at ``stage``: the other half, which no other action waits for."""
    return Action(TaskKind.WEIGHT_GRADIENT, microbatch, stage)


class Overlap(NamedTuple):
    """Two actions of different micro-batches as one entry (``OVERLAP_F_B`` in torch); they run one after the other."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"


def flat(order: Iterable[Action | Overlap]) -> Iterator[Action]:
    """The actions of an order; an ``Overlap`` yields its two."""
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
    """The device of each stage, counted from 0, in a loop over the devices: 0 1 2 0 1 2. One entry for each stage."""
    return [stage % shape.devices for stage in range(shape.stages)]


def zigzag_placement(shape: Shape) -> list[int]:
    """The device of each stage, counted from 0, forth and back: 0 1 2 2 1 0. One entry for each stage.

    Two stages on each device make the V of zero-bubble schedules.
    """
    p = shape.devices
    return [stage % p if stage // p % 2 == 0 else p - 1 - stage % p for stage in range(shape.stages)]


def demand_even_stages(name: str, shape: Shape, unit: int = 1) -> None:
    """Raise ``ScheduleError`` unless the stages divide evenly by devices, into multiples of ``unit`` for each."""
    if shape.stages % (unit * shape.devices):
        needs = "the same number of" if unit == 1 else f"a multiple of {unit}"
        raise ScheduleError(
            f"schedule {name!r} needs {needs} stages on each device, got {shape.stages} stages for {shape.devices} "
            f"devices; give a multiple of {unit * shape.devices}"
        )


class Schedule(ABC):  # noqa: B024 - what is abstract is in the two kinds of schedules
    """What ordered and ruled schedules share: a name, the placement of stages, and the shapes that they support.

    A schedule is pure: the same arguments always give the same answer. Options are attributes that do not change, so
    a frozen dataclass suits. Each schedule is lowered once for each shape.
    """

    name: str = ""
    """The name in messages; by default that of the class."""
    virtual: int = 1
    """Stages on each device, if the caller does not say how many stages there are."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def placement(self, shape: Shape) -> Sequence[int]:
        """The device index of each stage; by default ``loop_placement``."""
        return loop_placement(shape)

    def check(self, shape: Shape) -> None:
        """Raise ``ScheduleError`` unless this schedule supports ``shape``; by default it needs one stage a device."""
        if shape.stages != shape.devices:
            raise ScheduleError(
                f"schedule {self.name!r} puts one stage on each device, got {shape.stages} stages for "
                f"{shape.devices} devices; give as many stages as devices, or use 'interleaved'"
            )


class OrderedSchedule(Schedule):
    """Each device runs its actions in a fixed order and waits for the next one, even if a later one is ready.

    Implement ``order``.
    """

    @abstractmethod
    def order(self, device: int, shape: Shape) -> Iterable[Action | Overlap]:
        """Yield the actions of ``device`` (an index from 0) in the order in which they run.

        Every stage of the device needs, for each micro-batch, an F and a B, or an F, an I and a W.
        """


class RuledSchedule(Schedule):
    """A rule that picks among the ready actions while the step runs.

    Implement ``priority`` and, to bound memory, ``admit``. A free device runs the ready action with the lowest
    priority. Both methods are called on the scheduler's thread; they must be quick and pure. No rule can deadlock:
    ``admit`` never blocks a micro-batch that the device holds, and micro-batches come to a device in order, so the
    oldest one can always proceed.
    """

    splits_backward: bool = False
    """Whether backwards are split into I and W."""
    ahead: int = 1
    """How many compute tasks may be dispatched to a device and not yet completed. With 1, each choice is made when the
    previous task has completed. With 2 or more, a GPU has its next task queued and does not wait for the scheduler, but
    that task was chosen earlier, with less known."""

    @abstractmethod
    def priority(self, action: Action, shape: Shape) -> Any:
        """The priority of ``action``, of any type that compares: lower runs first, equals run by clock cycle.

        Called once for each action of a shape. A recomputation has the priority of its backward.
        """

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        """Whether the forward ``action`` may bring one more micro-batch to its device, which holds ``live``.

        By default always. A device holds a micro-batch from its first forward there until its last backward there has
        ended. Called for no other actions. The answer for ``live`` = 0 must be true.
        """
        return True

    def actions(self, device: int, shape: Shape) -> Iterable[Action]:
        """All actions of ``device``, in any order: by default F and B, or F, I and W, of each of its stages."""
        backward = (I, W) if self.splits_backward else (B,)
        for stage, at in enumerate(self.placement(shape)):
            if at == device:
                for make in (F, *backward):
                    yield from (make(i, stage) for i in range(shape.microbatches))


@dataclass(frozen=True)
class HintedSchedule(RuledSchedule):
    """A rule whose priorities are the positions in the order ``hint``: a device does not wait for a late action.

    ``cap`` bounds the micro-batches that a device holds; by default it is what the device holds in the strict order,
    so that a hint takes no more memory. The idea is that of RRFP (arXiv 2605.18750).
    """

    hint: OrderedSchedule
    cap: int | None = None

    def __post_init__(self) -> None:
        if self.cap is not None:
            check_positive("cap", self.cap)
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
    """What a hint needs of an order."""

    position: dict[Action, int]
    """The position of each action in its device's order."""
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
