"""The facade: one model, its devices, and steps. The only place where core, runtime and ops are wired."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from asyncpipe.core.engine.events import Observer
from asyncpipe.core.engine.share import Share
from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.predict.planner import Plan
from asyncpipe.core.schedules.protocol import Schedule
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError, PipelineClosedError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.device.memory import device_memory
from asyncpipe.ops.execute.instruments import Instruments
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import Stage, StagedModel
from asyncpipe.pipeline.build import BuildOptions, MakeOptimizer, build
from asyncpipe.pipeline.call import PreparedCall
from asyncpipe.pipeline.model_proxy import ModelFace
from asyncpipe.pipeline.pool import DevicePool, Tenancy
from asyncpipe.pipeline.profiling import Sample, choose
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step import NO_TARGET, PreparedStep, StepOptions
from asyncpipe.pipeline.sync import SyncPipeline
from asyncpipe.runtime.execution import Tenant
from asyncpipe.runtime.executor import Executor
from asyncpipe.runtime.observers import Observers

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["Pipeline"]

_NOT_COPIED = ("self", "observers", "sample", "pool", "share", "generator")
"""Options that a copy of a pipeline does not have: it is by itself."""


class Pipeline(ModelFace):
    """A model that trains as a pipeline. Open it with ``async with``, then ``await step(x, target)``.

    ``model``: an ``nn.Sequential``, a list of modules, or any module cut by ``asyncpipe.trace``; it is moved to the
    devices in place and stays the owner of its parameters. A parameter may be tied over stages and devices.
    ``devices``: logical devices, e.g. ``["cuda:0", "cuda:1"]`` or ``["cpu:0", "cpu:1"]``; one may be listed twice.
    ``microbatches``: into how many micro-batches a mini-batch is cut; a smaller batch makes fewer.
    ``balance``: layers per stage, or ``"auto"`` (the fastest by prediction with a ``sample``, else parameters spread
    evenly).
    ``stages``: how many stages; by default one entry of ``balance`` each, or what the schedule puts on a device.
    ``schedule``: a name (see ``known_schedules``), ``module:Class``, ``csv:FILE`` or a ``Schedule``; or ``"auto"``, the
    fastest by prediction, which takes a ``sample``.
    ``order``: with ``"hint"``, the schedule's order only ranks what is ready.
    ``checkpoint``: which micro-batches are recomputed: ``"always"``, ``"except_last"``, ``"never"``.
    ``loss_fn``: maps (output, target) of a micro-batch to a scalar, or to (mean, count): a mean over that many of
    whatever it counts (tokens, say), so that micro-batches of any size make the whole batch's mean.
    ``loss_reduction``: ``"mean"`` if a plain scalar is a mean over samples (micro-batches then count by their size),
    or ``"sum"``.
    ``batch_dim``: the dimension of inputs, targets and outputs that is the batch.
    ``optimizer``: makes a stage's optimizer from its parameters; its update is then a task of the step, which begins
    when the stage's last backward is done. ``optimizers`` has them by stage.
    ``deferred_batch_norm``: batch norms update their running statistics once a mini-batch, as the unsplit model does.
    ``loop``, ``intra_op_threads``, ``in_flight``, ``executors``: of the pipeline's own ``DevicePool``, which says what
    each means.
    ``pool``: devices that other pipelines use at the same time, in place of those; ``share`` says what this one gets
    of them.
    ``generator``: the CPU generator that all randomness of steps follows from; by default torch's.
    ``observers``: see every completed step's record, on the driver's loop; none of them can fail or hold up a step.
    ``nvtx``: tasks are NVTX ranges, for Nsight Systems; ``torch.profiler`` sees their names anyway.
    ``sample_memory``: read the device's memory after each task, for traces.
    ``sample``: what a step will be given, ``(x, target)`` or ``(x,)``, of the size that it will have; copies of the
    model are measured with it, which blocks for some steps.

    Everything wrong with these raises here, before anything runs or moves.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | StagedModel,
        devices: Sequence[str | torch.device],
        *,
        microbatches: int,
        balance: str | Sequence[int] = "auto",
        stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        order: Literal["strict", "hint"] = "strict",
        checkpoint: str = "except_last",
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_dim: int = 0,
        optimizer: MakeOptimizer | None = None,
        deferred_batch_norm: bool = False,
        loop: Literal["running", "own"] = "running",
        intra_op_threads: int = 1,
        in_flight: int = 16,
        observers: Sequence[Observer] = (),
        executors: Callable[[str], Executor] | None = None,
        nvtx: bool = False,
        sample_memory: bool = False,
        sample: tuple[Any, ...] | None = None,
        pool: DevicePool | None = None,
        share: Share | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._options = {name: value for name, value in locals().items() if name not in _NOT_COPIED}
        on = _own_pool(pool, loop=loop, intra_op_threads=intra_op_threads, in_flight=in_flight, executors=executors)
        self.devices = resolve_devices(devices)
        if schedule == "auto" or (balance == "auto" and sample is not None):
            plan = self._choose(sample)
            self._options |= {"schedule": plan.schedule, "balance": list(plan.balance)}
            schedule, balance = plan.schedule, list(plan.balance)
        self._machinery = build(
            model,
            self.devices,
            BuildOptions(
                microbatches=microbatches,
                balance=balance,
                stages=stages,
                schedule=find_schedule(schedule, order=order),
                checkpoint=checkpoint,
                loss_fn=loss_fn,
                loss_reduction=loss_reduction,
                batch_dim=batch_dim,
                optimizer=optimizer,
                deferred_batch_norm=deferred_batch_norm,
                instruments=Instruments(nvtx, sample_memory),
                generator=generator,
            ),
        )
        self.module = self._machinery.module
        physical = {device.physical for device in self.devices}
        memory = lambda: {str(device): device_memory(device) for device in physical}  # noqa: E731 - nothing of self
        tenant = Tenant(share or Share(), Observers(observers, memory))
        self._tenancy = Tenancy(on, self.devices, tenant, own=pool is None)
        self._turn = asyncio.Lock()
        self._blocking = threading.Lock()

    def _choose(self, sample: tuple[Any, ...] | None) -> Plan:
        """The plan that ``"auto"`` stands for."""
        options = self._options
        if sample is None:
            raise OptionError("schedule='auto' measures the model; give a sample=(x, target) of what steps will get")
        if not isinstance(sample, tuple) or len(sample) not in (1, 2):
            raise OptionError(
                f"sample must be a tuple (x, target), or (x,) without a target, got {type(sample).__name__}"
            )
        schedule = options["schedule"]
        if not isinstance(schedule, str) or options["order"] != "strict" or options["stages"] is not None:
            raise OptionError(
                "'auto' with a sample chooses among schedules by name, in their strict order, with as many stages as "
                "it likes; leave out order and stages, or give the balance as a list and leave out the sample"
            )
        loss = {name: options[name] for name in ("loss_fn", "loss_reduction", "batch_dim")}
        return choose(
            options["model"],
            options["devices"],
            Sample(*sample, **loss),
            options["microbatches"],
            schedules=None if schedule == "auto" else [schedule],
            balance=options["balance"],
            checkpoints=[options["checkpoint"]],
            intra_op_threads=options["intra_op_threads"],
        )

    # Steps

    async def step(
        self,
        x: Any,
        target: Any = NO_TARGET,
        *,
        return_outputs: bool = True,
        update: bool = True,
        scaler: GradScaler | None = None,
    ) -> StepResult:
        """One mini-batch through the pipeline; gradients are added to the parameters' ``.grad``.

        ``x`` and ``target`` are nested values whose tensors share the batch dimension (those in ``NoChunk`` go to
        every micro-batch whole), ``Arguments`` for a model or a loss that takes several, or ``Microbatches`` that
        are cut already. In training mode, with gradients enabled, ``loss_fn(output, target)`` of every micro-batch
        is differentiated; without a target it is called with the output alone. After ``eval()``, or under
        ``torch.no_grad``, only forwards run, and the loss only if a target is given. ``update=False`` leaves the
        pipeline's optimizers out, to accumulate over steps; gradients are multiplied by what ``scaler`` says.
        Steps of one pipeline run one after the other. Returns when the last task is issued.

        Raises ``BatchError`` or ``OptionError`` before anything runs, ``TaskError`` if a task fails. After an
        error or a cancellation the gradients are what they were before, and the next step starts afresh.
        """
        async with self._turn:
            self._tenancy.check()
            prepared = PreparedStep(self._machinery, x, target, StepOptions(return_outputs, update, scaler))
            try:
                prepared.begin()
                step = self._tenancy.step(prepared.graph, prepared.bind, prepared.notes)
                return prepared.finish(await self._tenancy.run(step), self._tenancy.portal)
            except BaseException:
                prepared.abandon()
                raise

    def _step_blocking(self, x: Any, target: Any, options: StepOptions) -> StepResult:
        """``step`` for the sync face: the same, but this thread blocks meanwhile."""
        with self._blocking:
            self._tenancy.check()
            portal = self._tenancy.portal
            assert portal is not None
            prepared = PreparedStep(self._machinery, x, target, options)
            try:
                prepared.begin()
                step = self._tenancy.step(prepared.graph, prepared.bind, prepared.notes)
                return prepared.finish(portal.call(step), portal)
            except BaseException:
                prepared.abandon()
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as part of the caller's autograd graph: ``loss_fn(pipe(x)).backward()`` trains.

        Forward, recompute, backward and copies are tasks as in ``step``; the backward graph runs while the engine is
        in the caller's ``backward``. Gradients flow on to inputs that require them. ``torch.no_grad``,
        ``inference_mode``, autocast and ``eval()`` do what they do to the model itself (recomputation is off in
        evaluation mode). Blocks the calling thread, so the pipeline needs a loop of its own: ``sync()``, or
        ``loop="own"``. One argument that is ``Microbatches`` is taken as they are; the outputs are then a list.

        Raises ``BatchError`` before anything runs and ``TaskError`` if a task fails, here or from ``backward``; then
        the gradients are what they were before. ``BackwardError`` tells what autograd cannot have: a second
        backward without ``retain_graph``, double backward.
        """
        with self._blocking:
            self._tenancy.check()
            portal = self._tenancy.portal
            if portal is None:
                raise PipelineClosedError(
                    "pipe(x) blocks its thread, which drives this pipeline's loop; open it with 'with pipe.sync()', or "
                    "give it loop='own', or use 'await pipe.step(x, target)'"
                )
            prepared = PreparedCall(self._machinery, Arguments(args, kwargs))
            try:
                prepared.begin()
                portal.call(self._tenancy.step(prepared.graph, prepared.bind, prepared.notes))
                return prepared.finish(self, self._tenancy)
            except BaseException:
                prepared.abandon()
                raise

    # Schedule

    @property
    def schedule(self) -> Schedule:
        """What the next step follows."""
        return self._machinery.graphs.schedule

    @property
    def checkpoint(self) -> CheckpointMode:
        """Which micro-batches are recomputed."""
        return self._machinery.checkpoint

    @property
    def graph(self) -> TaskGraph:
        """The task graph of the next training step, if its mini-batch is cut into ``microbatches``."""
        return self._machinery.graphs(self.microbatches, Phase.STEP, self.checkpoint, True)

    def change_schedule(self, schedule: str | Schedule, *, order: Literal["strict", "hint"] = "strict") -> None:
        """Follow another schedule from the next step on; a step under way ends as it began.

        Stages stay where they are. Raises ``ScheduleError`` and changes nothing where the schedule would place them
        elsewhere, or cannot serve this pipeline's stages and micro-batches.
        """
        machinery = self._machinery
        machinery.graphs.change(find_schedule(schedule, order=order), machinery.microbatches, machinery.checkpoint)
        self._options |= {"schedule": schedule, "order": order}

    # Life

    async def __aenter__(self) -> Pipeline:
        await self._tenancy.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for steps under way, then end every thread. May be called again.

        A step that begins meanwhile, or a backward of an output, raises ``PipelineClosedError``.
        """
        await self._tenancy.aclose()

    def sync(self) -> SyncPipeline:
        """The same pipeline for callers without ``await``; works where a loop already runs, too."""
        return SyncPipeline(self)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the model as it is now, the options without observers, the optimizers' states."""
        optimizers = {stage: optimizer.state_dict() for stage, optimizer in self.optimizers.items()}
        return {"options": self._options, "optimizers": optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pipeline that is not open yet."""
        self.__init__(**state["options"])  # type: ignore[misc]
        for stage, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][stage])

    @property
    def stages(self) -> Sequence[Stage]:
        """The placed stages, in order."""
        return self._machinery.equipment.stages

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """The optimizers of the stages, if the pipeline updates them."""
        return self._machinery.equipment.optimizers

    @property
    def microbatches(self) -> int:
        """Into how many micro-batches a large enough mini-batch is cut."""
        return self._machinery.microbatches

    @property
    def observers(self) -> list[Observer]:
        """The observers; append to it at any time."""
        return self._tenancy.tenant.observers.shown


def _own_pool(pool: DevicePool | None, **options: Any) -> DevicePool:
    """``pool``, or one for a pipeline by itself; raises ``OptionError`` for options of that which would be ignored."""
    if pool is None:
        return DevicePool(**options)
    defaults = signature(Pipeline).parameters
    if given := [name for name, value in options.items() if value != defaults[name].default]:
        raise OptionError(f"{', '.join(given)}: a pipeline on a pool takes these from it; give them to DevicePool")
    return pool
