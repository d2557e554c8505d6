"""Measure what the layers of a model cost in a pipeline, and choose schedule and balance by prediction.

Costs are taken from real steps, on the devices' own threads and with a pipeline's own stages, while all devices are
busy. Two pipelines on copies of the model take turns, so that other load on the machine affects both alike::

    fine      each layer is a stage; stages go round the devices    the time of each layer, with a task's overhead
    coarse    one stage per device                                  the overhead of a task, the gaps between tasks

``core/predict/profile_from_journals.py`` computes costs from their journals. The model itself does not change.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, process_time
from typing import Any, Literal

import torch
from torch import nn

from asyncpipe.core.checks import check_positive
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.core.hosts import DeviceName
from asyncpipe.core.predict.balance import check_balance, even_balance
from asyncpipe.core.predict.layer_profile import (
    PARAMETER_SCALE,
    Measurement,
    Profile,
    ProfiledLayer,
    replicas,
)
from asyncpipe.core.predict.planner import Plan, plan
from asyncpipe.core.predict.profile_from_journals import MeasuredStep, StepVariant, combine, layer_seconds
from asyncpipe.core.predict.threads_or_processes import threads_or_processes
from asyncpipe.core.schedules.protocol import Action, B, F, I, OrderedSchedule, Shape, W
from asyncpipe.errors import MicrobatchError, OptionError, RecomputeError, TaskError
from asyncpipe.ops.device.copies import host_bandwidth
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.ops.execute.replica_sums import reduce_bandwidth
from asyncpipe.ops.model.byte_recorder import ByteRecorder, LayerBytes, parameter_bytes, tied_parameters, travelling
from asyncpipe.ops.model.measure_layers import copied
from asyncpipe.ops.model.microbatch import cut
from asyncpipe.ops.model.sequential import as_sequential
from asyncpipe.ops.model.stage import Stage, StagedModel
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.build import build
from asyncpipe.pipeline.graph_cache import GraphCache
from asyncpipe.pipeline.options import PipelineArguments, PipelineOptions
from asyncpipe.pipeline.pool import DevicePool, Tenancy
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.step_inputs import NO_TARGET, StepInputs, StepOptions
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.waits import drive_blocking

__all__ = ["Measuring", "SampleBatch", "choose", "measure", "resolve_auto", "resolve_workers"]

_logger = logging.getLogger(__name__)

STEPS = 5
"""Measured steps of each variant, for each number of micro-batches."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """A mini-batch to measure with, of the size that training will have, and its loss. Fields as in ``Pipeline``."""

    x: Any
    target: Any = NO_TARGET
    loss_fn: Callable[..., Any] | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"
    batch_dim: int = 0
    optimizer: Callable[..., Any] | None = None
    """That of the pipeline, if the time of its updates counts; a copy of the model is updated."""


def measure(
    model: nn.Module | Sequence[nn.Module] | StagedModel | StageFactory,
    devices: Sequence[str | torch.device],
    sample: SampleBatch,
    microbatches: Sequence[int],
    *,
    steps: int = STEPS,
    intra_op_threads: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measure what each layer of ``model`` costs on ``devices``, for each of these numbers of micro-batches.

    ``model`` is what ``Pipeline`` takes; each stage that a traced one was cut into counts as a layer. For each number
    of micro-batches one round of about ten steps warms up, then ``steps`` rounds are measured. Two copies of the model
    run, in the caller's autocast: the model, its gradients and buffers and torch's random generators do not change.
    ``progress`` is called with a line of text for each round. Raises as ``Pipeline``, and ``MicrobatchError`` if there
    are more micro-batches than samples.
    """
    check_positive("steps", steps)
    with Measuring(model, devices, sample, microbatches, intra_op_threads=intra_op_threads) as measuring:
        for number in measuring.microbatches:
            # The first round warms up and is not kept.
            for turn in range(steps + 1):
                if progress is not None:
                    progress(f"measuring {number} micro-batches, round {turn + 1} of {steps + 1}")
                measuring.round(number, keep=turn > 0)
        return measuring.profile()


def choose(
    model: nn.Module | Sequence[nn.Module] | StagedModel | StageFactory,
    devices: Sequence[str | torch.device],
    sample: SampleBatch,
    microbatches: int,
    *,
    schedules: Sequence[str] | None = None,
    balance: str | Sequence[int] = "auto",
    checkpoints: Sequence[str] = ("except_last",),
    parameter_scale: float = PARAMETER_SCALE,
    steps: int = STEPS,
    intra_op_threads: int = 1,
    ahead: int = 0,
    memory_limit: int | None = None,
    offload: bool = False,
    replicas: int = 1,
    shards: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Measure, and return the plan with the shortest predicted step; ``Pipeline(…, **plan.options())`` runs it.

    ``devices`` and ``microbatches`` are those of each of the ``replicas``; the devices of the first are measured.
    ``schedules`` are names, by default all known ones. A ``balance`` that is not ``"auto"`` is kept. ``measure`` and
    ``asyncpipe.core.predict.planner.plan`` explain the other arguments, and raise what this raises.
    """
    pieces = microbatches * replicas
    profile = measure(
        model, devices, sample, [pieces], steps=steps, intra_op_threads=intra_op_threads, progress=progress
    )
    fixed = None if isinstance(balance, str) else check_balance(balance, len(profile.layers))
    return plan(
        profile,
        len(devices) * replicas,
        schedules=schedules,
        balances=None if fixed is None else lambda *_: [fixed],
        checkpoints=checkpoints,
        parameter_scale=parameter_scale,
        ahead=ahead,
        memory_limit=memory_limit,
        offload=offload,
        replicas=[replicas],
        shards=[shards],
        progress=progress,
    )[0]


def resolve_auto(arguments: PipelineArguments) -> PipelineArguments:
    """``arguments`` with the fastest schedule and balance in place of ``"auto"``, if they are to be measured."""
    if not arguments.is_auto:
        return arguments
    assert arguments.sample is not None
    assert isinstance(arguments.schedule, str)
    # As in ``why_alone``; the planner knows of ties and rules.
    overlap = arguments.optimizer is not None and not arguments.deferred_batch_norm
    plan = choose(
        arguments.model,
        arguments.flat_devices[: len(arguments.flat_devices) // arguments.replicas],
        _sample_of(arguments),
        arguments.microbatches,
        schedules=None if arguments.schedule == "auto" else [arguments.schedule],
        balance=arguments.balance,
        checkpoints=[arguments.checkpoint],
        intra_op_threads=arguments.intra_op_threads,
        ahead=int(overlap),
        memory_limit=arguments.memory_limit,
        offload=arguments.offload == "auto",
        replicas=arguments.replicas,
        shards=arguments.shard_optimizer,
    )
    chosen = (plan.offload or None) if arguments.offload == "auto" else arguments.offload
    return replace(arguments, schedule=plan.schedule, balance=list(plan.balance), offload=chosen, sample=None)


def _sample_of(arguments: PipelineArguments) -> SampleBatch:
    x, target = (*(arguments.sample or ()), NO_TARGET)[:2]
    options = arguments.loss_fn, arguments.loss_reduction, arguments.batch_dim, arguments.optimizer
    return SampleBatch(x, target, *options)


def resolve_workers(arguments: PipelineArguments) -> tuple[PipelineArguments, str]:
    """``arguments`` with threads or processes in place of ``workers="auto"``, and why.

    Schedule and balance are chosen first, if they are to be. Then a copy of the model takes ``STEPS`` steps on threads.
    """
    if arguments.workers != "auto":
        return arguments, ""
    devices, chosen = resolve_devices(arguments.flat_devices), resolve_auto(arguments)
    workers, why = "threads", _why_threads(arguments, devices)
    if why is None:
        assert not isinstance(chosen.balance, str)
        own, sample = devices[: len(devices) // chosen.replicas], _sample_of(arguments)
        modes = {CheckpointMode.NEVER: StepVariant.KEPT, CheckpointMode.SELECTIVE: StepVariant.SELECTIVE}
        variant = modes.get(CheckpointMode(chosen.checkpoint), StepVariant.RECOMPUTED)
        with _MeasuredPipeline(chosen.model, own, chosen.balance, sample, chosen.intra_op_threads) as pipeline:
            for _ in range(2):  # They warm up.
                pipeline.step(chosen.microbatches, variant)
            begun = process_time()
            steps = [pipeline.step(chosen.microbatches, variant) for _ in range(STEPS)]
            # Of all replicas, whose threads share one lock.
            processor = (process_time() - begun) * chosen.replicas
        tasks = sum(len(step.record.graph.tasks) for step in steps) * chosen.replicas
        seconds = sum(step.seconds for step in steps)
        workers, why = threads_or_processes(len(devices), tasks // STEPS, processor / STEPS, seconds / STEPS)
    _logger.info("workers='auto' chose %s: %s", workers, why)
    transport = "shared_memory" if workers == "threads" else chosen.transport
    return replace(chosen, workers=workers, transport=transport), why


def _why_threads(arguments: PipelineArguments, devices: Sequence[Device]) -> str | None:
    """Why the devices of ``workers="auto"`` run on threads whatever steps cost; ``None`` if that is to be measured."""
    if not all(device.is_accelerator for device in devices):
        return "operators on CPUs run without the interpreter's lock"
    if len({device.physical for device in devices}) == 1:
        return "all devices are on one accelerator, which has one worker"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this interpreter runs without a lock"
    if arguments.optimizer is None:
        return "without an optimizer= of the pipeline the gradients are the caller's, and in processes he has none"
    if arguments.sample is None or isinstance(arguments.model, StageFactory):
        return "nothing was measured, since there is no sample=, or a StageFactory builds the stages"
    return None


def _named_layers(model: nn.Module | Sequence[nn.Module] | StagedModel | StageFactory) -> dict[str, nn.Module]:
    """The parts that a balance counts, by name."""
    if isinstance(model, StageFactory):
        raise OptionError(
            f"{model} builds stages where they live, which cannot be joined or measured here; name a schedule, and "
            "leave balance and sample out"
        )
    if isinstance(model, StagedModel):
        return {f"stage {index}": stage for index, stage in enumerate(model.stages)}
    # named_children() would leave out a layer that is there twice.
    return {f"{name} {type(part).__name__}": part for name, part in as_sequential(model)._modules.items()}


def _check_microbatches(microbatches: int, sample: SampleBatch) -> None:
    check_positive("microbatches", microbatches, MicrobatchError)
    sizes = cut(sample.x, microbatches, dim=sample.batch_dim, name="the sample").with_samples("the sample").sizes
    if len(sizes) != microbatches:
        raise MicrobatchError(
            f"the sample makes {len(sizes)} micro-batches, not {microbatches}; give one with at least as many samples "
            "as micro-batches"
        )


_MODES = {StepVariant.RECOMPUTED: CheckpointMode.ALWAYS, StepVariant.SELECTIVE: CheckpointMode.SELECTIVE}


class Measuring:
    """``measure`` in single rounds, for callers who do something else between them. Open it with ``with``.

    Arguments and errors are those of ``measure``.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | StagedModel | StageFactory,
        devices: Sequence[str | torch.device],
        sample: SampleBatch,
        microbatches: Sequence[int],
        *,
        intra_op_threads: int = 1,
    ) -> None:
        self.microbatches = sorted(set(microbatches))
        for number in microbatches:
            _check_microbatches(number, sample)
        self._model = model
        self._devices = resolve_devices([DeviceName.parse(str(device)).device for device in devices])
        layers = _named_layers(model)
        if isinstance(model, StagedModel) and sample.loss_fn is None:
            sample = replace(sample, loss_fn=model.own_loss)
        self._layers = tuple(ProfiledLayer(name, *parameter_bytes(part)) for name, part in layers.items())
        self._ties = tied_parameters(list(layers.values()))
        self._optimizer = sample.optimizer
        self._added = 0
        """Bytes of gradients of tied parameters that a coarse step adds to others."""
        self._open = partial(_MeasuredPipeline, model, sample=sample, intra_op_threads=intra_op_threads)
        self._stack = ExitStack()
        self._unfit: set[StepVariant] = set()
        self._sizes: dict[int, list[LayerBytes]] = {}
        self._fine_steps: dict[int, dict[StepVariant, list[MeasuredStep]]] = {}
        self._coarse_steps: dict[int, dict[StepVariant, list[MeasuredStep]]] = {}

    def __enter__(self) -> Measuring:
        with ExitStack() as stack:
            # Steps train, whatever the caller's modes.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            count = len(self._layers)
            self._fine = stack.enter_context(self._open(self._devices[:count], [1] * count))
            self._coarse = self._fine
            stages = min(len(self._devices), count // 2)
            if stages:
                step = self._fine.step(max(self.microbatches), StepVariant.KEPT)
                balance = even_balance(layer_seconds(step), stages)
                self._coarse = stack.enter_context(
                    self._open(self._devices[:stages], balance, optimizer=self._optimizer)
                )
                stage_of = [stage for stage, size in enumerate(balance) for _ in range(size)]
                self._added = sum(tensor.size for _, _, tensor in replicas(self._ties, stage_of) if tensor.trained)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(
        self, microbatches: int, *, variants: Sequence[StepVariant] = tuple(StepVariant), keep: bool = True
    ) -> None:
        """Run one step in each of ``variants`` with this number of micro-batches; with ``keep`` its times count."""
        if microbatches not in self._sizes:
            self._sizes[microbatches] = self._fine.sizes(microbatches)
        for pipeline, steps in ((self._fine, self._fine_steps), (self._coarse, self._coarse_steps)):
            updated = [StepVariant.UPDATED] if pipeline.optimized_bytes else []
            left_out = {StepVariant.UPDATED, *self._unfit}
            for variant in (*(each for each in variants if each not in left_out), *updated):
                try:
                    step = pipeline.step(microbatches, variant)
                except TaskError as error:
                    if variant is not StepVariant.SELECTIVE or not isinstance(error.__cause__, RecomputeError):
                        raise
                    self._unfit.add(variant)  # The model overwrites products in place.
                    continue
                if keep:
                    steps.setdefault(microbatches, {}).setdefault(variant, []).append(step)

    def profile(self) -> Profile:
        """The costs according to the rounds that were kept so far."""
        instant = not any(device.is_accelerator for device in self._devices)
        physical = {device.physical for device in self._devices}
        bus = min(map(host_bandwidth, physical))
        reducing = min(map(reduce_bandwidth, physical))
        measurements: dict[int, Measurement] = {
            number: replace(
                combine(
                    fine,
                    self._coarse_steps[number],
                    [each.saved for each in self._sizes[number]],
                    [each.working for each in self._sizes[number]],
                    products=[each.products for each in self._sizes[number]],
                    instant=instant,
                    sent=travelling(self._sizes[number]),
                    added=self._added,
                    updated=self._coarse.optimized_bytes,
                ),
                host_bandwidth=bus,
                reducing=reducing,
            )
            for number, fine in self._fine_steps.items()
        }
        sizes = next(iter(self._sizes.values()))
        layers = tuple(replace(la, inner=of.inner) for la, of in zip(self._layers, sizes, strict=True))
        names = tuple(device.name for device in self._devices)
        return Profile(layers, self._fine.wiring.links, measurements, names, self._ties)


class _InGroups(OrderedSchedule):
    """Forwards and then backwards of a group of micro-batches at a time, so that all devices are busy.

    Works for any shape. A group is twice as many micro-batches as devices, about what other schedules hold in flight.
    """

    name = "in groups"

    def __init__(self, *, split: bool) -> None:
        self._split = split

    def check(self, shape: Shape) -> None:
        """Every shape works."""

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        size = 2 * shape.devices
        mine = range(device, shape.stages, shape.devices)
        for first in range(0, shape.microbatches, size):
            group = range(first, min(first + size, shape.microbatches))
            yield from (F(i, j) for j in mine for i in group)
            for j in reversed(mine):
                for backward in (I, W) if self._split else (B,):
                    yield from (backward(i, j) for i in group)


class _MeasuredPipeline:
    """A pipeline on a copy of a model, which runs single steps in any variant. Open it with ``with``."""

    def __init__(
        self,
        model: Any,
        devices: Sequence[Device],
        balance: Sequence[int],
        sample: SampleBatch,
        intra_op_threads: int,
        optimizer: Callable[..., Any] | None = None,
    ) -> None:
        self._sample = sample
        self._recorder = ByteRecorder()
        pool = DevicePool(intra_op_threads=intra_op_threads)
        self._tenancy = Tenancy(pool, devices, Tenant(), own=True)
        own = deepcopy(model.joined(balance)) if isinstance(model, StagedModel) else copied(as_sequential(model))
        whole: nn.Module = own.module if isinstance(own, StagedModel) else own
        if not whole.training:
            whole.train()
        self._parts = build(
            own,
            devices,
            PipelineOptions(
                microbatches=1,
                balance="auto" if isinstance(own, StagedModel) else balance,
                schedule=_InGroups(split=False),
                checkpoint=CheckpointMode.NEVER,
                loss_fn=None if sample.loss_fn is None else self._recorder.loss(sample.loss_fn),
                loss_reduction=sample.loss_reduction,
                batch_dim=sample.batch_dim,
                # Steps must not draw from the caller's generator.
                generator=torch.Generator(),
                optimizer=optimizer,
            ),
        )
        self.wiring: Wiring = self._parts.graphs(1, Phase.STEP, CheckpointMode.NEVER, True).wiring
        updated = (group for each in self._parts.resources.optimizers.values() for group in each.param_groups)
        self.optimized_bytes = sum(parameter.nbytes for group in updated for parameter in group["params"])
        """Bytes of the parameters that optimizers update."""
        names, stages = [device.name for device in devices], len(self._stages)
        self._graphs = {
            split: GraphCache(_InGroups(split=split), names, self.wiring, stages) for split in (False, True)
        }

    def __enter__(self) -> _MeasuredPipeline:
        drive_blocking(self._tenancy.opened())
        return self

    def __exit__(self, *_: object) -> None:
        drive_blocking(self._tenancy.closed())

    def step(self, microbatches: int, variant: StepVariant) -> MeasuredStep:
        """Run one training step, which begins and ends without gradients."""
        checkpoint = _MODES.get(variant, CheckpointMode.NEVER)
        options = replace(self._parts.options, microbatches=microbatches, checkpoint=checkpoint)
        parts = replace(self._parts, options=options, graphs=self._graphs[variant is StepVariant.SPLIT])
        step = StepOptions(return_outputs=False, update=variant is StepVariant.UPDATED)
        begun = perf_counter()
        inputs = StepInputs.prepare(parts, self._sample.x, self._sample.target, step)
        result = drive_blocking(PreparedStep(parts, inputs, self._tenancy).run()).wait()
        seconds = perf_counter() - begun
        for parameter in parts.module.parameters():
            parameter.grad = None
        return MeasuredStep(seconds, result.record)

    @property
    def _stages(self) -> Sequence[Stage]:
        return self._parts.resources.stages

    def sizes(self, microbatches: int) -> list[LayerBytes]:
        """The bytes of each stage, recorded in a separate step."""
        with self._recorder.watching(self._stages):
            self.step(microbatches, StepVariant.KEPT)
        return [self._recorder.layers[stage.index] for stage in self._stages]
