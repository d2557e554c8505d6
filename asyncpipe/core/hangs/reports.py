"""What a worker says of itself when it is asked what it is at: the evidence from which ``hangs.py`` finds a root.

All of it is read while the worker's threads do what they do, so two numbers may be of two instants. That does no harm
where nothing happens any more. Tasks have their names, and for the controller their numbers in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

__all__ = [
    "AskedFor",
    "PartReport",
    "ReceiverReport",
    "RunningReport",
    "SeenWorker",
    "SenderReport",
    "StackFrame",
    "WorkerReport",
]


class AskedFor(Enum):
    """What a worker is asked for, of a step."""

    MOVED = auto()
    """Whether something has happened: ``moved`` and ``running`` of its report."""
    ALL = auto()
    PROBES = auto()
    """All, behind a message without a meaning on each edge on which it sends: what has come of them is seen later."""


StackFrame = tuple[str, int, str]
"""The file, line and function of a call, as the worker's host knows them."""


class RunningReport(NamedTuple):
    """A task that a device runs, or has queued on an accelerator."""

    device: str
    step: int
    task: int
    name: str
    """Its identifier, and whose it is if it belongs to another pipeline than the one that is asked about."""
    seconds: float
    """How long it has run."""


class PartReport(NamedTuple):
    """How far a worker is with its part of a step."""

    ended: frozenset[int]
    """Tasks that are done."""
    heads: Mapping[str, int]
    """By device that runs a program: the task that it is to run next. None of a device that is at its end."""
    came: frozenset[tuple[int, int]]
    """Messages that have come, as (the task that waits, the task that it waits for)."""


class SenderReport(NamedTuple):
    """An edge, as its sender sees it."""

    sent: int
    """Messages since it was made."""
    limit: int
    """How many it may have sent in all: what the receiver has told of its credits."""
    queued: frozenset[tuple[int, int]] = frozenset()
    """Messages of the step that are to be sent, as (the task that waits, the task that it waits for)."""
    is_held_up: bool = False
    """Whether the network does not take what it sends."""
    is_over: bool = False
    """Whether it was closed, or broke."""


class ReceiverReport(NamedTuple):
    """An edge, as its receiver sees it."""

    came: int
    """Messages since it was made."""
    limit: int
    """What it has told the sender that this may have sent in all."""
    holders: frozenset[str] = frozenset()
    """Devices that have still to take messages, which hold credits until then."""
    is_stuck: bool = False
    """Whether who takes messages is in something that does not end: it does not wait for the next one."""
    taker: str = ""
    """The name of the thread that is."""
    is_over: bool = False
    """Whether it was closed, or broke."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker says of one step, and of the edges of its pipeline."""

    moved: int
    """A number that is another one whenever something of the step has happened there."""
    running: Sequence[RunningReport] = ()
    """What its devices run, of any step."""
    part: PartReport | None = None
    """``None`` if the step has not begun there."""
    sends: Mapping[str, SenderReport] = field(default_factory=dict)
    """By worker that receives."""
    receives: Mapping[str, ReceiverReport] = field(default_factory=dict)
    """By worker that sends."""
    stacks: Mapping[str, Sequence[StackFrame]] = field(default_factory=dict)
    """By name of a thread: what it is in, the outermost call first."""

    def numbered(self, step: int, number: Callable[[int], int]) -> WorkerReport:
        """With the ``number`` of each task of the step in place of its name."""
        part = self.part and PartReport(
            frozenset(map(number, self.part.ended)),
            {device: number(name) for device, name in self.part.heads.items()},
            _numbered(self.part.came, number),
        )
        running = [each._replace(task=number(each.task)) if each.step == step else each for each in self.running]
        sends = {peer: each._replace(queued=_numbered(each.queued, number)) for peer, each in self.sends.items()}
        return replace(self, part=part, running=running, sends=sends)


def _numbered(messages: Iterable[tuple[int, int]], number: Callable[[int], int]) -> frozenset[tuple[int, int]]:
    return frozenset((number(task), number(before)) for task, before in messages)


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker that has a part of a step, as its controller sees it."""

    name: str
    devices: tuple[str, ...]
    """Those of the step that are its."""
    report: WorkerReport | None
    """``None`` if it does not answer."""
    silent: float = 0.0
    """Seconds since something came from it."""
    running: Sequence[RunningReport] = ()
    """What is known of it without its answer."""
    lost: str = ""
    """What became of it, if it is gone."""
