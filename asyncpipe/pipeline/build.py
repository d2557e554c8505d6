"""``build`` makes the parts of a pipeline from its model and options. Every mistake in them is found here or before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from asyncpipe.core.compile_option import CompileOption
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.offload import check_offload
from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.core.schedules.protocol import Schedule, Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.core.schedules.validate import check_balanced_shape, checked_placement
from asyncpipe.errors import BalanceError, OptionError, OverlapError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.execute.binder import StageResources
from asyncpipe.ops.model.batchnorm import (
    BatchNormNotice,
    DeferredBatchNorm,
    convert_deferred_batch_norm,
    deferred_layers,
)
from asyncpipe.ops.model.cuda_graphs import StageCapturer
from asyncpipe.ops.model.few_microbatches import FewMicrobatches
from asyncpipe.ops.model.loss_watch import LossWatch
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.padded_labels import PaddedLabels
from asyncpipe.ops.model.recomputed_layers import layers_of_stages
from asyncpipe.ops.model.replicas import replicated
from asyncpipe.ops.model.sequential import as_sequential, split, stage_parts
from asyncpipe.ops.model.sharded import refuse_split_backwards
from asyncpipe.ops.model.stage import Stage, StagedModel
from asyncpipe.ops.model.stage_compiler import StageCompiler, check_compiler
from asyncpipe.ops.model.stage_factory import StageFactory, build_stages
from asyncpipe.ops.model.tensor_uses import TensorUse, tensor_uses
from asyncpipe.ops.model.ties import Ties, place
from asyncpipe.ops.torch_internals import caches_parametrizations
from asyncpipe.pipeline.build_resources import build_resources
from asyncpipe.pipeline.graph_cache import GraphCache
from asyncpipe.pipeline.options import PipelineOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PipelineParts", "build", "join_stages"]


@dataclass(slots=True, eq=False)
class BetweenSteps:
    """Whose results are still to be taken, while later steps compute."""

    owner: object = None


@dataclass(frozen=True, slots=True, eq=False)
class PipelineParts:
    """What all steps of a pipeline share."""

    options: PipelineOptions
    staged: StagedModel
    """The model in stages."""
    resources: StageResources
    graphs: GraphCache
    deferred: Sequence[DeferredBatchNorm]
    padded_labels: PaddedLabels
    factory: StageFactory | None = None
    """What builds the stages, if they were not given."""
    modules: tuple[nn.Module, ...] = ()
    """The modules of the model that its stages were made of."""
    held: list[tuple[TensorUse, Tensor]] = field(default_factory=list)
    """Where the model has the parameters that optimizers, ties or workers have too."""
    is_parametrized: bool = False
    needs_target: bool = False
    """Whether ``loss_fn`` cannot be called with an output alone."""
    loss_watch: LossWatch = field(default_factory=LossWatch)
    few_microbatches: FewMicrobatches = field(default_factory=FewMicrobatches)
    batch_norms: BatchNormNotice = field(default_factory=BatchNormNotice)
    between_steps: BetweenSteps = field(default_factory=BetweenSteps)

    @property
    def module(self) -> nn.Module:
        """The unsplit model."""
        return self.staged.module

    @property
    def stages_per_row(self) -> int:
        """How many stages each replica has."""
        return len(self.staged.stages) // self.options.replicas

    @property
    def stages_with_states(self) -> range:
        """The stages whose optimizers have all states together: with shards each replica has some of them."""
        return range(len(self.staged.stages) if self.options.shard_optimizer else self.stages_per_row)

    @property
    def joins_statistics(self) -> bool:
        """Whether batch norms of several replicas have statistics, which the first one alone has after a step."""
        return any(each.joins for each in self.resources.ties.statistics_of.values())

    def joined_norms(self, norms: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The norms of the gradients of each stage, from those of what each replica has of it; that of all is left."""
        parts: dict[int, list[Tensor]] = {}
        for stage, norm in sorted(norms.items()):
            if stage == WHOLE_STEP:
                continue
            parts.setdefault(stage % self.stages_per_row, []).append(norm)
        whole = {stage: norm for stage, norm in norms.items() if stage == WHOLE_STEP}
        return whole | {
            stage: found[0] if len(found) == 1 else nn.utils.get_total_norm(found)
            for stage, found in sorted(parts.items())
        }

    def taken(self, pieces: Sequence[Any]) -> list[dict[int, Any]]:
        """What each stage takes of each micro-batch, from the caller."""
        rows, found = self.rows(len(pieces)), []
        for i, piece in enumerate(pieces):
            first = rows.row_of(i) * rows.stages
            values = self.staged.caller_values(Arguments.wrap(piece))
            found.append({stage + first: value for stage, value in values.items()})
        return found

    @property
    def checkpoint(self) -> CheckpointMode:
        """Which micro-batches are recomputed."""
        return CheckpointMode(self.options.checkpoint)

    @property
    def has_executors(self) -> bool:
        """Whether tasks run by executors of the caller's own, who may enter there what he has entered around steps."""
        pool = self.options.pool
        return self.options.executors is not None or (pool is not None and pool.has_executors)

    def rows(self, microbatches: int) -> Rows:
        """How a mini-batch of so many micro-batches is spread over the replicas."""
        return Rows.of(Shape(len(self.staged.stages), microbatches, len(self.graphs.devices)), self.options.replicas)

    def check_model(self) -> None:
        """Raise ``OptionError`` if the stages are not what the model is now, or a cache of its weights is on."""
        if _top_modules(self.staged.module) != self.modules:
            raise OptionError(
                "a layer of the model was replaced, added or removed after the pipeline was made, and its stages have "
                "the old ones; make the pipeline again"
            )
        # Between two steps forwards run, which may replace parameters for a while.
        for use, parameter in self.held if self.between_steps.owner is None else ():
            if getattr(use.module, use.name, None) is not parameter:
                raise OptionError(
                    f"the parameter {use.full_name!r} was replaced after the pipeline was made, as load_state_dict("
                    "assign=True) does, and its optimizer, its worker or other stages have the old one; load without "
                    "assign, or make the pipeline again"
                )
        if self.is_parametrized and caches_parametrizations():
            raise OptionError(
                "torch.nn.utils.parametrize.cached() is active, whose cache is one for all threads: stages would get "
                "weights of other graphs; leave it before the call"
            )

    def hold_parameters(self) -> None:
        """From now on the model must keep its parameters: somebody else refers to them too."""
        places = [use for uses in tensor_uses([self.module]).values() for use in uses]
        self.held[:] = [(use, use.tensor) for use in places if isinstance(use.tensor, nn.Parameter)]

    def check_between_steps(self) -> None:
        """Raise ``OverlapError`` while steps of ``steps`` overlap: the weights are those of no step."""
        if self.between_steps.owner is not None:
            raise OverlapError(
                "a later step of steps() computes already, so the model is between two steps; take all results first, "
                "or close the iterator, or use ahead=0"
            )

    def commit_statistics(self) -> None:
        """Update the running statistics of deferred batch norms, after forwards that succeeded."""
        for layer in self.deferred:
            layer.commit()

    def discard_statistics(self) -> None:
        """Forget what deferred batch norms gathered, after forwards that failed."""
        for layer in self.deferred:
            layer.discard()


def build(
    model: object, devices: Sequence[Device], options: PipelineOptions, mesh: DeviceMesh | None = None
) -> PipelineParts:
    """The parts of a pipeline for ``model``, whose stages are moved to their devices. Raises before anything moves.

    ``mesh``: what the stages here are spread over, which a ``StageFactory`` builds.
    """
    _refuse_made_optimizer(options)
    compile_option = CompileOption.parse(options.compile)
    if compile_option is not None:
        check_compiler(compile_option, [device for device in devices if not device.is_elsewhere])
    schedule = find_schedule(options.schedule, order=options.order)
    staged = _staged(model, schedule, devices, options, mesh)
    rows = options.replicas
    _check_leaves(staged.module)
    if mesh is None:
        _refuse_wrappers(staged.module)
    deferred = deferred_layers(staged.module)
    if compile_option is not None and deferred:
        raise OptionError(
            "compile: deferred batch norms count in Python what they have gathered, so each micro-batch would be "
            "compiled anew; leave deferred_batch_norm or compile out"
        )
    offload = () if options.offload is None else check_offload(options.offload, len(staged.stages) // staged.rows)
    if staged.rows != rows:
        staged = replicated(staged, rows, tied=options.optimizer is None)
    graphs = _graph_cache(staged, schedule, devices, tuple(offload) * rows)
    graph = graphs(options.pieces, Phase.STEP, CheckpointMode(options.checkpoint), True)
    if mesh is not None:
        refuse_split_backwards(staged.module, graph)
    stages, ties = place(staged, graph.placement, devices)
    stages = _with_layer_options(stages, staged, ties, options, compile_option)
    resources = build_resources(stages, ties, staged, devices, graphs, options)
    parts = PipelineParts(
        options,
        staged,
        resources,
        graphs,
        deferred,
        PaddedLabels(),
        model if isinstance(model, StageFactory) else None,
        _top_modules(staged.module),
        is_parametrized=any(isinstance(part, ParametrizationList) for part in staged.module.modules()),
        needs_target=_needs_target(options.loss_fn),
        loss_watch=LossWatch(options.on_nan),
    )
    if resources.optimizers or ties.links:
        parts.hold_parameters()
    return parts


def _refuse_made_optimizer(options: PipelineOptions) -> None:
    if isinstance(options.optimizer, torch.optim.Optimizer):
        name = type(options.optimizer).__name__
        raise OptionError(
            f"optimizer must be a function that makes one for each stage, got an {name} that is made already; give "
            f"optimizer=lambda parameters: torch.optim.{name}(parameters, ...), or leave optimizer out and call its "
            "step() yourself"
        )


def _graph_cache(
    staged: StagedModel, schedule: Schedule, devices: Sequence[Device], offload: tuple[float, ...]
) -> GraphCache:
    """The graphs of the pipeline's steps; in a worker those of its part. Not wired for updates yet."""
    names = [device.name for device in devices]
    here = [device.name for device in devices if not device.is_elsewhere]
    return GraphCache(
        *(schedule, names, Wiring(staged.links, rows=staged.rows), len(staged.stages), offload),
        around=here if len(here) < len(devices) else (),
    )


def _with_layer_options(
    stages: Sequence[Stage],
    staged: StagedModel,
    ties: Ties,
    options: PipelineOptions,
    compile_option: CompileOption | None,
) -> list[Stage]:
    """``stages`` with what is done to their layers: compiled, or some of them recomputed."""
    if options.recompute_layers:
        layers = layers_of_stages(staged, options.recompute_layers)
        return [replace(stage, recomputed=mine) for stage, mine in zip(stages, layers, strict=True)]
    if compile_option is None:
        return list(stages)
    if compile_option.cuda_graphs and any(True for _ in ties.all()):
        raise OptionError(
            "compile='cudagraphs': parameters that stages on several devices share are brought to other memory in "
            "each step, where captured kernels do not look; use compile=True"
        )
    return [_compiled(stage, compile_option) for stage in stages]


def _staged(
    model: object,
    schedule: Schedule,
    devices: Sequence[Device],
    options: PipelineOptions,
    mesh: DeviceMesh | None,
) -> StagedModel:
    """The stages of one replica; a worker gets those of all."""
    if isinstance(model, StageFactory):
        return _built_stages(model, schedule, devices, options, mesh)
    if isinstance(model, StagedModel) and model.rows > 1:
        return model
    return _split_into_stages(model, schedule, len(devices) // options.replicas, options)


def _top_modules(module: nn.Module) -> tuple[nn.Module, ...]:
    """The layers of a sequence; of any other model, which is cut inside its modules, all of them."""
    return tuple(module.children() if isinstance(module, nn.Sequential) else module.modules())


def join_stages(model: StagedModel, devices: int, options: PipelineOptions) -> StagedModel:
    """``model`` with the stages that its pipeline has, by the balance; raises ``BalanceError``."""
    balance, count = options.balance, options.stages
    schedule = find_schedule(options.schedule, order=options.order)
    joined = model
    if isinstance(balance, str):
        if balance != "auto":
            raise BalanceError(f"balance must be 'auto' or a list of integers, got {balance!r}")
        if model.is_fine:
            joined = model.joined(model.evenly(devices * schedule.virtual if count is None else count))
    elif count not in (None, len(balance)):
        raise BalanceError(f"balance {list(balance)} has {len(balance)} entries for {count} stages; give one a stage")
    else:
        joined = model.joined(balance)
    if model.join is not None:
        check_balanced_shape(schedule, Shape(len(joined.stages), options.microbatches, devices), balance)
    return joined


def _compiled(stage: Stage, option: CompileOption) -> Stage:
    """``stage``, compiled if it is here."""
    if stage.device.is_elsewhere:
        return stage
    caller: StageCompiler | StageCapturer
    if option.cuda_graphs:
        caller = StageCapturer(stage.index, stage.module, stage.device.physical)
    else:
        on_cpu = stage.device.physical.type == "cpu"
        layered = stage.module.layered() if option.regional else None
        caller = StageCompiler(stage.index, stage.module, option, on_cpu=on_cpu, layered=layered)
    return replace(stage, compiler=caller)


def _built_stages(
    factory: StageFactory,
    schedule: Schedule,
    devices: Sequence[Device],
    options: PipelineOptions,
    mesh: DeviceMesh | None,
) -> StagedModel:
    """The stages that ``factory`` builds on those of ``devices`` that are here, and the shapes of the others."""
    count = factory.stages
    if options.stages not in (None, count) or options.balance != "auto":
        raise BalanceError(f"{factory} has {count} stages, one a call; leave stages and balance out")
    if options.deferred_batch_norm:
        raise OptionError(
            f"{factory} makes the batch norms: return asyncpipe.convert_deferred_batch_norm(module) from it, and leave "
            "deferred_batch_norm out"
        )
    row = len(devices) // options.replicas
    shape = Shape(count, options.microbatches, row)
    schedule.check(shape)
    placement = checked_placement(schedule, shape)
    own = {place % row for place, device in enumerate(devices) if not device.is_elsewhere}
    here = {stage for stage, place in enumerate(placement) if place in own}
    sequence = build_stages(factory, here, mesh)
    return stage_parts(sequence, split(sequence, [1] * count, count))


def _split_into_stages(model: object, schedule: Schedule, devices: int, options: PipelineOptions) -> StagedModel:
    """``model`` in stages that have no devices yet."""
    if isinstance(model, StagedModel):
        if options.stages not in (None, len(model.stages)):
            raise BalanceError(
                f"a traced model has the {len(model.stages)} stages that it was cut into; leave stages out, give a "
                "balance that says how many of them each stage is made of, or trace it with another split"
            )
        if options.deferred_batch_norm:
            raise OptionError("a traced model cannot have deferred batch norms; give a list of stages instead")
        return model
    sequence = as_sequential(model)  # type: ignore[arg-type]
    if options.deferred_batch_norm:
        convert_deferred_batch_norm(sequence)
    balance = options.balance
    if not isinstance(balance, Sequence):
        raise BalanceError(f"balance must be 'auto' or a list of integers, got {balance!r}")
    count = options.stages
    if count is None:
        count = devices * schedule.virtual if isinstance(balance, str) else len(balance)
    check_balanced_shape(schedule, Shape(count, options.microbatches, devices), balance)
    return stage_parts(sequence, split(sequence, balance, count))


def _check_leaves(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.is_leaf:
            raise OptionError(
                f"parameter {name!r} is computed from another one, to which its gradient would go; a deep copy of a "
                "TorchScript module is like that, so copy it under torch.no_grad() and call requires_grad_()"
            )


_WRAPPERS = {"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule"}
"""Of torch.distributed, by name: importing them takes long."""


def _refuse_wrappers(module: nn.Module) -> None:
    for name, part in module.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise OptionError(
                    f"the layer {name!r} is wrapped in {kind.__name__}, whose collectives would wait for other "
                    "processes in an order that no schedule knows; leave the wrapper off, and give replicas= (and "
                    "shard_optimizer=True) in its place; or give StageFactory a shard function that calls fully_shard"
                )


def _needs_target(loss_fn: Callable[..., Any] | None) -> bool:
    if loss_fn is None:
        return False
    try:
        inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).bind(None)
    except TypeError:
        return True
    except ValueError:  # It does not say what it takes.
        pass
    return False
