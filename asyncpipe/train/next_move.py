"""What a run does that has lost workers: a decision table, without I/O.

::

    lost               found                                   move
    workers            too often without a snapshot between    GIVE_UP
                       all others are up                       GO_ON
                       some cannot start, there is time        LOOK_AGAIN, after a pause
                       some cannot start, no time: "wait"      GIVE_UP
                                                   "split"     GO_ON without them; GIVE_UP if nothing is left
                       some cannot start: "shrink"             GO_ON without them, at once
    a connection       for the first time                      GO_ON
                       again, there is time                    GO_ON, after a pause
                       again, no time: "wait"                  GIVE_UP
                                       "split"                 GO_ON without the unit that most of them broke to

``unit`` is what is lost together: a host, or a worker that names none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from asyncpipe.core.hosts import unit_of
from asyncpipe.errors import EdgeError, HangError, TaskError, WorkerLostError, WorkerStartError
from asyncpipe.train.job_file import FaultTable

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "Loss", "Losses", "Move", "MoveKind", "loss_of", "next_move", "short"]

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two attempts to start what is missing."""


class Loss(NamedTuple):
    """What a run has lost."""

    units: tuple[str, ...]
    """Several if it is the connection between them."""
    how: str
    broken: Mapping[str, int] = MappingProxyType({})
    """How many connections of each unit broke, if that is what was lost."""
    cut_off: str | None = None
    """The unit that nothing gets through to or from, if it is known that it is this one."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What a job has lost since its last snapshot, and what it does without."""

    gone: frozenset[str] = frozenset()
    """Units without which the job goes on."""
    lost: int = 0
    """Losses of workers in a row."""
    breaks: int = 0
    """Losses of connections in a row."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """How often connections of each unit broke, while its workers were up."""
    since: float = 0.0
    """When the waiting began: at the last loss of workers, or at the first of connections in a row."""

    def and_(self, loss: Loss, *, has_saved: bool, now: float) -> Losses:
        """These and ``loss``; ``has_saved``: whether a snapshot was taken since the loss before."""
        before = Losses(self.gone) if has_saved else self
        if not loss.broken:
            return replace(before, lost=before.lost + 1, since=now)
        since = before.since if before.breaks else now
        broken = Counter(before.broken) + Counter(loss.broken)
        return replace(before, breaks=before.breaks + 1, broken=broken, since=since)


class MoveKind(Enum):
    """What to do."""

    GO_ON = "go on"
    LOOK_AGAIN = "look again"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Move:
    """What to do after ``seconds``, and why."""

    kind: MoveKind
    gone: frozenset[str]
    """The units to do without."""
    units: tuple[str, ...] = ()
    """Those that ``text`` is about."""
    text: str = ""
    """Why it waits, gives up, or goes on without something."""
    seconds: float = 0.0


def next_move(
    loss: Loss,
    losses: Losses,
    faults: FaultTable,
    *,
    usable: frozenset[str],
    missing: Mapping[str, str] = MappingProxyType({}),
    looks: int = 0,
    now: float,
) -> Move:
    """What to do about ``loss``, the last of ``losses``.

    ``usable`` are the job's units that it may use, ``missing`` those among them that could not be started, and why.
    ``looks`` is how often that was tried since the loss.
    """
    splits = faults.lost_host in ("split", "shrink")
    seconds = faults.wait_seconds if faults.lost_host != "shrink" else 0.0
    rest = losses.since + seconds - now
    if loss.broken:
        # A message on every edge has shown who is cut off, so trying again would show nothing new.
        is_sure = loss.cut_off is not None and rest <= 0
        if losses.breaks == 1 and not is_sure:
            return Move(MoveKind.GO_ON, losses.gone)
        if rest > 0:
            pause = min(FIRST_PAUSE * losses.breaks, LONGEST_PAUSE, rest)
            text = f"waits for the connection, up to {seconds:g} s: {loss.how}"
            return Move(MoveKind.GO_ON, losses.gone, loss.units, text, pause)
        # Of two that have as many, the one that is not left out already.
        by_breaks = sorted(losses.broken, key=lambda unit: (-losses.broken[unit], unit in losses.gone, unit))
        worst = loss.cut_off or by_breaks[0]
        if not splits or not usable - {worst}:
            how = f"has waited {seconds:g} s for their connection: {loss.how}"
            return Move(MoveKind.GIVE_UP, losses.gone, loss.units, how)
        return Move(MoveKind.GO_ON, frozenset({worst}), (worst,), f"{worst} cannot be reached by others")
    if losses.lost > faults.snapshot_retries:
        how = f"gives up after {losses.lost} losses without a new snapshot between: {loss.how}"
        return Move(MoveKind.GIVE_UP, losses.gone, loss.units, how)
    gone = losses.gone & missing.keys()
    new = tuple(sorted(missing.keys() - gone))
    if not new:
        return Move(MoveKind.GO_ON, gone)
    names, reason = ", ".join(new), missing[new[0]]
    if rest > 0:
        pause = min(FIRST_PAUSE * 2**looks, LONGEST_PAUSE, rest)
        return Move(MoveKind.LOOK_AGAIN, gone, new, f"waits for {names}, up to {seconds:g} s: {reason}", pause)
    if not splits or not usable - missing.keys():
        return Move(MoveKind.GIVE_UP, gone, new, f"has waited {seconds:g} s for a replacement: {reason}")
    return Move(MoveKind.GO_ON, gone | set(new), new, f"{names} did not come back within {seconds:g} s: {reason}")


def loss_of(error: Exception) -> Loss | None:
    """What was lost, if that is why a run has failed."""
    found = error.__cause__ if isinstance(error, TaskError) else error
    if isinstance(found, WorkerLostError | WorkerStartError):
        return Loss((unit_of(found.worker),), short(found))
    if isinstance(found, EdgeError):
        ends = Counter(unit_of(name) for edge in found.edges for name in edge if isinstance(name, str))
        return Loss(tuple(sorted(ends)) or ("a connection",), short(found), ends)
    if isinstance(found, HangError) and found.peer:  # Nothing gets through from one to the other.
        ends = Counter((unit_of(found.worker), unit_of(found.peer)))
        cut_off = None if found.cut_off is None else unit_of(found.cut_off)
        return Loss(tuple(sorted(ends)), short(found), ends, cut_off)
    return None


def short(error: Exception) -> str:
    """The text of ``error`` without what the worker wrote last: that is in the process's log."""
    return str(error).partition("; its stderr ends with:")[0]
