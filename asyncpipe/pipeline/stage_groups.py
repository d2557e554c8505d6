"""Stages that are spread over groups of workers: which devices a group has, and what does not work with it.

The workers of a group are the same worker several times. Each has a pipeline of its own, with the same stages, graph,
micro-batches and numbers, whose edges lead to the workers of the same rank in other groups. They differ in what they
have of a stage, and meet in its collectives. What a step leaves is told by those of rank 0::

    rank 0    cpu:0 ──edge──▶ cpu:2         the pipeline that the controller knows
                ║               ║           collectives
    rank 1    cpu:1 ──edge──▶ cpu:3
    stage       0               1
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncpipe.core.compile_option import CompileOption
from asyncpipe.core.schedules.protocol import RuledSchedule, Schedule
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError, ScheduleError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.options import PipelineOptions
from asyncpipe.pipeline.pool import DevicePool

__all__ = ["check_ordered", "ranks_of"]


def ranks_of(
    factory: object, devices: Sequence[Device], options: PipelineOptions, pool: DevicePool
) -> list[Sequence[Device]]:
    """The devices of each rank. Raises ``OptionError`` for what does not work where stages are spread over groups."""
    if not isinstance(factory, StageFactory) or factory.group == 1:
        return [devices]
    group = factory.group
    whose = f"{factory} spreads each stage over a group of {group} workers"
    if pool.workers is None:
        raise OptionError(
            f"{whose}, each a process of its own, since torch has one process group a process; give workers='processes'"
        )
    if len(devices) % group:
        raise OptionError(f"{whose}, and {len(devices)} devices are no multiple of {group}; give each stage {group}")
    if accelerators := [device.name for device in devices if device.is_accelerator]:
        raise OptionError(
            f"{whose} over gloo, whose tensors are on CPUs; use CPU devices in place of {accelerators[0]}"
        )
    workers = pool.workers.worker_of(devices)
    if len(set(workers.values())) < len(devices):
        raise OptionError(
            f"{whose}, whose collectives need one order in a worker; give each device a worker of its own"
        )
    wanted = {
        "replicas": options.replicas > 1,
        "compile": CompileOption.parse(options.compile) is not None,
        "offload": options.offload is not None,
        "optimizer_on_host": options.optimizer_on_host,
    }
    if refused := [name for name, is_wanted in wanted.items() if is_wanted]:
        raise OptionError(f"{whose}, with which {refused[0]} does not work; leave it out")
    check_ordered(factory, find_schedule(options.schedule, order=options.order))
    return [devices[rank::group] for rank in range(group)]


def check_ordered(factory: StageFactory | None, schedule: Schedule) -> None:
    """Raise ``ScheduleError`` for a schedule that lets the workers of a group run their tasks in different orders."""
    if factory is not None and factory.group > 1 and isinstance(schedule, RuledSchedule):
        raise ScheduleError(
            f"schedule {schedule.name!r} decides while the step runs, in each worker for itself, and the workers of a "
            "group must take their collectives in one order; use an ordered schedule with order='strict'"
        )
