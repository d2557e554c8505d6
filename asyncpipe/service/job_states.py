"""What a job is and which states it may pass through: pure, so that the store, the service and tests share one table.

::

                 ┌─────────────────── resumed ──────────────────────┐
                 │  ┌─ restarted, shutting down, or tried again ─┐   │
                 ▼  ▼                                            │   │
    submitted ▶ queued ─────────────── begins ─────────────────▶ running ─── asked for ───▶ paused
                 │ │ │                                            │ │ │                     ▲  │
                 │ │ └──────────────────── asked for ─────────────┼─┼─┼─────────────────────┘  │
                 │ └─ cannot be built ─▶ failed ◀─────────────────┘ │ └─▶ finished             │
                 └────────────────────▶ cancelled ◀─────────────────┴──────────────────────────┘

``finished``, ``failed`` and ``cancelled`` are final. A job that is resumed waits in the queue again, since its devices
may be in use by then. A running job that shall pause, or be cancelled, needs a moment for that: what it was asked is
kept meanwhile (``JobRecord.asked``), so that a process that is killed then does not forget it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from asyncpipe.errors import AsyncpipeError, OptionError

__all__ = [
    "FINAL_STATES",
    "JSON",
    "TRANSITIONS",
    "JobRecord",
    "JobSpec",
    "JobSpecError",
    "JobState",
    "JobStateError",
    "PriorityClass",
    "Transition",
    "check_asking",
    "check_history",
    "check_transition",
    "tidy_cause",
]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""What JSON can say."""

MAX_SPEC_BYTES = 64 * 1024
MAX_NAME = 200
MAX_WEIGHT = 1e6
MAX_CAUSE = 2000


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PriorityClass(StrEnum):
    """Whether a job has a share of its devices or only what others leave idle; the first is served first."""

    FOREGROUND = "foreground"
    BACKGROUND = "background"


TRANSITIONS: Mapping[JobState, tuple[JobState, ...]] = MappingProxyType(
    {
        JobState.QUEUED: (JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED),
        JobState.RUNNING: (
            JobState.QUEUED,
            JobState.PAUSED,
            JobState.FINISHED,
            JobState.FAILED,
            JobState.CANCELLED,
        ),
        JobState.PAUSED: (JobState.QUEUED, JobState.CANCELLED),
        JobState.FINISHED: (),
        JobState.FAILED: (),
        JobState.CANCELLED: (),
    }
)
"""What may follow each state."""

FINAL_STATES = frozenset(state for state, following in TRANSITIONS.items() if not following)


class JobSpecError(OptionError):
    """A job's specification cannot be kept: it is not JSON, or too large; the message says what is allowed."""


class JobStateError(AsyncpipeError, RuntimeError):
    """A job cannot do, in its state, what was asked; the message says what it can. Nothing was changed.

    ``job`` is its id, ``state`` the one it is in (``None``: it was never submitted), ``asked`` what was asked for,
    ``possible`` the states that may follow.
    """

    def __init__(self, job: str, state: JobState | None, asked: str) -> None:
        self.job = job
        self.state = state
        self.asked = asked
        self.possible = (JobState.QUEUED,) if state is None else TRANSITIONS[state]
        after = f"from there it can become {', '.join(self.possible)}" if self.possible else "that state is final"
        super().__init__(f"job {job} is {state or 'not submitted'}: it cannot {asked}; {after}")

    def __reduce__(self) -> tuple[type[JobStateError], tuple[str, JobState | None, str]]:
        return type(self), (self.job, self.state, self.asked)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What was submitted: a few fields that the service orders jobs by, and a JSON object that others validate.

    ``entry`` is the registered ``module:factory``; ``document`` holds the rest (parameters, schedule, devices,
    training …), with nothing in it but what JSON can say. Raises ``JobSpecError``.
    """

    name: str
    entry: str
    document: Mapping[str, JSON] = field(default_factory=dict)
    priority_class: PriorityClass = PriorityClass.FOREGROUND
    weight: float = 1.0

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("entry", self.entry)):
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
                raise JobSpecError(f"a job's {what} is a text of 1 to {MAX_NAME} characters, not {value!r:.100}")
        if self.priority_class not in list(PriorityClass):
            known = ", ".join(PriorityClass)
            raise JobSpecError(f"a job's priority class is one of {known}, not {self.priority_class!r:.100}")
        if not isinstance(self.document, Mapping):
            raise JobSpecError(f"a job's document is a JSON object, not {self.document!r:.100}")
        if not isinstance(self.weight, int | float) or not 0 < self.weight <= MAX_WEIGHT:
            raise JobSpecError(f"a job's weight is a number above 0, up to {MAX_WEIGHT:g}, not {self.weight!r:.100}")

    def to_json(self) -> str:
        """The one ASCII text of all specifications that are equal to this one. Raises ``JobSpecError``."""
        table = {
            "name": self.name,
            "entry": self.entry,
            "document": dict(self.document),
            "priority_class": str(self.priority_class),
            "weight": float(self.weight),
        }
        try:
            text = json.dumps(table, sort_keys=True, allow_nan=False, separators=(",", ":"))
            # Tuples and keys that are numbers are written, but as something else.
            faithful = json.loads(text) == table
        except (TypeError, ValueError, RecursionError) as error:
            raise JobSpecError(f"the specification of job {self.name!r} is not JSON: {error!s:.200}") from error
        if not faithful:
            rule = "use dicts with texts as keys, lists, texts, finite numbers, true, false and null"
            raise JobSpecError(f"the specification of job {self.name!r} would not come back from JSON as it is; {rule}")
        if len(text) > MAX_SPEC_BYTES:
            limit = f"{len(text)} bytes as JSON; {MAX_SPEC_BYTES} are allowed"
            raise JobSpecError(f"the specification of job {self.name!r} takes {limit}")
        return text

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """What ``to_json`` made ``text`` of. Raises ``JobSpecError``."""
        try:
            table = json.loads(text)
            priority = PriorityClass(table["priority_class"])
            return cls(table["name"], table["entry"], table["document"], priority, table["weight"])
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise JobSpecError(f"a stored specification cannot be read: {text:.200}") from error


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the store knows it. Times are Unix times in seconds."""

    id: str
    spec: JobSpec
    state: JobState
    cause: str
    """Why it is in this state."""
    submitted: float
    updated: float
    """Of the last transition or progress."""
    attempts: int = 0
    """How often it has begun to run, resumptions included."""
    step: int = 0
    """The last one that was reported; after a restart the job may go on from an earlier one."""
    snapshot: str | None = None
    """Name of the last acknowledged snapshot."""
    asked: JobState | None = None
    """``paused`` or ``cancelled``, where a running job was asked to become that and has not yet."""
    asked_cause: str | None = None
    """Why it was asked."""
    schedule: str | None = None
    """The schedule that it follows in the place of the submitted one, where it was changed."""

    @property
    def priority_class(self) -> PriorityClass:
        """As submitted."""
        return self.spec.priority_class

    @property
    def weight(self) -> float:
        """As submitted."""
        return self.spec.weight


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of a job's state. ``sequence`` counts over all jobs in the order of commits, ``at`` is a Unix time."""

    sequence: int
    job: str
    from_state: JobState | None
    """``None`` for the submission."""
    to_state: JobState
    at: float
    cause: str


def check_transition(job: str, state: JobState, to: JobState, expect: JobState | None = None) -> None:
    """Raise ``JobStateError`` unless ``job``, being in ``state`` (and in ``expect``, if given), may become ``to``."""
    if expect is not None and state is not expect:
        raise JobStateError(job, state, f"become {to} as a job that is {expect}")
    if to not in TRANSITIONS[state]:
        raise JobStateError(job, state, f"become {to}")


def check_asking(job: str, state: JobState, asked: JobState | None, to: JobState | None) -> None:
    """Raise ``JobStateError`` unless ``job`` may be asked to become ``to``, after it was ``asked`` something before.

    Only a running one is asked; the others do at once what they are told. ``None`` takes back what was asked. A
    cancellation stands.
    """
    if state is not JobState.RUNNING or to not in (JobState.PAUSED, JobState.CANCELLED, None):
        raise JobStateError(job, state, f"be asked to become {to}" if to is not None else "go on")
    if asked is JobState.CANCELLED and to is not JobState.CANCELLED:
        raise JobStateError(job, state, f"become {to or 'queued'}, as it is being cancelled")
    if asked is None and to is None:
        raise JobStateError(job, state, "go on, as it does already")


def check_history(history: Iterable[Transition]) -> None:
    """Raise ``JobStateError`` unless ``history``, of one job from its submission on, is a legal path."""
    state: JobState | None = None
    for transition in history:
        if state is not transition.from_state:
            raise JobStateError(transition.job, state, f"leave {transition.from_state}")
        if state is not None:
            check_transition(transition.job, state, transition.to_state)
        elif transition.to_state is not JobState.QUEUED:
            raise JobStateError(transition.job, None, f"become {transition.to_state}")
        state = transition.to_state


def tidy_cause(cause: str) -> str:
    """``cause`` as it is kept: encodable, and not longer than is useful. Raises ``OptionError`` if it says nothing."""
    if not isinstance(cause, str) or not cause.strip():
        raise OptionError(f"a transition has a cause, a text that says why; got {cause!r:.100}")
    # Messages of exceptions may hold file names that are no valid text.
    text = cause.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_CAUSE else f"{text[: MAX_CAUSE - 1]}…"
