"""What a client may submit, how it is checked before anything runs, and the job that is made of it.

::

    JSON ──▶ check_submission ──▶ document, which the store keeps in a JobRecord ──▶ job_of ──▶ Job, which a run trains
             reports every wrong key at once                              sets the snapshot folder and resumption

A client chooses among what the operator has registered: entries, devices, and schedules by name. It cannot name a path,
a module or an address. Everything that costs memory or time has a bound here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from asyncpipe.core.checks import similar
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule, known_schedules
from asyncpipe.core.schedules.validate import check_balanced_shape
from asyncpipe.errors import AsyncpipeError
from asyncpipe.service.job_states import (
    LAST_DEADLINE,
    MAX_NAME,
    MAX_TAGS,
    MAX_WEIGHT,
    TAG,
    TAG_PATTERN,
    DeviceRequest,
    JobRecord,
    PriorityClass,
)
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.entries import Entries
from asyncpipe.train.job_file import (
    AUTO,
    MOST_DEVICES,
    FaultTable,
    Job,
    StagesTable,
    TrainingTable,
    check_overlap,
    check_replicas,
)
from asyncpipe.train.pipeline_table import Devices, devices_of_rows
from asyncpipe.train.validation import StrictModel, WrongKey, set_key, shown, wrong_keys

__all__ = [
    "Amendment",
    "AnyDevices",
    "SnapshotChoices",
    "Submission",
    "SubmissionError",
    "SubmittedPipeline",
    "SubmittedTraining",
    "changed_document",
    "check_amendment",
    "check_new_schedule",
    "check_submission",
    "job_of",
    "stages_of",
]

MOST_STEPS = 10**9
MOST_SAMPLES = 10**6
MOST_MICROBATCHES = 4096
MOST_STAGES = 1024
MOST_ACTIONS = 2**16
"""Stages times micro-batches; a task graph of this size takes a second or two to build."""
MOST_RETRIES = 1000
LONGEST_SCHEDULE = 200
MOST_PRIORITY = 100
MOST_BYTES = 64 * 1024
"""Of a whole submission as JSON."""

SubmissionInput: TypeAlias = "Submission | Mapping[str, Any] | str | bytes"
"""A submission, or its JSON as a mapping or as text."""


class SubmissionError(AsyncpipeError, ValueError):
    """A submission is not valid; ``problems`` has every wrong key, with what is wrong and what would be right."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = [WrongKey(*problem) for problem in problems]
        super().__init__("\n".join(map(str, self.problems)))


def _up_to(most: int, least: int = 1) -> Any:
    return Field(ge=least, le=most, description=f"must be an integer from {least} to {most}")


def _printable(name: str) -> str:
    if name.isprintable() and name.strip() == name:
        return name
    raise ValueError(_NAME)


def _named_schedule(value: object) -> object:
    short = isinstance(value, str) and len(value) <= LONGEST_SCHEDULE
    if short and (value == AUTO or re.sub(r"\([\w\s=,-]*\)$", "", str(value)) in _registered()):
        return value
    meant = similar(value, _registered()) if isinstance(value, str) else ""
    raise ValueError(f'{meant}must be one of {", ".join(_registered())}, or "{AUTO}"')


@cache
def _registered() -> tuple[str, ...]:
    # Cached: looking for plug-ins reads the metadata of installed packages, which takes milliseconds.
    return tuple(known_schedules())


def _bytes(value: object) -> object:
    return int(TypeAdapter(ByteSize).validate_python(value)) if isinstance(value, str) else value


def _once(tags: list[str]) -> list[str]:
    return list(dict.fromkeys(tags))


_NAME = f"must be a printable text of 1 to {MAX_NAME} characters, without spaces at its ends"
_CLASS = f"must be one of {', '.join(PriorityClass)}"
_CODE = "must be at least 8 digits of the hash of the entry's content, as the list of entries has it"
_WEIGHT = f"must be a number above 0, up to {MAX_WEIGHT:g}"
_TAGS = f"must be a list of up to {MAX_TAGS} tags, each {TAG}"
_DEADLINE = "must be a Unix time in seconds, before the year 10000"
_MEMORY = "must be a number of bytes, as 8589934592 or 8GiB"
_DEVICES = (
    'must be a list of at least one device name, such as ["cuda:0", "cuda:1"], or how many of any, as 2 or {count = 2}'
)

Memory = Annotated[int, BeforeValidator(_bytes), Field(gt=0, description=_MEMORY)]
Priority = Annotated[int, _up_to(MOST_PRIORITY, least=-MOST_PRIORITY)]
Weight = Annotated[float, Field(gt=0, le=MAX_WEIGHT, allow_inf_nan=False, description=_WEIGHT)]
Tag = Annotated[str, Field(pattern=f"^{TAG_PATTERN}$", description=f"must be {TAG}")]
Tags = Annotated[list[Tag], AfterValidator(_once), Field(max_length=MAX_TAGS, description=_TAGS)]


class AnyDevices(StrictModel):
    """``pipeline.devices`` of a job that names none: the queue chooses them when the job begins."""

    count: Annotated[int, _up_to(MOST_DEVICES)]
    memory: Memory | None = Field(default=None, exclude=True)
    """Becomes the submission's ``memory``."""
    hosts: Annotated[int, _up_to(MOST_DEVICES)] | None = None
    """The most hosts that they may be on; absent: any number."""


_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(Devices)


class SubmittedPipeline(StagesTable):
    """``pipeline``: as in a job file, but with the operator's devices, workers and registered schedules only.

    ``devices`` may be how many of any.
    """

    replicas: Annotated[int, _up_to(MOST_DEVICES)] = 1
    devices: tuple[str, ...] | AnyDevices = Field(description=_DEVICES)  # type: ignore[assignment]
    microbatches: Annotated[int, _up_to(MOST_MICROBATCHES)] = 8
    schedule: Annotated[str, BeforeValidator(_named_schedule)] = "1f1b"
    stages: Annotated[int, _up_to(MOST_STAGES)] | None = None

    @field_validator("devices", mode="wrap")
    @classmethod
    def _read_devices(cls, given: Any, _: object, info: ValidationInfo) -> tuple[str, ...] | AnyDevices:
        replicas = info.data.get("replicas")
        if isinstance(given, list | tuple):
            return _NAMES.validate_python(devices_of_rows(given, replicas))
        if type(given) is not int and not isinstance(given, dict | AnyDevices):
            raise ValueError(_DEVICES)
        found = AnyDevices.model_validate({"count": given} if type(given) is int else given)
        if replicas and found.count % replicas:
            raise ValueError(f"must be as many for each of the {replicas} replicas, which {found.count} are not")
        return found

    @property
    def request(self) -> DeviceRequest:
        """The devices that it asks for."""
        return DeviceRequest.of(self.devices if isinstance(self.devices, tuple) else dict(self.devices))

    @property
    def row(self) -> tuple[str, ...]:
        """The devices of the first replica; some names in their place, if it asks for any."""
        wanted = self.request
        return (wanted.names or ("any",) * wanted.count)[: wanted.count // self.replicas]


class SubmittedTraining(TrainingTable):
    """``training``: as in a job file, within bounds."""

    steps: Annotated[int, _up_to(MOST_STEPS)]
    batch_size: Annotated[int, _up_to(MOST_SAMPLES)]
    warmup_steps: Annotated[int, _up_to(MOST_STEPS, least=0)] = 0


class SnapshotChoices(StrictModel):
    """``snapshots``: as in a job file, without the folder and resumption, which the service sets."""

    every: Annotated[int, _up_to(MOST_STEPS)] = 100
    keep: Annotated[int, _up_to(100)] = 3
    keep_every: Annotated[int, _up_to(MOST_STEPS)] | None = None


class Submission(StrictModel):
    """A job as a client submits it."""

    name: Annotated[str, AfterValidator(_printable), Field(min_length=1, max_length=MAX_NAME, description=_NAME)]
    """The job's name for people and in metrics; need not be unique."""
    entry: str = Field(max_length=MAX_NAME, description="must be the name of a registered entry")
    parameters: dict[str, JsonValue] = Field(default_factory=dict, description="must be a table of keyword arguments")
    pipeline: SubmittedPipeline
    training: SubmittedTraining
    snapshots: SnapshotChoices = SnapshotChoices()
    faults: FaultTable = FaultTable()
    priority_class: PriorityClass = Field(default=PriorityClass.FOREGROUND, description=_CLASS)
    weight: Weight = 1.0
    """Its share of the devices' time, relative to other foreground jobs."""
    priority: Priority = 0
    """Its place among the queued jobs of its class and user: higher ones come first."""
    tags: Tags = Field(default_factory=list)
    """Words by which it is found."""
    deadline: float | None = Field(default=None, gt=0, lt=LAST_DEADLINE, allow_inf_nan=False, description=_DEADLINE)
    """The Unix time at which the job fails unless it has ended."""
    memory: Memory | None = None
    """The bytes that it needs at most on each of its devices."""
    code: str | None = Field(default=None, pattern="^[0-9a-f]{8,64}$", description=_CODE)
    """The hash of its entry's content, or how it begins: with another content it neither is taken nor begins."""

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        declared = getattr(self.pipeline.devices, "memory", None)
        if declared is not None and self.memory not in (None, declared):
            other = f"memory is {format_bytes(self.memory or 0)}"
            raise ValueError(f"pipeline.devices.memory: is {format_bytes(declared)}, and {other}; leave one out")
        object.__setattr__(self, "memory", self.memory if declared is None else declared)
        check_overlap(self.training, self.faults)
        check_replicas(self.pipeline, self.training)
        return self


class Amendment(StrictModel):
    """What of a job is to change; what is left out stays."""

    priority_class: PriorityClass | None = Field(default=None, strict=False, description=_CLASS)
    weight: Weight | None = None
    priority: Priority | None = None
    tags: Tags | None = None


# Checks


def check_submission(submission: SubmissionInput, settings: ServiceSettings, entries: Entries) -> dict[str, Any]:
    """The document of the job, with all defaults, checked as far as possible without running code of the job.

    Raises ``SubmissionError``. Takes well under a millisecond, unless a plug-in has to be imported for its schedule.
    """
    read = _read(submission, settings, entries)
    problems = [*_wrong_entry(read.entry, read.parameters, entries), *_wrong_devices(read.pipeline.request, settings)]
    problems += [*_wrong_faults(read.faults), *_wrong_for_workers(read.training, settings)]
    problems += _wrong_memory(read.memory, read.pipeline.request, settings)
    if read.pipeline.request.count <= len(settings.devices):
        problems += _wrong_schedule(read.pipeline)
    document = read.model_dump(mode="json", exclude={"code"} if read.code is None else None)
    if (size := len(json.dumps(document))) > MOST_BYTES and not problems:
        problems.append(WrongKey("", f"the submission takes {size} bytes as JSON; {MOST_BYTES} are allowed"))
    if problems:
        raise SubmissionError(problems)
    return document


def check_amendment(**changes: Any) -> dict[str, Any]:
    """Those of ``changes`` that are not ``None``, of the priority class, the weight, the priority or the tags.

    Raises ``SubmissionError``.
    """
    try:
        return Amendment(**changes).model_dump(mode="json", exclude_none=True)
    except ValidationError as error:
        raise SubmissionError(wrong_keys(error, Amendment)) from None


def check_new_schedule(record: JobRecord, schedule: str) -> dict[str, Any]:
    """The table ``pipeline`` of the job with ``schedule``, a registered name.

    Raises ``SubmissionError`` unless the job can continue with it.
    """
    if schedule == AUTO:
        rule = "must be a schedule's name; a schedule is chosen by measuring only when a job starts"
        raise SubmissionError([("schedule", rule)])
    changed = {**record.table("pipeline"), "schedule": schedule}
    try:
        pipeline = SubmittedPipeline.model_validate_json(json.dumps(changed))
    except ValidationError as error:
        raise SubmissionError(wrong_keys(error, SubmittedPipeline)) from None
    if problems := list(_wrong_schedule(pipeline)):
        raise SubmissionError([(problem.key.removeprefix("pipeline."), problem.text) for problem in problems])
    return changed


def changed_document(
    record: JobRecord,
    changes: Mapping[str, Any],
    settings: ServiceSettings,
    entries: Entries,
    *,
    fixed: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The document of ``record`` with ``changes``, by dotted keys as ``training.learning_rate``; checked as new.

    A value of ``None`` restores the key's default. Raises ``SubmissionError`` that names every wrong key, and those
    among ``fixed``, which cannot be changed.
    """
    document: dict[str, Any] = deepcopy(dict(record.document))
    problems = [(key, "cannot be changed here; submit a new job") for key in changes if key.split(".")[0] in fixed]
    for key, value in changes.items():
        if not set_key(document, key, value):
            problems.append((key[:100], "must be the key of a value, as training.learning_rate"))
    if problems:
        raise SubmissionError(problems)
    return check_submission(document, settings, entries)


def _read(submission: SubmissionInput, settings: ServiceSettings, entries: Entries) -> Submission:
    if isinstance(submission, Submission):
        return submission
    try:
        # Strict validation of Python objects would demand tuples, which JSON does not have; so validate JSON text.
        text = json.dumps(dict(submission), allow_nan=False) if isinstance(submission, Mapping) else submission
    except (TypeError, ValueError, RecursionError):
        raise SubmissionError([("", "must be a JSON object with texts as keys and finite numbers")]) from None
    try:
        return Submission.model_validate_json(text)
    except ValidationError as error:
        problems = wrong_keys(error, Submission)
        reported = {problem.key for problem in problems}
        others = (problem for problem in _wrong_for_service(text, settings, entries) if problem.key not in reported)
        raise SubmissionError([*problems, *others]) from None


def _wrong_for_service(text: str | bytes, settings: ServiceSettings, entries: Entries) -> Iterator[WrongKey]:
    """Wrong entries and devices of a submission that is not a valid ``Submission``, to report all problems at once."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    match found:
        case {"entry": str() as entry, "parameters": dict() as parameters}:
            yield from _wrong_entry(entry, parameters, entries)
        case {"entry": str() as entry} if "parameters" not in found:
            yield from _wrong_entry(entry, {}, entries)
    match found:
        case {"pipeline": {"devices": [*rows]}}:
            devices = [device for row in rows for device in (row if isinstance(row, list) else [row])]
            if all(isinstance(device, str) for device in devices):
                yield from _wrong_devices(DeviceRequest.of(devices), settings)


def _wrong_entry(entry: str, parameters: Mapping[str, Any], entries: Entries) -> Iterator[WrongKey]:
    if entry not in entries:
        yield WrongKey("entry", f"must be a registered entry: {', '.join(entries.names)}; got {shown(entry)}")
    else:
        yield from entries.validate(entry, parameters)


def _wrong_devices(request: DeviceRequest, settings: ServiceSettings) -> Iterator[WrongKey]:
    there = Counter(settings.devices)
    if request.count > len(settings.devices):
        yield WrongKey("pipeline.devices", f"must be at most {len(settings.devices)}, got {request.count}")
        return
    if not request.names and not request.fits(settings.devices):
        yield WrongKey("pipeline.devices.hosts", f"must be more: so few hosts have no {request.count} devices")
    for device, wanted in Counter(request.names).items():
        if device not in there:
            known = ", ".join(there)
            yield WrongKey("pipeline.devices", f"must be devices of this service: {known}; got {shown(device)}")
        elif wanted > there[device]:
            rule = f"must have {device} at most {there[device]} times"
            yield WrongKey("pipeline.devices", f"{rule}, got it {wanted} times")


def _wrong_faults(faults: FaultTable) -> Iterator[WrongKey]:
    for key, value in faults:
        if isinstance(value, int) and value > MOST_RETRIES:
            yield WrongKey(f"faults.{key}", f"must be an integer up to {MOST_RETRIES}, got {shown(value)}")


def _wrong_memory(memory: int | None, request: DeviceRequest, settings: ServiceSettings) -> list[WrongKey]:
    """The declared memory, if it does not fit on a device, or not on enough of them."""
    names = request.names or settings.devices
    limits = sorted((settings.memory_limit.get(device, inf), device) for device in names)
    if memory is None or request.fits([device for limit, device in limits if memory <= limit]):
        return []
    if request.names:
        rule = f"must be at most {format_bytes(limits[0][0])}, which jobs may have of {limits[0][1]}"
    else:
        rule = "must be less: too few devices of this service have as much for jobs (memory_limit)"
    return [WrongKey("memory", f"{rule}; got {format_bytes(memory)}")]


def _wrong_for_workers(training: TrainingTable, settings: ServiceSettings) -> Iterator[WrongKey]:
    if settings.workers != "threads" and not training.overlap:
        rule = "must be true: this service has its devices in worker processes, which update their stages in the step"
        yield WrongKey("training.overlap", rule)


def _wrong_schedule(pipeline: StagesTable) -> Iterator[WrongKey]:
    """Whether the schedule supports the stages, micro-batches and devices, as far as these are known."""
    if pipeline.schedule == AUTO:
        return
    try:
        schedule = find_schedule(pipeline.schedule, order=pipeline.order)
        stages = stages_of(pipeline, schedule)
        rows = pipeline.replicas
        if stages * rows > MOST_STAGES or stages * rows * pipeline.microbatches > MOST_ACTIONS:
            most = f"{MOST_STAGES} stages, and {MOST_ACTIONS} stages times micro-batches"
            which = f"{stages} stages of {pipeline.microbatches} micro-batches" + f", {rows} replicas" * (rows > 1)
            yield WrongKey("pipeline", f"{which}: at most {most}")
            return
        check_balanced_shape(schedule, Shape(stages, pipeline.microbatches, len(pipeline.row)), pipeline.balance)
    except AsyncpipeError as error:
        yield WrongKey("pipeline.schedule", str(error))


def stages_of(pipeline: StagesTable, schedule: Schedule) -> int:
    """The number of stages of a replica; for a traced model, the number that the schedule prefers."""
    if pipeline.stages is not None:
        return pipeline.stages
    if pipeline.balance != AUTO:
        return len(pipeline.balance)
    return len(pipeline.row) * schedule.virtual


# The job


def job_of(record: JobRecord, settings: ServiceSettings) -> Job:
    """The job to run for ``record``, with its snapshots in the service's folder, resuming from the newest one.

    Its error messages begin with ``job ID``. Raises ``SubmissionError`` for a document that another version of
    asyncpipe stored and this one cannot read, and for a job that no longer fits the devices or their memory.
    """
    problems = _wrong_memory(record.memory, record.request, settings)
    if not record.request.names:
        problems += _wrong_devices(record.request, settings)
    if problems:
        raise SubmissionError(problems)
    folder = settings.folder / "jobs" / record.id
    observe = {"tensorboard": str(folder / "tensorboard")} if settings.tensorboard else {}
    if settings.mlflow is not None:
        observe |= {"mlflow": settings.mlflow.get_secret_value(), "mlflow_experiment": settings.mlflow_experiment}
    tables = {
        "name": record.name,
        "job": {"entry": record.entry, "parameters": record.table("parameters")},
        "pipeline": {**record.table("pipeline"), "devices": record.devices, "workers": settings.workers},
        "training": record.table("training"),
        "faults": record.table("faults"),
        "snapshots": {**record.table("snapshots"), "folder": str(folder / "snapshots"), "resume": True},
        "observe": observe,
    }
    try:
        return Job.model_validate_json(json.dumps(tables), context={"path": Path(f"job {record.id}")})
    except ValidationError as error:
        raise SubmissionError(wrong_keys(error, Job)) from None
