"""What a schedule is, and how one is found by name, by instance or by entry point.

A schedule says in which order each device does its forwards and backwards. ``lower`` turns that into a task
graph; copies, recomputation and streams are not a schedule's business. A whole schedule::

    class OneFOneB(Schedule):
        name = "my-1f1b"

        def order(self, device, shape):
            warmup = min(shape.stages - device, shape.microbatches)
            yield from (F(i, device) for i in range(warmup))
            for i in range(shape.microbatches):
                yield B(i, device)
                if i + warmup < shape.microbatches:
                    yield F(i + warmup, device)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import ClassVar, NamedTuple

from asyncpipe.core.task import TaskKind
from asyncpipe.errors import MicrobatchError, OptionError, ScheduleError, UnknownScheduleError

__all__ = ["Action", "B", "F", "Schedule", "Shape", "find_schedule", "known_schedules"]

ENTRY_POINT_GROUP = "asyncpipe.schedules"

BUILT_IN = {
    "gpipe": "asyncpipe.core.schedules.gpipe:GPipe",
    "1f1b": "asyncpipe.core.schedules.one_f_one_b:OneFOneB",
    "interleaved": "asyncpipe.core.schedules.interleaved:Interleaved",
}


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


class Schedule(ABC):
    """Each device's ordered actions for a shape. Subclass it and write ``order``.

    A schedule is pure: the same shape always gives the same order. It may keep options as attributes if it
    is a frozen dataclass, since lowered graphs are cached per schedule and shape.
    """

    name: ClassVar[str] = ""
    """What messages call it; the name of the class unless set."""
    virtual: ClassVar[int] = 1
    """Stages per device when the caller does not say how many stages there are."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @abstractmethod
    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        """Yield the forwards and backwards of ``device`` (an index from 0), in the order they shall run."""

    def placement(self, shape: Shape) -> Sequence[int]:
        """The device index of each stage; by default the stages go round the devices in a loop."""
        return [stage % shape.devices for stage in range(shape.stages)]

    def check(self, shape: Shape) -> None:
        """Raise ``ScheduleError`` where this schedule cannot serve ``shape``; by default one stage a device."""
        if shape.stages != shape.devices:
            raise ScheduleError(
                f"schedule {self.name!r} puts one stage on each device, got {shape.stages} stages for "
                f"{shape.devices} devices; give as many stages as devices, or use 'interleaved'"
            )


def known_schedules() -> list[str]:
    """Names that ``find_schedule`` understands: the built-in ones and those of installed plug-ins."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def find_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule of this name, or the instance itself.

    Built-in names win over entry points of the group ``asyncpipe.schedules``. Raises
    ``UnknownScheduleError`` with the known names, ``ScheduleError`` for a plug-in that is no ``Schedule``.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"schedule must be a name or a Schedule instance, got {schedule!r}")
    if schedule in BUILT_IN:
        module, _, attribute = BUILT_IN[schedule].partition(":")
        made = getattr(import_module(module), attribute)()
    else:
        made = _from_entry_point(schedule)
    if not isinstance(made, Schedule):
        raise ScheduleError(f"entry point {schedule!r} gives {made!r}, which is not a Schedule")
    return made


def _from_entry_point(name: str) -> object:
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()()
    raise UnknownScheduleError(f"unknown schedule {name!r}; known schedules: {', '.join(known_schedules())}")
