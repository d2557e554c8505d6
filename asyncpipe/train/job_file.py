"""The typed job: a TOML job file, read once, as a frozen ``Job``.

A whole file::

    name = "charlm"

    [job]
    entry = "charlm:build"              # module next to this file, or anywhere on sys.path; or model = "transformers"
    [job.parameters]                    # keyword arguments of the entry
    width = 128

    [pipeline]
    devices = ["cpu:0", "cpu:1"]        # or, with replicas, a list for each: [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]];
                                        # or for a service: 2, or {count = 2, memory = "20 GiB", hosts = 1}, of any
    schedule = "1f1b"
    workers = "threads"                 # or "processes", "ray", "torchrun"; see PipelineTable

    [training]
    steps = 500
    batch_size = 64
    learning_rate = 3e-3
    overlap = false                     # true: a step begins before the one before has ended; see TrainingTable

    [observe]
    metrics_port = 9400
    trace = "runs/charlm.json"

    [snapshots]                         # without this table none are taken
    folder = "runs/charlm"
    every = 100
    keep = 3
    keep_every = 10                     # every 10th is never removed
    resume = true                       # continue from the newest intact one, if there is one

    [faults]
    step_retries = 1                    # a failed step is retried with the same batch
    snapshot_retries = 2                # after that, a service restarts the job from its last snapshot
    non_finite = "fail"                 # if loss or gradients are NaN or infinite; or "skip", or "ignore"
    most_skipped = 10                   # skipped updates in a row
    lost_host = "fail"                  # if workers are lost: or "wait" for others, or "split" the model anew
    wait_seconds = 60.0                 # how long to wait for them

    [ray]                               # for workers = "ray"; see RayTable
    address = "10.0.0.5:6379"           # of a cluster; absent: one is started, on this machine
    interface = "10.0.0.7"              # of this machine, where workers connect to

    [service]                           # what only a service reads, when the job is submitted to one
    tags = ["night"]
    deadline = 2026-12-01T08:00:00Z

Relative paths are relative to the working directory. Nothing of the job is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator

from asyncpipe.errors import JobFileError, OptionError
from asyncpipe.runtime.workers.launcher import Launcher
from asyncpipe.runtime.workers.ray_workers import RayWorkers
from asyncpipe.train.pipeline_table import AUTO, PipelineTable, StagesTable
from asyncpipe.train.validation import StrictModel, read_toml, set_key, wrong_keys
from asyncpipe.train.value_types import (
    Flag,
    NonEmptyText,
    NonNegativeFloat,
    NonNegativeInt,
    OutputFile,
    OutputFolder,
    PositiveFloat,
    PositiveInt,
    Seed,
    TcpPort,
)

__all__ = [
    "AUTO",
    "FaultTable",
    "Job",
    "JobTable",
    "ObserveTable",
    "PipelineTable",
    "RayTable",
    "SnapshotTable",
    "StagesTable",
    "TrainingTable",
    "blaming_key",
    "check_overlap",
    "check_replicas",
    "check_workers",
    "job_file_error",
    "load_job",
    "load_job_for_service",
]


MOST_DEVICES = 1024
BUILT_IN = {"transformers": "asyncpipe.train.transformers_entry:build"}
"""The entries that have a name, as ``model``."""


class JobTable(StrictModel):
    """``[job]``: the function that makes the workload, and its keyword arguments."""

    entry: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description='must have the form "module:function", as "charlm:build"'
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="must be a table of keyword arguments")
    model: Literal["transformers"] | None = Field(default=None, description=f"must be one of {', '.join(BUILT_IN)}")
    """A built-in entry: ``"transformers"`` is ``asyncpipe.train.transformers_entry.build``, which explains its
    parameters. It takes the place of ``entry``."""

    @model_validator(mode="before")
    @classmethod
    def _entry_of_model(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("model") is None or "entry" in given:
            return given
        return {**given, "entry": BUILT_IN.get(str(given["model"]), BUILT_IN["transformers"])}

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.model is not None and self.entry != BUILT_IN[self.model]:
            raise ValueError("give either model, which is built in, or entry, which is a function of your own")
        return self


class RayTable(StrictModel):
    """``[ray]``: options of ``asyncpipe.RayWorkers``, which explains them; for ``pipeline.workers = "ray"``."""

    address: NonEmptyText = "local"
    placement: Literal["host", "device"] = Field(default="host", description='must be "host" or "device"')
    hosts: PositiveInt | None = None
    cpus: NonNegativeFloat = 1.0
    resources: dict[str, PositiveFloat] = Field(default_factory=dict, description="must be a table of numbers")
    placement_group: NonEmptyText | None = None
    interface: NonEmptyText | None = None
    environment: dict[str, str] = Field(default_factory=dict, description="must be a table of texts")
    seconds: PositiveFloat = 60.0

    def launcher(self, name: str) -> RayWorkers:
        """What starts workers for a pool; Ray lists them by ``name``."""
        return RayWorkers(**self.model_dump(), name=name)


class TrainingTable(StrictModel):
    """``[training]``: the number of steps, the batch size and AdamW's settings."""

    steps: PositiveInt
    batch_size: PositiveInt
    """Samples of a step, over all micro-batches of all replicas."""
    learning_rate: PositiveFloat
    """The highest learning rate, which is reached after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    """The largest norm of all gradients together; absent: they are not clipped. With ``overlap`` each update waits for
    the norms of all stages."""
    seed: Seed = 0
    overlap: Flag = False
    """Whether each stage is updated as soon as its last backward is done and begins the next step, while other devices
    still end this one (``Pipeline.steps``). Losses and weights are the same to the last bit.

    Nothing can be decided between two steps then, and a job must say so: a failed step is not
    retried (``step_retries = 0``), and no update is skipped (``non_finite`` is not ``"skip"``). With ``"fail"`` a loss
    or gradient norm that is not finite still ends the run at its step, but the weights are updated already: the run
    goes on from its last snapshot, which is never behind such a step. Losses are read while the next step computes, and
    the run stops, takes snapshots and changes its schedule when the steps that have begun are done.

    Steps run one by one, and the run says why, where the pipeline cannot overlap them: a schedule that decides as it
    goes, parameters that stages share."""


class ObserveTable(StrictModel):
    """``[observe]``: metrics, pictures and traces of the run."""

    metrics_port: TcpPort | None = None
    """Port of the Prometheus metrics; 0 takes any free port; absent: no metrics are served."""
    metrics_address: NonEmptyText = "127.0.0.1"
    trace: OutputFile | None = None
    """File for a Chrome trace of the last steps, for ui.perfetto.dev."""
    timeline: OutputFile | None = None
    """File for an SVG picture of the last step."""
    trace_steps: PositiveInt = 3
    """How many of the last steps the trace holds."""
    serve_port: TcpPort | None = None
    """Port of a live page about the run, on 127.0.0.1; 0 takes any free port; absent: there is no page."""
    opentelemetry: Flag = False
    """Whether each step becomes an OpenTelemetry span, with the tracer provider of the process."""
    tensorboard: OutputFolder | None = None
    """Folder of event files for TensorBoard, with loss, learning rate, gradient norm, speed and utilization by step."""
    mlflow: NonEmptyText | None = None
    """MLflow's tracking server, or store, which gets the same; a run that resumes goes on with its run there."""
    mlflow_experiment: NonEmptyText = "asyncpipe"
    """The experiment of that run."""
    peak_flops: PositiveFloat | None = None
    """The most operations a second of all devices together, of which the MFU is a share; absent: by their names."""
    nvtx: Flag = False
    """Whether tasks are NVTX ranges, for NVIDIA's profilers."""


class SnapshotTable(StrictModel):
    """``[snapshots]``: where and how often the run is saved."""

    folder: OutputFolder
    every: PositiveInt = 100
    """Steps between two snapshots; one more is taken at the end of the run."""
    keep: PositiveInt = 3
    """How many of the newest snapshots are kept."""
    keep_every: PositiveInt | None = None
    """Every N-th snapshot is kept for good, in addition to the newest ones; absent: none is."""
    resume: Flag = False
    """Whether the run continues from the newest intact snapshot in the folder; without one it starts from scratch."""


class FaultTable(StrictModel):
    """``[faults]``: which failures do not end the job, and how many of them."""

    step_retries: NonNegativeInt = 1
    """How often a failed step is retried, with the same batch and the same random numbers; 0 if steps overlap."""
    snapshot_retries: NonNegativeInt = 2
    """How often in a row, without a new snapshot between, a service restarts a failed run from its last snapshot.
    ``asyncpipe train`` restarts runs only where ``lost_host`` says so."""
    non_finite: Literal["fail", "skip", "ignore"] = Field(
        default="fail", description='must be "fail", "skip" or "ignore"'
    )
    """If the loss or the gradient norm is NaN or infinite: end the run before the weights are updated (or, if steps
    overlap, behind it), skip this update, or do nothing."""
    most_skipped: PositiveInt = 10
    """How many updates in a row may be skipped; one more ends the run."""
    lost_host: Literal["fail", "wait", "split", "shrink"] = Field(
        default="fail", description='must be "fail", "wait", "split" or "shrink"'
    )
    """When workers are lost, by themselves or with their host. With ``"wait"`` and ``"split"`` the run goes on by
    itself from its newest snapshot, when the workers have been started again, which is tried for ``wait_seconds``;
    more than ``snapshot_retries`` losses in a row, without a new snapshot between, end it. What has not come back by
    then ends the run (``HostLostError``) with ``"wait"``. With ``"split"`` the job goes on with the devices that are
    left, and takes those in that come back. Losses and weights are the same to the last bit: the model is split anew,
    with the balance of the planner, or, where that could change a bit, devices that are left get several of its stages.

    With ``"shrink"`` a job with replicas loses no step: what a lost worker had, another replica has. The run goes on at
    once from there, without the replicas whose workers cannot be started, whose micro-batches the others take; sums
    are then rounded in another order. (With ``shard_optimizer``, or batch norms in the first replica, it goes on from
    the newest snapshot: a part of the states is gone.) A replica takes part again when its workers are back.

    With ``"fail"`` the run ends as with any other error: a service tries again ``snapshot_retries`` times."""
    wait_seconds: NonNegativeFloat = 60.0
    """How long lost workers are waited for; 0: they are started once."""


def check_overlap(training: TrainingTable, faults: FaultTable) -> None:
    """Raise ``ValueError`` if steps are to overlap and something is to be decided between two of them."""
    if not training.overlap:
        return
    problems = []
    if faults.step_retries:
        problems.append("a failed step leaves some stages updated and is not retried: set faults.step_retries = 0")
    if faults.non_finite == "skip":
        rule = 'the loss is read when the weights are updated: set faults.non_finite = "fail" or "ignore"'
        problems.append(rule)
    if problems:
        raise ValueError(f"training.overlap: {'; '.join(problems)}; or overlap = false")


def check_workers(workers: str | Mapping[str, str], training: TrainingTable) -> None:
    """Raise ``ValueError`` if the stages are to live in workers and something else is to update them."""
    if workers != "threads" and not training.overlap:
        raise ValueError(
            "pipeline.workers: gradients stay in the workers, so each stage is updated inside the step: set "
            'training.overlap = true, or workers = "threads"'
        )


def check_replicas(pipeline: StagesTable, training: TrainingTable) -> None:
    """Raise ``ValueError`` if the table says how replicas update the weights, and they do not."""
    for key in ("shard_optimizer", "gradient_dtype"):
        if getattr(pipeline, key) and not training.overlap:
            raise ValueError(
                f"pipeline.{key}: is for replicas that have the optimizer, and here it is behind the step: "
                f"set training.overlap = true, or leave {key} out"
            )


class Job(StrictModel):
    """A job file. For validation, ``context={"path": ...}`` gives ``path``."""

    name: NonEmptyText
    job: JobTable
    pipeline: PipelineTable
    training: TrainingTable
    observe: ObserveTable = ObserveTable()
    snapshots: SnapshotTable | None = None
    """Absent: no snapshots are taken."""
    faults: FaultTable = FaultTable()
    ray: RayTable = RayTable()

    _path: Path = PrivateAttr(default=Path("job.toml"))

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        check_overlap(self.training, self.faults)
        check_workers(self.pipeline.workers, self.training)
        check_replicas(self.pipeline, self.training)
        return self

    def model_post_init(self, context: dict[str, Path] | None) -> None:
        """Take the path from the validation context: it is not a key of the file."""
        if context is not None:
            self._path = context["path"]

    def pool_workers(self) -> str | Mapping[str, str] | Launcher:
        """What a pool for this job takes as ``workers``."""
        return self.ray.launcher(self.name) if self.pipeline.workers == "ray" else self.pipeline.workers

    @property
    def path(self) -> Path:
        """The file that the job was read from: messages name it, and the entry's module may be next to it."""
        return self._path

    def override(self, table: str, **values: object) -> Job:
        """A copy with other values in one table; a value of ``None`` changes nothing.

        An absent table is made from the values, if there are any. The values must already be checked.
        """
        given = {key: value for key, value in values.items() if value is not None}
        current: BaseModel | None = getattr(self, table)
        if current is not None:
            return self.model_copy(update={table: current.model_copy(update=given)})
        return self.model_copy(update={table: SnapshotTable.model_validate(given)}) if given else self


def load_job(path: str | Path, changes: Mapping[str, Any] | None = None, *, plan: Path | None = None) -> Job:
    """The job in the TOML file at ``path``, with ``changes`` by dotted key, as ``{"training.steps": 50}``.

    The ``[pipeline]`` table of ``plan``, a file that ``asyncpipe plan`` has printed, replaces that of the job; what the
    plan does not say stays as it is, but for the job's own number of stages and its order.

    Raises ``JobFileError`` if a file cannot be read or parsed, or with one line for each wrong key: the file's name,
    the dotted key, what is wrong and what is allowed.
    """
    job, _, asked = load_job_for_service(Path(path), changes, plan=plan)
    if asked is not None:
        rule = 'only a service chooses them; name them here, as ["cpu:0", "cpu:1"], or give --devices or --device-type'
        raise job_file_error(Path(path), f"pipeline.devices: {rule}")
    return job


def load_job_for_service(
    path: Path, changes: Mapping[str, Any] | None = None, *, plan: Path | None = None
) -> tuple[Job, Any, Any]:
    """The job, as ``load_job`` has it, its table ``service``, and what it asks for if it names no devices.

    Only a service reads the last two. What it asks for is as the file has it, and some names are in its place.
    """
    tables, changes = read_toml(path, JobFileError), changes or {}
    planned = {} if plan is None else _read_plan(plan)
    if plan is not None:
        own = tables.get("pipeline")
        kept = {key: own[key] for key in own if key not in ("stages", "order")} if isinstance(own, dict) else {}
        tables["pipeline"] = kept | planned
    for key, value in changes.items():
        if not set_key(tables, key, value):
            raise JobFileError(f"{key}: must be the key of a value, as training.steps")
    service, asked = tables.pop("service", {}), None
    match tables.get("pipeline"):
        case {"devices": int(wanted) | {"count": int(wanted)}, **others} if 0 < wanted <= MOST_DEVICES:
            asked, tables["pipeline"] = tables["pipeline"]["devices"], {**others, "devices": ["cpu"] * wanted}
    try:
        return Job.model_validate(tables, context={"path": path}), service, asked
    except ValidationError as error:
        problems = wrong_keys(error, Job)
    lines = []
    for problem in problems:
        key = problem.key or problem.text.partition(":")[0]
        table, _, name = key.partition(".")
        if any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in changes):
            lines.append(str(problem))
        else:
            lines.append(f"{plan if table == 'pipeline' and name in planned else path}: {problem}")
    raise JobFileError("\n".join(lines))


def _read_plan(path: Path) -> dict[str, Any]:
    """The ``[pipeline]`` table of a plan."""
    tables = read_toml(path, JobFileError)
    if set(tables) != {"pipeline"} or not isinstance(tables["pipeline"], dict):
        raise job_file_error(
            path, "is no plan: it must have a table [pipeline] and nothing else, as asyncpipe plan prints"
        )
    return dict(tables["pipeline"])


def job_file_error(path: Path, *problems: str) -> JobFileError:
    """One error for all ``problems`` of the file at ``path``, a line each."""
    return JobFileError("\n".join(f"{path}: {problem}" for problem in problems))


@contextmanager
def blaming_key(job: Job, key: str) -> Iterator[None]:
    """Turn an ``OptionError`` in the block into a ``JobFileError`` about the job's ``key``."""
    try:
        yield
    except OptionError as error:
        raise job_file_error(job.path, f"{key}: {error}") from error
