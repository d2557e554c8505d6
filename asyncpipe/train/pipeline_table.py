"""``[pipeline]`` of a job file: on which devices, how a step is cut, and in which order it runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationInfo, field_validator, model_validator

from asyncpipe.core.checks import similar
from asyncpipe.core.compile_option import CompileOption
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.offload import check_offload
from asyncpipe.core.schedules.registry import could_be_schedule, known_schedules
from asyncpipe.errors import OptionError
from asyncpipe.pipeline.options import PipelineOptions
from asyncpipe.pipeline.pool_options import TransportName
from asyncpipe.train.validation import StrictModel
from asyncpipe.train.value_types import Flag, PositiveInt

__all__ = ["AUTO", "Devices", "PipelineTable", "StagesTable", "devices_of_rows"]

AUTO = "auto"
"""The schedule that is chosen by measurement when the job starts."""


def _checked_schedule(value: object) -> object:
    if value != AUTO and not (isinstance(value, str) and could_be_schedule(value)):
        known = known_schedules()
        meant = similar(value, known) if isinstance(value, str) else ""
        raise ValueError(f'{meant}must be one of {", ".join(known)}, or "auto", "module:Class" or "csv:FILE"')
    return value


def _checked_balance(value: object) -> object:
    if isinstance(value, list) and value and all(type(layers) is int and layers > 0 for layers in value):
        return tuple(value)
    if value == "auto" or isinstance(value, tuple):
        return value
    raise ValueError('must be "auto" or a list of positive integers, the layers of each stage')


def _checked_compile(value: object) -> object:
    try:
        CompileOption.parse(value)
    except OptionError as error:
        rule = 'must be true, false, "cudagraphs", or a table of arguments for torch.compile'
        raise ValueError(f"{rule} ({error})") from None
    return value


Devices = Annotated[
    tuple[Annotated[str, Strict(), Field(min_length=1)], ...],
    Strict(False),
    Field(
        min_length=1,
        description='must be a list of at least one device name, such as ["cpu:0", "cpu:1"] or ["cuda:0", "cuda:0"]',
    ),
]


def devices_of_rows(given: object, replicas: int | None) -> object:
    """The devices of all rows in one list, if they are given as a list for each replica."""
    if not isinstance(given, list | tuple) or not any(isinstance(row, list | tuple) for row in given):
        if replicas and isinstance(given, list | tuple) and len(given) % replicas:
            raise ValueError(f"must be as many for each of the {replicas} replicas, which {len(given)} are not")
        return given
    lengths = {len(row) if isinstance(row, list | tuple) else 0 for row in given}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError('must be a list of as many devices for each replica, as [["cuda:0"], ["cuda:1"]]')
    if replicas not in (None, len(given)):
        raise ValueError(
            f"has {len(given)} lists, one for each replica, and pipeline.replicas is {replicas}; leave it out"
        )
    return tuple(device for row in given for device in row)


def _checked_offload(value: float | tuple[float, ...] | None) -> float | tuple[float, ...] | None:
    try:
        check_offload(0.0 if value is None else value)
    except OptionError as error:
        raise ValueError(str(error)) from None
    return value


CheckpointName = Annotated[
    CheckpointMode, Strict(False), Field(description=f"must be one of {', '.join(CheckpointMode)}")
]
Workers = Annotated[
    Literal["threads", "processes", "ray", "torchrun"] | dict[str, str],
    Field(
        description='must be "threads", "processes", "ray", "torchrun", or a table of the name of each device\'s worker'
    ),
]
Balance = Annotated[Literal["auto"] | tuple[int, ...], BeforeValidator(_checked_balance)]


Offload = Annotated[
    float | Annotated[tuple[float, ...], Strict(False)] | None,
    Field(description="must be a fraction from 0 to 1, or a list with that of each stage"),
    AfterValidator(_checked_offload),
]
_DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(PipelineOptions)}


class StagesTable(StrictModel):
    """The part of ``[pipeline]`` that says how a step is cut and in which order it runs, wherever that is."""

    replicas: PositiveInt = _DEFAULTS["replicas"]
    """How many rows of ``devices`` there are, each a pipeline, which share a mini-batch. A file may leave it out, and
    give ``devices`` as a list for each replica."""
    devices: Devices
    """Those of the first replica, then those of the second …"""
    microbatches: PositiveInt = 8
    """Of each replica."""
    total_microbatches: PositiveInt | None = _DEFAULTS["total_microbatches"]
    schedule: Annotated[str, BeforeValidator(_checked_schedule)] = _DEFAULTS["schedule"]
    order: Literal["strict", "hint"] = Field(default=_DEFAULTS["order"], description='must be "strict" or "hint"')
    checkpoint: CheckpointName = CheckpointMode(_DEFAULTS["checkpoint"])
    balance: Balance = _DEFAULTS["balance"]
    stages: PositiveInt | None = _DEFAULTS["stages"]
    shard_optimizer: Flag = _DEFAULTS["shard_optimizer"]
    """Whether each replica updates a part of the weights, and has the optimizer's states of that part alone; a job that
    asks for it has ``training.overlap = true``."""
    gradient_dtype: Literal["bfloat16"] | None = Field(
        default=_DEFAULTS["gradient_dtype"], description='must be "bfloat16", or left out'
    )
    """As what replicas send each other gradients, which are added up in the weights' own type; as ``shard_optimizer``,
    for a job that has ``training.overlap = true``."""

    @model_validator(mode="before")
    @classmethod
    def _count_rows(cls, given: Any) -> Any:
        match given:
            case {"devices": [[*_], *_] as rows} if given.get("replicas", 1) == 1:
                return {**given, "replicas": len(rows)}
        return given

    @field_validator("devices", mode="before")
    @classmethod
    def _flatten(cls, given: Any, info: ValidationInfo) -> Any:
        return devices_of_rows(given, info.data.get("replicas"))

    @property
    def row(self) -> tuple[str, ...]:
        """The devices of the first replica: others are alike."""
        return self.devices[: len(self.devices) // self.replicas]

    @field_validator("order", "stages")
    @classmethod
    def _suits_auto(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("schedule") == AUTO:
            if info.field_name == "order" and value != "strict":
                raise ValueError(f'must be "strict" with schedule "{AUTO}"')
            if info.field_name == "stages" and value is not None:
                raise ValueError(f'leave it out with schedule "{AUTO}", which chooses it')
        return value


class PipelineTable(StagesTable):
    """``[pipeline]``: devices, and options of ``asyncpipe.Pipeline``, which ``PipelineOptions`` explains.

    The defaults are those of the options.
    """

    workers: Workers = "threads"
    """Where the devices' threads are: in this process, in worker processes of this machine, or on hosts, which ``ray``
    or ``torchrun`` have; devices may have hosts there (``"host-a/cuda:0"``). Losses and weights are the same to the
    last bit, and a run may go on from the snapshots of any.

    Gradients stay in the workers, so each stage is updated inside the step: a job with workers has
    ``training.overlap = true``. On a pool, whoever made the pool decides."""
    offload: Offload = _DEFAULTS["offload"]
    transport: TransportName = Field(
        default=_DEFAULTS["transport"], description=f"must be one of {', '.join(get_args(TransportName))}"
    )
    """How tensors get from one worker to another. On a pool, whoever made the pool decides."""
    compile: Annotated[bool | Literal["cudagraphs"] | dict[str, Any], BeforeValidator(_checked_compile)] = False
    """Whether stages are compiled: true, "cudagraphs", or a table of arguments for ``torch.compile``."""
