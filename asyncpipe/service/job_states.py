"""Jobs and their states: what the store keeps of a job, and the one table of allowed transitions. Pure.

::

                 ┌─────────────────── resumed ──────────────────────┐
                 │  ┌─ restarted, shutting down, or tried again ─┐   │
                 ▼  ▼                                            │   │
    submitted ▶ queued ─────────────── begins ─────────────────▶ running ─── asked for ───▶ paused
                ▲│ │ │                                            │ │ │                     ▲  │
                ││ │ └──────────────────── asked for ─────────────┼─┼─┼─────────────────────┘  │
                ││ └─ cannot be built ─▶ failed ◀─────────────────┘ │ └─▶ finished             │
                │└────────────────────▶ cancelled ◀─────────────────┴──────────────────────────┘
                └────── retried ─────── failed, cancelled, quarantined

Jobs in ``FINAL_STATES`` have ended: nothing happens to them by itself. Only ``finished`` is for ever: the others go on
if somebody retries them. A job is ``quarantined`` from any state before its end, when it seems to take the service
down, or what it needs to go on is lost. A paused job fails when its deadline passes.

A resumed job is queued again, since its devices may be in use. A running job takes a moment to pause or to be
cancelled; the request is stored meanwhile (``JobRecord.asked``), so that it survives if the process is killed.
"""

# mypy: disable-error-code=no-any-return
# Values of a document are JSON.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from asyncpipe.core.hosts import host_of
from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.train.redaction import redacted

__all__ = [
    "FINAL_STATES",
    "TAG",
    "TAG_PATTERN",
    "TRANSITIONS",
    "DeviceRequest",
    "JobRecord",
    "JobState",
    "JobStateError",
    "PriorityClass",
    "Transition",
    "check_asking",
    "check_transition",
    "is_idempotency_key",
    "is_tag",
    "tidy_cause",
]

MAX_NAME = 200
MAX_WEIGHT = 1e6
MAX_CAUSE = 2000
MAX_KEY = 200
MAX_TAGS = 20
MAX_TAG = 64
LAST_DEADLINE = 253402300800.0
"""The end of the year 9999, as a Unix time."""
IDEMPOTENCY_KEY = f"1 to {MAX_KEY} printable ASCII characters"
"""What an idempotency key is, for messages."""
TAG = f"1 to {MAX_TAG} letters, digits and any of . _ : / = + -"
"""What a tag is, for messages."""
TAG_PATTERN = rf"[A-Za-z0-9._:/=+-]{{1,{MAX_TAG}}}"


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"


class PriorityClass(StrEnum):
    """Whether a job has a share of its devices (foreground), or only the time that others leave idle (background)."""

    FOREGROUND = "foreground"
    BACKGROUND = "background"


TRANSITIONS: Mapping[JobState, tuple[JobState, ...]] = MappingProxyType(
    {
        JobState.QUEUED: (
            JobState.RUNNING,
            JobState.PAUSED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.QUARANTINED,
        ),
        JobState.RUNNING: (
            JobState.QUEUED,
            JobState.PAUSED,
            JobState.FINISHED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.QUARANTINED,
        ),
        JobState.PAUSED: (JobState.QUEUED, JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED),
        JobState.FINISHED: (),
        JobState.FAILED: (JobState.QUEUED,),
        JobState.CANCELLED: (JobState.QUEUED,),
        JobState.QUARANTINED: (JobState.QUEUED,),
    }
)
"""The states that may follow each state."""

FINAL_STATES = frozenset({JobState.FINISHED, JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED})
"""Of jobs that have ended; those that can be retried as well."""


class JobStateError(AsyncpipeError, RuntimeError):
    """A job's state does not allow a request; the message says what it allows. Nothing was changed.

    ``job`` is the job's id, ``state`` its state, ``asked`` the request, ``possible`` the states that may follow.
    """

    def __init__(self, job: str, state: JobState, asked: str) -> None:
        self.job = job
        self.state = state
        self.asked = asked
        self.possible = TRANSITIONS[state]
        after = f"from there it can become {', '.join(self.possible)}" if self.possible else "that state is final"
        super().__init__(f"job {job} is {state}: it cannot {asked}; {after}")


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The devices that a job asks for: those that it names, or so many of any."""

    count: int
    names: tuple[str, ...] = ()
    """A device once for each time that it is named; empty: any devices."""
    hosts: int | None = None
    """The most hosts that any devices may be on."""

    @classmethod
    def of(cls, given: Any) -> DeviceRequest:
        """What ``pipeline.devices`` of a job's document asks for."""
        if isinstance(given, Mapping):
            return cls(given["count"], (), given.get("hosts"))
        return cls(len(given), tuple(given))

    def fits(self, devices: Sequence[str]) -> bool:
        """Whether ``devices`` have enough for it, each listed once for each time that a job may have it."""
        if self.names:
            return not Counter(self.names) - Counter(devices)
        return sum(sorted(Counter(map(host_of, devices)).values(), reverse=True)[: self.hosts]) >= self.count

    def __str__(self) -> str:
        if self.names:
            return ", ".join(self.names)
        return f"any {self.count}" + ("" if self.hosts is None else f" on {self.hosts} host" + "s" * (self.hosts > 1))


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job: what was submitted, and what has become of it. Times are Unix times in seconds."""

    id: str
    document: Mapping[str, Any]
    """The submission as a JSON object, with its defaults and with later changes; ``Submission`` has checked it."""
    state: JobState
    cause: str
    """Why it is in this state."""
    submitted: float
    updated: float
    """The time of the last transition or progress."""
    attempts: int = 0
    """How often it was started, resumptions included."""
    step: int = 0
    """The last reported step; after a restart the job may continue from an earlier one."""
    snapshot: str | None = None
    """The name of the last snapshot that is known to be on disk."""
    asked: JobState | None = None
    """``paused`` or ``cancelled``, if a running job was asked to become that and has not yet."""
    asked_cause: str | None = None
    """The cause of that request."""
    crashes: int = 0
    """How often the service died unasked while it ran, since its last snapshot or retry."""
    failures: int = 0
    """How many of its runs in a row have failed, since its last snapshot or retry."""
    forked_from: str | None = None
    """The id of the job of which it is a copy; that job may have been deleted."""
    from_step: int | None = None
    """The step of the snapshot that its next run goes on from, if a retry has named one."""
    owner: str | None = None
    """The user whose job it is, if its service knows users."""
    teams: tuple[str, ...] = ()
    """Those of its owner when it was submitted."""
    placed: tuple[str, ...] = ()
    """The devices of its last run."""
    code: str | None = None
    """The hash of its entry's content when it was submitted."""
    root: str | None = None
    """The root line of its last failure: the same for all jobs that failed at one place in one way."""

    def table(self, name: str) -> Mapping[str, Any]:
        """The table ``name`` of the document; empty if there is none."""
        table = self.document.get(name)
        return table if isinstance(table, dict) else {}

    @property
    def name(self) -> str:
        """Its name for people and in metrics; several jobs may have the same."""
        return str(self.document["name"])

    @property
    def entry(self) -> str:
        """The registered ``module:factory``."""
        return str(self.document["entry"])

    @property
    def priority_class(self) -> PriorityClass:
        """Whether it has a share of its devices, or what others leave."""
        return PriorityClass(self.document.get("priority_class", PriorityClass.FOREGROUND))

    @property
    def is_background(self) -> bool:
        """Whether the job has only the device time that others leave idle."""
        return self.priority_class is PriorityClass.BACKGROUND

    @property
    def weight(self) -> float:
        """Its share of the devices' time, relative to other foreground jobs."""
        return self.document.get("weight", 1.0)

    @property
    def tags(self) -> tuple[str, ...]:
        """Words by which the job is found."""
        return tuple(self.document.get("tags", ()))

    @property
    def deadline(self) -> float | None:
        """The Unix time at which the job fails unless it has ended."""
        return self.document.get("deadline")

    @property
    def memory(self) -> int | None:
        """The bytes that the job declares to need on each of its devices."""
        return self.document.get("memory")

    @property
    def request(self) -> DeviceRequest:
        """The devices that it asks for."""
        return DeviceRequest.of(self.table("pipeline").get("devices", ()))

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that it names; if it asks for any, those of its last run, and none before."""
        return self.request.names or self.placed

    @property
    def priority(self) -> int:
        """Its place among the queued jobs of its class and user: higher ones come first."""
        return self.document.get("priority", 0)

    @property
    def replicas(self) -> int:
        """How many replicas share its devices."""
        return int(self.table("pipeline").get("replicas", 1))

    @property
    def schedule(self) -> str | None:
        """The schedule of its next step, if it names one."""
        return self.table("pipeline").get("schedule")

    @property
    def retries(self) -> int:
        """How many failures in a row, without a new snapshot, are tried again."""
        return self.table("faults").get("snapshot_retries", 0)

    @property
    def steps(self) -> int | None:
        """How many steps it has in all."""
        return self.table("training").get("steps")


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
    step: int | None = None
    """The last step done then; of a run that begins, the step that it goes on from. ``None`` in older records."""


def check_transition(job: str, state: JobState, to: JobState, expect: JobState | None = None) -> None:
    """Raise ``JobStateError`` unless ``job``, being in ``state`` (and in ``expect``, if given), may become ``to``."""
    if expect is not None and state is not expect:
        raise JobStateError(job, state, f"become {to} as a job that is {expect}")
    if to not in TRANSITIONS[state]:
        raise JobStateError(job, state, f"become {to}")


def check_asking(job: str, state: JobState, asked: JobState | None, to: JobState | None) -> None:
    """Raise ``JobStateError`` unless ``job`` may be asked to become ``to``; ``asked`` is the request before, if any.

    Only a running job is asked; jobs in other states change at once. ``None`` withdraws the request, which is not
    possible for a cancellation.
    """
    if state is not JobState.RUNNING or to not in (JobState.PAUSED, JobState.CANCELLED, None):
        raise JobStateError(job, state, f"be asked to become {to}" if to is not None else "go on")
    if asked is JobState.CANCELLED and to is not JobState.CANCELLED:
        raise JobStateError(job, state, f"become {to or 'queued'}, as it is being cancelled")
    if asked is None and to is None:
        raise JobStateError(job, state, "go on, as it does already")


def tidy_cause(cause: str) -> str:
    """``cause`` as it is stored: encodable, without secrets, at most ``MAX_CAUSE`` characters.

    Raises ``OptionError`` if it is empty.
    """
    if not isinstance(cause, str) or not cause.strip():
        raise OptionError(f"a transition has a cause, a text that says why; got {cause!r:.100}")
    # Messages of exceptions may contain file names that cannot be encoded.
    text = redacted(cause.encode("utf-8", "backslashreplace").decode())
    return text if len(text) <= MAX_CAUSE else f"{text[: MAX_CAUSE - 1]}…"


def is_tag(tag: object) -> bool:
    """Whether ``tag`` can be a tag of a job, which is ``TAG``."""
    return isinstance(tag, str) and re.fullmatch(TAG_PATTERN, tag) is not None


def is_idempotency_key(key: object) -> bool:
    """Whether ``key`` can be an idempotency key."""
    return isinstance(key, str) and 0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()
