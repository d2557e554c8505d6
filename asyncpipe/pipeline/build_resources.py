"""What the steps of a pipeline compute with: its stages, their streams, and the optimizers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.errors import OptionError
from asyncpipe.ops.device.copies import make_copiers
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.streams import make_streams
from asyncpipe.ops.execute.binder import StageResources
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.host_optimizer import on_host
from asyncpipe.ops.execute.instruments import Instruments
from asyncpipe.ops.execute.learning_rates import make_schedule
from asyncpipe.ops.execute.offloading import has_own_memory
from asyncpipe.ops.execute.optimizer_shards import check_elementwise
from asyncpipe.ops.execute.parameter_groups import ParameterGroups
from asyncpipe.ops.execute.replica_sums import BUCKET_BYTES, ReplicaSums
from asyncpipe.ops.execute.update_undo import UpdateUndo
from asyncpipe.ops.model.stage import Stage, StagedModel
from asyncpipe.ops.model.ties import Ties
from asyncpipe.pipeline.graph_cache import GraphCache
from asyncpipe.pipeline.options import PipelineOptions

if TYPE_CHECKING:
    pass

__all__ = ["build_resources"]


def build_resources(
    stages: Sequence[Stage],
    ties: Ties,
    staged: StagedModel,
    devices: Sequence[Device],
    graphs: GraphCache,
    options: PipelineOptions,
) -> StageResources:
    """The stages with their streams and optimizers; wires ``graphs`` for what these need."""
    rows = staged.rows
    updated = {} if options.optimizer is None else _updated(stages, ties)
    optimizers = _make_optimizers(stages, updated, options, _parameter_groups(options, staged.module, ties))
    schedules = {
        stage: make_schedule(options.lr_schedule, each)
        for stage, each in optimizers.items()
        if options.lr_schedule is not None
    }
    sums = _replica_sums(stages, updated, optimizers, options) if rows > 1 else {}
    reduces = tuple((stage, len(each.buckets)) for stage, each in sums.items())
    updates = tuple(stage for stage in updated if stage < len(stages) // rows)
    shards = options.shard_optimizer and rows > 1
    # The gradients of the first stage are the last to be complete.
    norm = updates[0] if options.clip_grad_norm is not None and updates else None
    graphs.rewire(Wiring(staged.links, ties.links, updates, ties.statistics, reduces, shards, rows, norm))
    here = [device for device in devices if not device.is_elsewhere]
    graph = graphs(options.pieces, Phase.STEP, CheckpointMode(options.checkpoint), True)
    streams = make_streams(here, graph.lanes)
    undo, instruments = UpdateUndo(is_on=options.undo_updates), Instruments(options.nvtx, options.sample_memory)
    return StageResources(
        *(stages, ties, streams, make_copiers(streams), GradientGuard(), optimizers, schedules, sums),
        *(undo, instruments),
    )


def _replica_sums(
    stages: Sequence[Stage],
    updated: Mapping[int, Sequence[nn.Parameter]],
    optimizers: Mapping[int, torch.optim.Optimizer],
    options: PipelineOptions,
) -> dict[int, ReplicaSums]:
    """By stage of the first replica: what adds up its gradients. With shards each optimizer then has a part."""
    count = len(stages) // options.replicas
    sums = {
        stage: ReplicaSums(
            *(stage, {row: updated[stage + row * count] for row in range(options.replicas)}, BUCKET_BYTES),
            in_bfloat16=options.gradient_dtype is not None,
        )
        for stage in updated
        if stage < count
    }
    if options.shard_optimizer and options.optimizer is not None:
        make, grouped = options.optimizer, options.parameter_groups is not None
        check_elementwise((lambda parameters: make([{"params": parameters}])) if grouped else make)
        for stage, optimizer in optimizers.items():
            hosted = options.optimizer_on_host and has_own_memory(stages[stage].device)
            sums[stage % count].shard(stage // count, optimizer, hosted=hosted)
    return sums


def _updated(stages: Sequence[Stage], ties: Ties) -> dict[int, list[nn.Parameter]]:
    """What each stage's optimizer updates, of those that train; a shared parameter belongs to its first stage."""
    taken = {id(replica.tensor) for replica in ties.all()}
    updated: dict[int, list[nn.Parameter]] = {}
    for stage in stages:
        mine = [p for p in stage.module.parameters() if p.requires_grad and id(p) not in taken]
        taken.update(map(id, mine))
        if mine:
            updated[stage.index] = mine
    return updated


def _make_optimizers(
    stages: Sequence[Stage],
    updated: Mapping[int, list[nn.Parameter]],
    options: PipelineOptions,
    groups: ParameterGroups | None,
) -> dict[int, torch.optim.Optimizer]:
    """Those of the stages that are here."""
    optimizers: dict[int, torch.optim.Optimizer] = {}
    make = options.optimizer
    for stage, mine in updated.items():
        if make is None or stages[stage].device.is_elsewhere:
            continue
        hosted = options.optimizer_on_host and has_own_memory(stages[stage].device)
        parameters = on_host(mine) if hosted else mine
        optimizer = make(parameters if groups is None else groups.of(parameters))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer must be a function from a stage's parameters to a torch optimizer, and returned "
                f"{type(optimizer).__name__}; give, for instance, lambda parameters: torch.optim.AdamW(parameters)"
            )
        if groups is not None:
            groups.keep_ratios(optimizer)
        optimizers[stage] = optimizer
    return optimizers


def _parameter_groups(options: PipelineOptions, module: nn.Module, ties: Ties) -> ParameterGroups | None:
    if options.parameter_groups is None:
        return None
    return ParameterGroups(options.parameter_groups, module, ties.twins)
