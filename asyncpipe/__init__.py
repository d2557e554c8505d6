"""Pipeline-parallel training for PyTorch, from one process with one asyncio controller.

Public names are imported when first used, so that ``import asyncpipe.core…`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpipe.core.costs import Costs as Costs
    from asyncpipe.core.costs import Jitter as Jitter
    from asyncpipe.core.costs import StageCosts as StageCosts
    from asyncpipe.core.events import Observer as Observer
    from asyncpipe.core.events import StepRecord as StepRecord
    from asyncpipe.core.lower import CheckpointMode as CheckpointMode
    from asyncpipe.core.lower import lower as lower
    from asyncpipe.core.registry import find_schedule as find_schedule
    from asyncpipe.core.registry import known_schedules as known_schedules
    from asyncpipe.core.report import Report as Report
    from asyncpipe.core.report import report as report
    from asyncpipe.core.schedule import Action as Action
    from asyncpipe.core.schedule import B as B
    from asyncpipe.core.schedule import F as F
    from asyncpipe.core.schedule import HintedSchedule as HintedSchedule
    from asyncpipe.core.schedule import I as I
    from asyncpipe.core.schedule import OrderedSchedule as OrderedSchedule
    from asyncpipe.core.schedule import Overlap as Overlap
    from asyncpipe.core.schedule import RuledSchedule as RuledSchedule
    from asyncpipe.core.schedule import Schedule as Schedule
    from asyncpipe.core.schedule import Shape as Shape
    from asyncpipe.core.schedule import W as W
    from asyncpipe.core.schedule import loop_placement as loop_placement
    from asyncpipe.core.schedule import zigzag_placement as zigzag_placement
    from asyncpipe.core.share import Share as Share
    from asyncpipe.core.simulate import SimulatedJob as SimulatedJob
    from asyncpipe.core.simulate import simulate as simulate
    from asyncpipe.core.simulate import simulate_jobs as simulate_jobs
    from asyncpipe.core.task import TaskKind as TaskKind
    from asyncpipe.errors import AsyncpipeError as AsyncpipeError
    from asyncpipe.errors import TaskError as TaskError
    from asyncpipe.ops.batchnorm import convert_deferred_batch_norm as convert_deferred_batch_norm
    from asyncpipe.ops.checkpoint import is_checkpointing as is_checkpointing
    from asyncpipe.ops.checkpoint import is_recomputing as is_recomputing
    from asyncpipe.ops.microbatch import Arguments as Arguments
    from asyncpipe.ops.microbatch import Microbatches as Microbatches
    from asyncpipe.ops.microbatch import NoChunk as NoChunk
    from asyncpipe.ops.profile import balance_by_size as balance_by_size
    from asyncpipe.ops.profile import balance_by_time as balance_by_time
    from asyncpipe.ops.sequential import PipeSequential as PipeSequential
    from asyncpipe.ops.skip import Namespace as Namespace
    from asyncpipe.ops.skip import Skippable as Skippable
    from asyncpipe.ops.skip import pop as pop
    from asyncpipe.ops.skip import skippable as skippable
    from asyncpipe.ops.skip import stash as stash
    from asyncpipe.ops.skip import verify_skippables as verify_skippables
    from asyncpipe.ops.trace import trace as trace
    from asyncpipe.pipeline import Pipeline as Pipeline
    from asyncpipe.pool import DevicePool as DevicePool
    from asyncpipe.result import StepResult as StepResult
    from asyncpipe.service.training_service import TrainingService as TrainingService
    from asyncpipe.sync import SyncPipeline as SyncPipeline

__version__ = "0.1.0"

_HOMES = {
    "core.events": ("Observer", "StepRecord"),
    "core.lower": ("CheckpointMode", "lower"),
    "core.report": ("Report", "report"),
    "core.registry": ("find_schedule", "known_schedules"),
    "core.schedule": (
        *("Action", "B", "F", "I", "Overlap", "Shape", "W"),
        *("HintedSchedule", "OrderedSchedule", "RuledSchedule", "Schedule"),
        *("loop_placement", "zigzag_placement"),
    ),
    "core.task": ("TaskKind",),
    "core.costs": ("Costs", "Jitter", "StageCosts"),
    "core.share": ("Share",),
    "core.simulate": ("SimulatedJob", "simulate", "simulate_jobs"),
    "errors": ("AsyncpipeError", "TaskError"),
    "ops.batchnorm": ("convert_deferred_batch_norm",),
    "ops.checkpoint": ("is_checkpointing", "is_recomputing"),
    "ops.microbatch": ("Arguments", "Microbatches", "NoChunk"),
    "ops.profile": ("balance_by_size", "balance_by_time"),
    "ops.sequential": ("PipeSequential",),
    "ops.skip": ("Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"),
    "ops.trace": ("trace",),
    "pipeline": ("Pipeline",),
    "pool": ("DevicePool",),
    "sync": ("SyncPipeline",),
    "result": ("StepResult",),
    "service.training_service": ("TrainingService",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'asyncpipe' has no attribute {name!r}")
    value = getattr(import_module(f"asyncpipe.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
