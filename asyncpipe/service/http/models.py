"""What the API answers, as pydantic models: the answers are made of them, and so is the OpenAPI document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from asyncpipe.service.http.redact import Redactor
from asyncpipe.service.job_states import JobRecord, JobState, PriorityClass, Transition
from asyncpipe.service.jobs.job_log import JobEvent, LossRow

__all__ = [
    "ID",
    "MOST_LISTED",
    "EntriesAnswer",
    "EntryAnswer",
    "ErrorAnswer",
    "EventAnswer",
    "HistoryAnswer",
    "JobSummary",
    "JobDetails",
    "JobsAnswer",
    "LossAnswer",
    "LossesAnswer",
    "ReadyAnswer",
    "ScheduleRequest",
    "SchedulesAnswer",
    "TransitionAnswer",
]

ID = "^[0-9a-hjkmnp-tv-z]{26}$"
"""A job's id."""
SCHEDULE = r"^[A-Za-z0-9_.-]+(\([A-Za-z0-9_ =,-]*\))?$"
"""A schedule's name, with its options: no module, no file."""
MOST_LISTED = 1000
"""Rows of one answer."""
MOST_CAUSE = 300

Time = Annotated[float, Field(description="Unix time in seconds")]


class _ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JobSummary(_ResponseModel):
    """A job."""

    id: str = Field(pattern=ID)
    name: str
    entry: str
    state: JobState
    asked: JobState | None = Field(description="What a running job was asked to become, and has not become yet.")
    cause: str = Field(description="Why it is in this state.")
    priority_class: PriorityClass
    weight: float
    schedule: str | None = Field(description="What its next step runs by.")
    submitted: Time
    updated: Time
    attempts: int = Field(ge=0, description="How often it has begun to run, resumptions included.")
    step: int = Field(ge=0, description="Steps done, as last reported.")
    steps: int | None = Field(description="Steps in all.")
    snapshot: str | None = Field(description="Name of the newest snapshot.")


class JobDetails(JobSummary):
    """A job, with what was submitted."""

    waits_for: str | None = Field(description="Why a queued job has not begun.")
    document: dict[str, JsonValue]

    @classmethod
    def of(cls, record: JobRecord, waits_for: str | None, redact: Redactor) -> JobDetails:
        """What is told of ``record`` alone."""
        waiting = None if waits_for is None else redact(waits_for, MOST_CAUSE)
        return cls(**_facts(record, redact, 2000), waits_for=waiting, document=dict(record.spec.document))


class JobsAnswer(_ResponseModel):
    """Jobs in the order of submission."""

    jobs: list[JobSummary]
    next: str | None = Field(description="Ask for what comes behind it, as `after`; null at the end.")

    @classmethod
    def of(cls, records: list[JobRecord], redact: Redactor, limit: int) -> JobsAnswer:
        """One page; a full one may have a next."""
        jobs = [JobSummary(**_facts(record, redact, MOST_CAUSE)) for record in records]
        return cls(jobs=jobs, next=jobs[-1].id if len(jobs) >= limit else None)


def _facts(record: JobRecord, redact: Redactor, longest: int) -> dict[str, Any]:
    pipeline, training = (_table(record.spec.document, key) for key in ("pipeline", "training"))
    snapshot = record.snapshot
    return {
        "id": record.id,
        "name": record.spec.name,
        "entry": record.spec.entry,
        "state": record.state,
        "asked": record.asked,
        "cause": redact(record.cause, longest),
        "priority_class": record.priority_class,
        "weight": record.weight,
        "schedule": record.schedule or pipeline.get("schedule"),
        "submitted": record.submitted,
        "updated": record.updated,
        "attempts": record.attempts,
        "step": record.step,
        "steps": training.get("steps"),
        "snapshot": None if snapshot is None else PureWindowsPath(PurePosixPath(snapshot).name).name,
    }


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


class TransitionAnswer(_ResponseModel):
    """One change of a job's state."""

    sequence: int = Field(description="Counts over all jobs.")
    from_state: JobState | None = Field(serialization_alias="from", description="null: it was submitted.")
    to_state: JobState = Field(serialization_alias="to")
    at: Time
    cause: str

    @classmethod
    def of(cls, transition: Transition, redact: Redactor) -> TransitionAnswer:
        """What is told of ``transition``."""
        cause = redact(transition.cause)
        return cls(
            sequence=transition.sequence,
            from_state=transition.from_state,
            to_state=transition.to_state,
            at=transition.at,
            cause=cause,
        )


class HistoryAnswer(_ResponseModel):
    """Every transition of a job, its submission first."""

    transitions: list[TransitionAnswer]


class LossAnswer(_ResponseModel):
    """One training step. Numbers that are not finite are null."""

    step: int
    loss: float | None
    learning_rate: float | None
    seconds: float | None
    tokens: int

    @classmethod
    def of(cls, row: LossRow) -> LossAnswer:
        """What is told of ``row``."""
        return cls(
            step=row.step,
            loss=finite(row.loss),
            learning_rate=finite(row.learning_rate),
            seconds=finite(row.seconds),
            tokens=row.tokens,
        )


class LossesAnswer(_ResponseModel):
    """Steps of a job."""

    losses: list[LossAnswer]
    next: int | None = Field(description="Ask for what comes behind it, as `after`; null at the end, for now.")


class EventAnswer(_ResponseModel):
    """The data of a server-sent event."""

    id: int
    at: Time
    kind: Literal["state", "note", "snapshot", "step"]
    data: dict[str, JsonValue]

    @classmethod
    def of(cls, event: JobEvent, redact: Redactor) -> EventAnswer:
        """What is told of ``event``."""
        return cls(
            id=event.id,
            at=event.at,
            kind=event.kind,
            data={key: _told(value, redact) for key, value in event.data.items()},
        )


def _told(value: Any, redact: Redactor) -> Any:
    return redact(value) if isinstance(value, str) else finite(value) if isinstance(value, float) else value


def finite(value: float) -> float | None:
    """``value``, if JSON can say it."""
    return value if math.isfinite(value) else None


class ScheduleRequest(BaseModel):
    """The schedule that a job's next steps shall run by."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schedule: str = Field(
        max_length=200, pattern=SCHEDULE, description="must be the name of a schedule, as /v1/schedules lists them"
    )


class SchedulesAnswer(_ResponseModel):
    """Schedules that jobs may name."""

    schedules: list[str]


class EntryAnswer(_ResponseModel):
    """An entry that jobs may name."""

    name: str
    parameters: dict[str, JsonValue] = Field(description="JSON schema of its parameters.")


class EntriesAnswer(_ResponseModel):
    """All entries."""

    entries: list[EntryAnswer]


class ReadyAnswer(_ResponseModel):
    """How the service stands."""

    ready: bool
    reason: str


class WrongKeyAnswer(_ResponseModel):
    """One thing that is wrong with a request."""

    key: str
    text: str


class ErrorAnswer(BaseModel):
    """Why a request was not served (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    problems: list[WrongKeyAnswer] | None = Field(default=None, description="With 422: each thing that is wrong.")
    job: str | None = Field(default=None, description="With 409: the job that is in the way.")
    state: JobState | None = Field(default=None, description="With 409: its state.")
    possible: list[JobState] | None = Field(default=None, description="With 409: the states that may follow.")
    error: str | None = Field(default=None, description="With 500: what the log has it under.")
