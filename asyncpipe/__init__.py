"""Pipeline-parallel training for PyTorch, from one process with one asyncio controller.

Public names are imported when first used, so that ``import asyncpipe.core…`` needs no torch. Raises ``ImportError``
where the index's other project called asyncpipe is installed, since either may be what the next program imports.
"""

from __future__ import annotations

import sys
from importlib import import_module
from os.path import isfile, join
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpipe.core.graph.checkpoint_mode import CheckpointMode as CheckpointMode
    from asyncpipe.core.graph.lower import lower as lower
    from asyncpipe.core.kinds import TaskKind as TaskKind
    from asyncpipe.core.policies.policy import LaneView as LaneView
    from asyncpipe.core.policies.policy import Policy as Policy
    from asyncpipe.core.policies.policy import StepView as StepView
    from asyncpipe.core.policies.share import Share as Share
    from asyncpipe.core.predict.costs import Costs as Costs
    from asyncpipe.core.predict.costs import Jitter as Jitter
    from asyncpipe.core.predict.costs import StageCosts as StageCosts
    from asyncpipe.core.predict.report import Report as Report
    from asyncpipe.core.predict.report import report as report
    from asyncpipe.core.predict.report import reports as reports
    from asyncpipe.core.predict.report import steady_state as steady_state
    from asyncpipe.core.predict.simulate import SimulatedJob as SimulatedJob
    from asyncpipe.core.predict.simulate import simulate as simulate
    from asyncpipe.core.predict.simulate import simulate_jobs as simulate_jobs
    from asyncpipe.core.predict.simulate import simulate_steps as simulate_steps
    from asyncpipe.core.predict.topology import Host as Host
    from asyncpipe.core.predict.topology import NetworkLink as NetworkLink
    from asyncpipe.core.predict.topology import Topology as Topology
    from asyncpipe.core.predict.topology import TopologyCosts as TopologyCosts
    from asyncpipe.core.records.step_record import Observer as Observer
    from asyncpipe.core.records.step_record import StepRecord as StepRecord
    from asyncpipe.core.schedules.protocol import Action as Action
    from asyncpipe.core.schedules.protocol import B as B
    from asyncpipe.core.schedules.protocol import F as F
    from asyncpipe.core.schedules.protocol import HintedSchedule as HintedSchedule
    from asyncpipe.core.schedules.protocol import I as I
    from asyncpipe.core.schedules.protocol import OrderedSchedule as OrderedSchedule
    from asyncpipe.core.schedules.protocol import Overlap as Overlap
    from asyncpipe.core.schedules.protocol import RuledSchedule as RuledSchedule
    from asyncpipe.core.schedules.protocol import Schedule as Schedule
    from asyncpipe.core.schedules.protocol import Shape as Shape
    from asyncpipe.core.schedules.protocol import W as W
    from asyncpipe.core.schedules.protocol import loop_placement as loop_placement
    from asyncpipe.core.schedules.protocol import zigzag_placement as zigzag_placement
    from asyncpipe.core.schedules.registry import find_schedule as find_schedule
    from asyncpipe.core.schedules.registry import known_schedules as known_schedules
    from asyncpipe.errors import AsyncpipeError as AsyncpipeError
    from asyncpipe.errors import TaskError as TaskError
    from asyncpipe.ops.autograd.checkpoint import is_checkpointing as is_checkpointing
    from asyncpipe.ops.autograd.checkpoint import is_recomputing as is_recomputing
    from asyncpipe.ops.device.caller_streams import CallerStreams as CallerStreams
    from asyncpipe.ops.execute.learning_rates import LearningRates as LearningRates
    from asyncpipe.ops.model.batchnorm import convert_deferred_batch_norm as convert_deferred_batch_norm
    from asyncpipe.ops.model.feed import Feed as Feed
    from asyncpipe.ops.model.flops import FlopCount as FlopCount
    from asyncpipe.ops.model.flops import count_flops as count_flops
    from asyncpipe.ops.model.measure_layers import balance_by_size as balance_by_size
    from asyncpipe.ops.model.measure_layers import balance_by_time as balance_by_time
    from asyncpipe.ops.model.microbatch import Arguments as Arguments
    from asyncpipe.ops.model.microbatch import Microbatches as Microbatches
    from asyncpipe.ops.model.microbatch import NoChunk as NoChunk
    from asyncpipe.ops.model.packing import pack as pack
    from asyncpipe.ops.model.sequential import PipeSequential as PipeSequential
    from asyncpipe.ops.model.skip_layout import verify_skippables as verify_skippables
    from asyncpipe.ops.model.skips import Namespace as Namespace
    from asyncpipe.ops.model.skips import Skippable as Skippable
    from asyncpipe.ops.model.skips import pop as pop
    from asyncpipe.ops.model.skips import skippable as skippable
    from asyncpipe.ops.model.skips import stash as stash
    from asyncpipe.ops.model.stage_factory import StageFactory as StageFactory
    from asyncpipe.ops.model.trace.trace import trace as trace
    from asyncpipe.pipeline.from_transformers import from_transformers as from_transformers
    from asyncpipe.pipeline.pipeline import Pipeline as Pipeline
    from asyncpipe.pipeline.pool import DevicePool as DevicePool
    from asyncpipe.pipeline.result import StepResult as StepResult
    from asyncpipe.pipeline.steps import Batch as Batch
    from asyncpipe.pipeline.sync import SyncPipeline as SyncPipeline
    from asyncpipe.runtime.workers.launcher import Invitation as Invitation
    from asyncpipe.runtime.workers.launcher import Launcher as Launcher
    from asyncpipe.runtime.workers.launcher import PlannedWorker as PlannedWorker
    from asyncpipe.runtime.workers.launcher import WorkerProcess as WorkerProcess
    from asyncpipe.runtime.workers.ray_workers import RayWorkers as RayWorkers
    from asyncpipe.runtime.workers.torchrun_workers import TorchrunWorkers as TorchrunWorkers
    from asyncpipe.service.training_service import TrainingService as TrainingService

__version__ = "0.2.0"

_HOMES = {
    "core.records.step_record": ("Observer", "StepRecord"),
    "core.graph.checkpoint_mode": ("CheckpointMode",),
    "core.graph.lower": ("lower",),
    "core.predict.report": ("Report", "report", "reports", "steady_state"),
    "core.schedules.registry": ("find_schedule", "known_schedules"),
    "core.schedules.protocol": (
        *("Action", "B", "F", "I", "Overlap", "Shape", "W"),
        *("HintedSchedule", "OrderedSchedule", "RuledSchedule", "Schedule"),
        *("loop_placement", "zigzag_placement"),
    ),
    "core.kinds": ("TaskKind",),
    "core.predict.topology": ("Host", "NetworkLink", "Topology", "TopologyCosts"),
    "core.predict.costs": ("Costs", "Jitter", "StageCosts"),
    "core.policies.policy": ("LaneView", "Policy", "StepView"),
    "core.policies.share": ("Share",),
    "core.predict.simulate": ("SimulatedJob", "simulate", "simulate_jobs", "simulate_steps"),
    "errors": ("AsyncpipeError", "TaskError"),
    "ops.execute.learning_rates": ("LearningRates",),
    "ops.model.batchnorm": ("convert_deferred_batch_norm",),
    "ops.autograd.checkpoint": ("is_checkpointing", "is_recomputing"),
    "ops.model.microbatch": ("Arguments", "Microbatches", "NoChunk"),
    "ops.model.measure_layers": ("balance_by_size", "balance_by_time"),
    "ops.model.sequential": ("PipeSequential",),
    "ops.model.skip_layout": ("verify_skippables",),
    "ops.model.feed": ("Feed",),
    "ops.model.flops": ("FlopCount", "count_flops"),
    "ops.model.packing": ("pack",),
    "ops.model.stage_factory": ("StageFactory",),
    "ops.model.skips": ("Namespace", "Skippable", "pop", "skippable", "stash"),
    "ops.model.trace.trace": ("trace",),
    "pipeline.from_transformers": ("from_transformers",),
    "pipeline.pipeline": ("Pipeline",),
    "ops.device.caller_streams": ("CallerStreams",),
    "pipeline.pool": ("DevicePool",),
    "pipeline.steps": ("Batch",),
    "pipeline.sync": ("SyncPipeline",),
    "pipeline.result": ("StepResult",),
    "runtime.workers.launcher": ("Invitation", "Launcher", "PlannedWorker", "WorkerProcess"),
    "runtime.workers.ray_workers": ("RayWorkers",),
    "runtime.workers.torchrun_workers": ("TorchrunWorkers",),
    "service.training_service": ("TrainingService",),
}
for _folder in sys.path:
    if isfile(_namesake := join(_folder, "asyncpipe.py")):
        raise ImportError(
            f"{_namesake} is another project's module with the name asyncpipe: remove it (pip uninstall asyncpipe) "
            "to use this one, which pip knows as asyncpipe-torch"
        )

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
