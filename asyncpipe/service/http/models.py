"""The API's responses as pydantic models, from which responses and the OpenAPI document are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from asyncpipe.service.job_states import JobRecord, JobState, PriorityClass
from asyncpipe.service.jobs.artifacts import Artifact
from asyncpipe.service.jobs.hosts import WorkerStatus
from asyncpipe.service.jobs.outlook import Outlook
from asyncpipe.service.jobs.run_log import SaidLine
from asyncpipe.service.store.failures import FailureGroup
from asyncpipe.service.token_roles import TokenRole

ID = "^[0-9a-hjkmnp-tv-z]{26}$"
"""The pattern of a job's id."""
SCHEDULE = r"^[A-Za-z0-9_.-]+(\([A-Za-z0-9_ =,-]*\))?$"
"""The pattern of a schedule's name with its options; it matches no module and no file."""
MOST_LISTED = 1000
"""Rows of one response."""
MOST_CAUSE = 300
MOST_RUNS = 5000


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Time: TypeAlias = Annotated[float, Field(description="Unix time in seconds")]
FiniteNumber: TypeAlias = Annotated[float | None, BeforeValidator(_finite)]


class _ResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class JobSummary(_ResponseModel):
    """A job."""

    id: str = Field(pattern=ID)
    name: str
    entry: str
    state: JobState
    asked: JobState | None = Field(
        description="The state that a running job was asked to enter, and has not entered yet."
    )
    cause: str = Field(description="Why it is in this state.")
    priority_class: PriorityClass
    weight: float
    priority: int = Field(description="Its place among the queued jobs of its class and user: higher ones come first.")
    schedule: str | None = Field(description="The schedule of its next step.")
    submitted: Time
    updated: Time
    attempts: int = Field(ge=0, description="How often it was started, resumptions included.")
    step: int = Field(ge=0, description="Steps done, as last reported.")
    steps: int | None = Field(description="Steps in all.")
    snapshot: str | None = Field(description="Name of the newest snapshot.")
    devices: list[str] = Field(
        description="Those that it names, or of its last run if it asks for any; the service may have moved it since."
    )
    asks_for: str = Field(description="The devices that it asks for: names, or how many of any, as: any 2 on 1 host.")
    replicas: int = Field(ge=1, description="How many replicas share them, each with as many, in this order.")
    waits_for: str | None = Field(
        description="Why a queued job has not started, or for which lost workers a running one waits."
    )
    place: int | None = Field(ge=1, description="Of a queued job in the queue.")
    trained_seconds: float = Field(ge=0, description="How long it has been running in all.")
    waited_seconds: float = Field(ge=0, description="How long it has been queued in all.")
    loss: FiniteNumber = Field(description="Of its last step.")
    steps_per_second: FiniteNumber = Field(description="Of a running job, over its last 20 steps.")
    tokens_per_second: FiniteNumber = Field(description="The same in tokens, if its data has some.")
    left_seconds: FiniteNumber = Field(description="Until a running job is done, at this speed.")
    tags: list[str]
    deadline: Time | None = Field(description="When it fails unless it has ended.")
    memory: int | None = Field(description="The bytes that it declares to need on each of its devices.")
    crashes: int = Field(
        ge=0, description="How often the service died unasked while it ran, since its last snapshot or retry."
    )
    forked_from: str | None = Field(description="The id of the job of which it is a copy.")
    owner: str | None = Field(description="The user whose job it is; null where there are no users.")
    teams: list[str] = Field(description="Those of its owner when it was submitted.")
    code: str | None = Field(description="The hash of its entry's content when it was submitted, 12 digits of it.")
    root: str | None = Field(description="The root line of its last failure: of all that fail so it is the same.")


class JobDetails(JobSummary):
    """A job, with what was submitted."""

    document: dict[str, JsonValue]

    @classmethod
    def of_record(cls, record: JobRecord, outlook: Outlook) -> JobDetails:
        """The response for one job."""
        return cls(**_summary(record, outlook, 2000), document=_tables(record))


class JobsAnswer(_ResponseModel):
    """Jobs, the newest first."""

    jobs: list[JobSummary]
    next: str | None = Field(description="The value of `after` for the next page; null at the end.")

    @classmethod
    def of_records(cls, records: Sequence[JobRecord], outlooks: Mapping[str, Outlook], limit: int) -> JobsAnswer:
        """One page of at most ``limit`` jobs; a full page may have a next one."""
        jobs = [JobSummary(**_summary(record, outlooks[record.id], MOST_CAUSE)) for record in records]
        return cls(jobs=jobs, next=jobs[-1].id if len(jobs) >= limit else None)


def _tables(record: JobRecord) -> dict[str, Any]:
    """The tables that were submitted; the summary has the other values."""
    return {key: value for key, value in record.document.items() if isinstance(value, dict)}


def _summary(record: JobRecord, outlook: Outlook, longest: int) -> dict[str, Any]:
    """The fields of a ``JobSummary``, with a cause of at most ``longest`` characters."""
    of_record = (
        "id", "state", "asked", "submitted", "updated", "attempts", "step", "crashes", "forked_from", "name", "entry",
        "priority_class", "weight", "priority", "deadline", "memory", "schedule", "steps", "replicas", "owner", "root",
    )  # fmt: skip
    snapshot = record.snapshot
    return {
        **{each.name: getattr(outlook, each.name) for each in fields(outlook)},
        **{name: getattr(record, name) for name in of_record},
        "devices": list(record.devices),
        "asks_for": str(record.request),
        "tags": list(record.tags),
        "code": record.code and record.code[:12],
        "teams": list(record.teams),
        "cause": record.cause[:longest],
        "snapshot": None if snapshot is None else PureWindowsPath(PurePosixPath(snapshot).name).name,
    }


class CountsAnswer(_ResponseModel):
    """How many jobs there are."""

    states: dict[JobState, int] = Field(description="Jobs by state.")
    sequence: int = Field(description="The number of the newest transition: while it stays, no job has another state.")


class TransitionAnswer(_ResponseModel):
    """One change of a job's state."""

    sequence: int = Field(description="Counts over all jobs.")
    from_state: JobState | None = Field(serialization_alias="from", description="null for the submission.")
    to_state: JobState = Field(serialization_alias="to")
    at: Time
    cause: str
    step: int | None = Field(description="The last step done then; of a run that begins, that it goes on from.")


class HistoryAnswer(_ResponseModel):
    """Every transition of a job, its submission first."""

    transitions: list[TransitionAnswer]


class LossAnswer(_ResponseModel):
    """One training step. Infinite numbers and NaN are null."""

    step: int
    loss: FiniteNumber
    learning_rate: FiniteNumber
    seconds: FiniteNumber
    tokens: int
    gradient_norm: FiniteNumber = Field(description="Before clipping; null where it is not known.")


class LossesAnswer(_ResponseModel):
    """Steps of a job."""

    losses: list[LossAnswer]
    next: int | None = Field(description="The value of `after` for the next page; null at the end, for now.")


class EventAnswer(_ResponseModel):
    """The data of a server-sent event."""

    id: int
    at: Time
    kind: Literal["state", "note", "snapshot", "step"]
    data: dict[str, JsonValue]


class SaidAnswer(_ResponseModel):
    """What a run said."""

    run: int = Field(description="0 if no run has said anything.")
    lines: list[SaidLine]
    next: int = Field(description="The value of `after` for what follows.")


class LogsAnswer(SaidAnswer):
    """What a run said, and of which runs there is something."""

    runs: list[int]
    more: bool = Field(description="Whether there may be more now.")


class FailuresAnswer(_ResponseModel):
    """Jobs that have failed, by the root line of their last failure."""

    failures: list[FailureGroup]


class ScheduleRequest(BaseModel):
    """The schedule that a job follows from its next step on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schedule: str = Field(
        max_length=200, pattern=SCHEDULE, description="must be the name of a schedule, as /v1/schedules lists them"
    )


class RetryRequest(BaseModel):
    """From where a job goes on, and with which other values."""

    model_config = ConfigDict(extra="forbid", strict=True)

    from_step: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="must be the step of a snapshot, or 0 to begin anew; the newest snapshot if it is left out",
    )
    changes: dict[str, JsonValue] = Field(
        default_factory=dict,
        alias="set",
        max_length=100,
        description="must be a table of other values, by keys as training.learning_rate; null brings the default back",
    )


class DeletedAnswer(_ResponseModel):
    """What was deleted, or would be."""

    id: str = Field(pattern=ID)
    name: str
    state: JobState
    deleted: bool = Field(description="Whether it is gone now.")
    files: int
    bytes: int
    snapshots: list[int] = Field(description="Their steps.")


class CandidateAnswer(_ResponseModel):
    """A job that a name, or the beginning of an id, may mean."""

    id: str
    name: str
    state: JobState


class SchedulesAnswer(_ResponseModel):
    """Schedules that jobs may name."""

    schedules: list[str]


class EntryAnswer(_ResponseModel):
    """An entry that jobs may name."""

    name: str
    code: str | None = Field(description="The hash of its content; null if that is not known.")
    parameters: dict[str, JsonValue] = Field(description="JSON schema of its parameters.")


class EntriesAnswer(_ResponseModel):
    """All entries."""

    entries: list[EntryAnswer]
    submission: dict[str, JsonValue] = Field(description="JSON schema of what is submitted, with all defaults.")


class DeviceAnswer(_ResponseModel):
    """A device of the service."""

    name: str
    places: int = Field(ge=1, description="How often jobs may name it at once.")
    memory_limit: int | None = Field(description="The bytes that jobs may have there.")


class RunAnswer(_ResponseModel):
    """A run of a job, which may have been deleted."""

    job: str = Field(description="Its id; empty for a job that is not to be seen.")
    attempt: int
    owner: str | None
    devices: list[str]
    began: Time
    ended: Time | None = Field(description="null while it runs.")


class DevicesAnswer(_ResponseModel):
    """The devices of the service, and who uses them."""

    now: Time
    devices: list[DeviceAnswer]
    runs: list[RunAnswer] = Field(description="The last 5,000 of the last 24 hours, the oldest first.")


class MeAnswer(_ResponseModel):
    """Who asks."""

    user: str | None = Field(description="null where there are no users.")
    role: TokenRole
    teams: list[str]
    team_access: str = Field(description="What the user may do with jobs of these teams: none, read or change.")


class WorkersAnswer(_ResponseModel):
    """Workers of the service; none if its devices are threads."""

    workers: list[WorkerStatus]


class ArtifactsAnswer(_ResponseModel):
    """What can be downloaded, the models of all snapshots first, newest first."""

    artifacts: list[Artifact]


class ReadyAnswer(_ResponseModel):
    """The state of the service."""

    ready: bool
    reason: str


class WrongKeyAnswer(_ResponseModel):
    """One wrong key of a request."""

    key: str
    text: str


class ErrorAnswer(BaseModel):
    """Why a request was not served (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    problems: list[WrongKeyAnswer] | None = Field(default=None, description="With 422: each wrong key.")
    candidates: list[CandidateAnswer] | None = Field(
        default=None, description="With 404: the newest jobs that may be meant."
    )
    job: str | None = Field(default=None, description="With 409: the job that caused the conflict.")
    state: JobState | None = Field(default=None, description="With 409: its state.")
    possible: list[JobState] | None = Field(default=None, description="With 409: the states that may follow.")
    error: str | None = Field(default=None, description="With 500: the number of the error in the log.")
