"""The job file: what a TOML file may say about a training job, and what is wrong with one that says else.

A whole file::

    name = "charlm"

    [job]
    entry = "charlm:build"              # module next to this file, or anywhere on sys.path
    [job.parameters]                    # keyword arguments of the entry
    width = 128

    [pipeline]
    devices = ["cpu:0", "cpu:1"]
    schedule = "1f1b"

    [training]
    steps = 500
    batch_size = 64
    learning_rate = 3e-3

    [observe]
    metrics_port = 9400
    trace = "runs/charlm.json"

    [snapshots]                         # without this table there are none
    folder = "runs/charlm"
    every = 100
    keep = 3
    keep_every = 10                     # every 10th is kept for good
    resume = true                       # go on from the newest that is whole, if there is one

    [faults]
    step_retries = 1                    # a step that fails is tried again, with the same batch
    snapshot_retries = 2                # then a service goes back to the last snapshot
    non_finite = "fail"                 # a NaN or infinite loss or gradient; or "skip", or "ignore"
    most_skipped = 10                   # in a row

Paths in it are relative to the working directory. Nothing of the job is imported here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, Strict, ValidationError
from pydantic_core import ErrorDetails

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.schedules.registry import could_be_schedule, known_schedules
from asyncpipe.errors import JobFileError

__all__ = [
    "AUTO",
    "Entry",
    "Faults",
    "Job",
    "Observe",
    "PipelineTable",
    "SnapshotTable",
    "Training",
    "job_file_error",
    "load_job",
]


AUTO = "auto"
"""The schedule that is chosen by measuring, when the job starts."""


def _checked_schedule(value: object) -> object:
    if value != AUTO and not (isinstance(value, str) and could_be_schedule(value)):
        raise ValueError(f'must be one of {_listed(known_schedules())}, or "auto", "module:Class" or "csv:FILE"')
    return value


def _checked_checkpoint(value: Any) -> CheckpointMode:
    if value not in list(CheckpointMode):
        raise ValueError(f"must be one of {_listed(CheckpointMode)}")
    return CheckpointMode(value)


def _checked_balance(value: object) -> object:
    if isinstance(value, list) and value and all(type(layers) is int and layers > 0 for layers in value):
        return tuple(value)
    if value == "auto" or isinstance(value, tuple):
        return value
    raise ValueError('must be "auto" or a list of positive integers, the layers of each stage')


def _checked_devices(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not all(value):
        raise ValueError(_DEVICES)
    return value


# What is allowed stands in each field's description, and error messages quote it.

_DEVICES = 'must be a list of at least one device name, such as ["cpu:0", "cpu:1"] or ["cuda:0", "cuda:0"]'
_COUNT = "must be an integer of at least 1"
_POSITIVE = "must be a finite number greater than 0"
_PORT = "must be a port from 0 (any free one) to 65535"
_OUTPUT = "must be the path of a file to write"
_FOLDER = "must be the path of a folder, which is made if it is not there"
_NON_FINITE = 'must be "fail", "skip" or "ignore"'
_SNAPSHOTS = "must be a table with the keys folder, every, keep, keep_every, resume"

Count = Annotated[int, Field(ge=1, description=_COUNT)]
Natural = Annotated[int, Field(ge=0, description="must be an integer of at least 0")]
Seed = Annotated[int, Field(ge=0, lt=2**63, description="must be an integer from 0 to 2**63 - 1")]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description=_POSITIVE)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="must be a finite number of at least 0")]
Name = Annotated[str, Field(min_length=1, description="must be a string that is not empty")]
Flag = Annotated[bool, Field(description="must be true or false")]
OutputPath = Annotated[Path, Strict(False)]
Devices = Annotated[
    tuple[Annotated[str, Strict()], ...], Strict(False), AfterValidator(_checked_devices), Field(description=_DEVICES)
]
Balance = Annotated[Literal["auto"] | tuple[int, ...], BeforeValidator(_checked_balance)]


class _Table(BaseModel):
    """A table of the file: strict about types, without unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Entry(_Table):
    """``[job]``: which function makes the workload, and its keyword arguments."""

    entry: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description='must have the form "module:function", as "charlm:build"'
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="must be a table of keyword arguments")


class PipelineTable(_Table):
    """``[pipeline]``: the arguments of ``asyncpipe.Pipeline``."""

    devices: Devices
    microbatches: Count = 8
    schedule: Annotated[str, BeforeValidator(_checked_schedule)] = "1f1b"
    order: Literal["strict", "hint"] = Field(default="strict", description='must be "strict" or "hint"')
    """With "hint" an ordered schedule's order only ranks what is ready."""
    checkpoint: Annotated[CheckpointMode, BeforeValidator(_checked_checkpoint)] = CheckpointMode.EXCEPT_LAST
    balance: Balance = "auto"
    stages: Count | None = Field(default=None, description=_COUNT)
    """Stages in all; as many as the schedule likes (one a device, mostly) when absent."""


class Training(_Table):
    """``[training]``: how long, how much at once, and AdamW's settings."""

    steps: Count
    batch_size: Count
    """Samples a step, over all micro-batches."""
    learning_rate: Positive
    """The highest one, reached after the warm-up."""
    warmup_steps: Natural = 0
    weight_decay: NonNegative = 0.0
    clip: Positive | None = Field(default=None, description=_POSITIVE)
    """The largest norm of all gradients together; absent means that they are not clipped."""
    seed: Seed = 0


class Observe(_Table):
    """``[observe]``: what can be watched from outside."""

    metrics_port: Port | None = Field(default=None, description=_PORT)
    """0 takes any free port; absent means that no metrics are served."""
    metrics_address: Name = "127.0.0.1"
    trace: OutputPath | None = Field(default=None, description=_OUTPUT)
    """A Chrome trace of the last steps, for ui.perfetto.dev."""
    timeline: OutputPath | None = Field(default=None, description=_OUTPUT)
    """An SVG picture of the last step."""
    trace_steps: Count = 3
    """How many of the last steps the trace holds."""
    serve_port: Port | None = Field(default=None, description=_PORT)
    """A page to watch the run is served here, on 127.0.0.1; 0 takes any free port, absent means that there is none."""
    opentelemetry: Flag = False
    """Whether every step becomes an OpenTelemetry span, of the tracer provider that the process has."""
    nvtx: Flag = False
    """Whether tasks are NVTX ranges, for NVIDIA's profilers."""


class SnapshotTable(_Table):
    """``[snapshots]``: what is saved of the run, and when."""

    folder: OutputPath = Field(description=_FOLDER)
    every: Count = 100
    """Steps from one snapshot to the next; there is one more at the run's end."""
    keep: Count = 3
    """How many of the last ones stay."""
    keep_every: Count | None = Field(default=None, description=_COUNT)
    """Every so many snapshots, one stays for good, beside the last ones; absent means that none does."""
    resume: Flag = False
    """Whether the run goes on from the newest whole one in the folder; where there is none, it starts afresh."""


class Faults(_Table):
    """``[faults]``: what goes wrong without ending the job, and how often it may."""

    step_retries: Natural = 1
    """How often a step that fails is tried again, with the same batch and the same random numbers."""
    snapshot_retries: Natural = 2
    """How often in a row, without a new snapshot, a service then lets the job go back to the last one; alone, a run
    ends."""
    non_finite: Literal["fail", "skip", "ignore"] = Field(default="fail", description=_NON_FINITE)
    """What a loss or a gradient norm that is NaN or infinite does: end the run before the weights are updated, leave
    that one update out, or nothing."""
    most_skipped: Count = 10
    """How many updates in a row may be left out before that ends the run, too."""


class Job(_Table):
    """A whole job file; ``path`` is where it was read from."""

    name: Name
    job: Entry
    pipeline: PipelineTable
    training: Training
    observe: Observe = Observe()
    snapshots: SnapshotTable | None = Field(default=None, description=_SNAPSHOTS)
    """None are taken where it is absent."""
    faults: Faults = Faults()

    _path: Path = PrivateAttr(default=Path("job.toml"))

    @property
    def path(self) -> Path:
        """The file that it was read from; the entry's module is looked for next to it."""
        return self._path

    def override(self, table: str, **values: object) -> Job:
        """The same job with other values in one table; those that are ``None`` stay as they are.

        A table that is absent is made of the values, if there are any. They are taken as they are: the command line
        has checked them.
        """
        given = {key: value for key, value in values.items() if value is not None}
        current: BaseModel | None = getattr(self, table)
        if current is None and not given:
            return self
        changed = _find_table([table])(**given) if current is None else current.model_copy(update=given)
        return self.model_copy(update={table: changed})


def load_job(path: str | Path) -> Job:
    """The job in the file at ``path``.

    Raises ``JobFileError`` if it cannot be read or is not TOML, else with one line for each wrong key and
    value: the file's name, the dotted key, what is wrong and what is allowed.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise job_file_error(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise job_file_error(path, f"is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise job_file_error(path, f"is not valid TOML: {error}") from error
    try:
        job = Job.model_validate(tables)
    except ValidationError as error:
        raise job_file_error(path, *map(_explain, error.errors(include_url=False))) from None
    job._path = path
    return job


def job_file_error(path: Path, *problems: str) -> JobFileError:
    """One error for all ``problems`` of the file, a line each."""
    return JobFileError("\n".join(f"{path}: {problem}" for problem in problems))


# Messages


def _explain(error: ErrorDetails) -> str:
    """``training.steps: must be an integer of at least 1, got 0``."""
    *tables, last = names = [part for part in error["loc"] if isinstance(part, str)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).removeprefix(".")
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_known_keys(tables, last)}"
    allowed = str(error["ctx"]["error"]) if error["type"] == "value_error" else _allowed(names)
    if error["type"] == "missing":
        return f"{key}: missing; {allowed}"
    return f"{key}: {allowed}, got {_shown(error['input'])}"


def _find_table(keys: Sequence[str]) -> type[BaseModel]:
    """The model of the table at ``keys``."""
    table: type[BaseModel] = Job
    for key in keys:
        annotation = table.model_fields[key].annotation
        # One that may be absent is annotated as a union with None.
        (table,) = (
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        )
    return table


def _allowed(keys: Sequence[str]) -> str:
    """What the value at ``keys`` may be."""
    described = _find_table(keys[:-1]).model_fields[keys[-1]].description
    return described or f"must be a table with the keys {_listed(_find_table(keys).model_fields)}"


def _known_keys(tables: Sequence[str], wrong: str) -> str:
    known = list(_find_table(tables).model_fields)
    close = get_close_matches(wrong, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    where = f" of [{'.'.join(tables)}]" if tables else ""
    return f"{hint}known keys{where}: {_listed(known)}"


def _listed(values: Iterable[str]) -> str:
    return ", ".join(values)


def _shown(value: object) -> str:
    """``value`` about as the file has it, cut to one short line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
