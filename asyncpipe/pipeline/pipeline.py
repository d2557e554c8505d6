"""``Pipeline``: one model, its devices, and steps. Everything else in this folder is reached from here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.policies.share import Share
from asyncpipe.core.records.compilations import CompiledStage, compiled_stages
from asyncpipe.core.records.step_record import Observer
from asyncpipe.core.schedules.protocol import Schedule
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import ArgumentTypeError, OptionError
from asyncpipe.ops.autograd.random_streams import draw_step_seed
from asyncpipe.ops.execute.learning_rates import load_schedule_states, schedule_states
from asyncpipe.ops.execute.offloading import has_own_memory
from asyncpipe.ops.model.feed import as_feed
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.build import PipelineParts, build, join_stages
from asyncpipe.pipeline.device_notes import note_devices
from asyncpipe.pipeline.feeding import Feeding, Step
from asyncpipe.pipeline.model_proxy import ModelProxy
from asyncpipe.pipeline.options import PipelineArguments
from asyncpipe.pipeline.overlap import why_alone
from asyncpipe.pipeline.pool import DevicePool, Tenancy
from asyncpipe.pipeline.pool_options import takes
from asyncpipe.pipeline.profiling import resolve_auto, resolve_workers
from asyncpipe.pipeline.remote_stages import RemoteStages
from asyncpipe.pipeline.remote_step import RemoteStep
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.saving import NO_STATE, Resumable, SaveFormat, Saves
from asyncpipe.pipeline.shown import pipeline_html, pipeline_text
from asyncpipe.pipeline.stage_groups import check_ordered, ranks_of
from asyncpipe.pipeline.stages_here import StagesHere
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.step_inputs import NO_TARGET, StepInputs, StepOptions
from asyncpipe.pipeline.steps import FEED, StepRun, check_batches, one_step, run_steps
from asyncpipe.pipeline.sync import SyncPipeline
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.waits import drive

if TYPE_CHECKING:
    from torch.amp import GradScaler

__all__ = ["Pipeline"]

_logger = logging.getLogger(__name__)


class Pipeline(ModelProxy):
    """A model that trains as a pipeline. Open it with ``async with``, then ``await step(x, target)``.

    ``Pipeline(model, devices, *, microbatches, ...)`` takes the fields of ``PipelineArguments``, which are explained
    in ``asyncpipe/pipeline/options.py``. A wrong value raises here, before anything runs or moves.
    """

    @takes(PipelineArguments)
    def __init__(self, arguments: PipelineArguments) -> None:
        self._set_up(arguments)

    def _set_up(self, arguments: PipelineArguments) -> None:
        arguments, why = resolve_workers(arguments.by_row())
        pool = arguments.pool or DevicePool(**arguments.pool_options)
        self.devices = pool.resolve(arguments.flat_devices)
        if arguments.offload is not None and not any(map(has_own_memory, self.devices)):
            _logger.warning("offload moves nothing here: the memory of the devices is the host's; leave it out on CPUs")
        arguments = resolve_auto(replace(arguments, feed=as_feed(arguments.feed)))
        if isinstance(arguments.model, StageFactory):
            seeded = arguments.model.seeded(partial(draw_step_seed, arguments.generator))
            arguments = replace(arguments, model=seeded)
        if isinstance(arguments.model, StagedModel):
            own_loss = arguments.model.own_loss
            loss_fn = arguments.loss_fn or own_loss
            sums = arguments.loss_fn is None and getattr(own_loss, "is_sum", False)
            # Copies of the pipeline copy the stages that it has; the trace of a copy cannot be cut in another way.
            staged = join_stages(arguments.model, len(self.devices) // arguments.replicas, arguments)
            arguments = replace(arguments, model=staged, balance="auto", loss_fn=loss_fn)
            arguments = replace(arguments, loss_reduction="sum") if sums else arguments
        ranks = ranks_of(arguments.model, self.devices, arguments, pool)
        here = ranks[0] if pool.workers is None else [device.elsewhere() for device in ranks[0]]
        parts = build(arguments.model, here, arguments)
        _check_recomputation(parts)
        # Copies of the pipeline have the stages as they will be, not as they were built.
        self._arguments = arguments if parts.factory is None else replace(arguments, model=parts.staged)
        # Not accelerators that workers have: to ask for their memory takes a context here.
        noted = [] if pool.on_hosts else [d for d in self.devices if pool.workers is None or not d.is_accelerator]
        physical = {str(device.physical): device.physical for device in noted}
        observers = Observers(arguments.observers, partial(note_devices, physical))
        tenant = Tenant(arguments.share or Share(), observers, why)
        make: Callable[[StepInputs, Tenancy], Step]
        if pool.workers is None:
            stages, remote, make = StagesHere(parts), None, partial(PreparedStep, parts)
        else:
            stages = remote = RemoteStages(parts, ranks, tenant, pool)
            make = partial(RemoteStep, parts, stages=remote)
        if arguments.feed is not None:
            stages.check_feed()
        tenancy = Tenancy(pool, self.devices, tenant, own=arguments.pool is None, stages=remote)
        feeding = Feeding(parts, tenancy, stages, make)
        super().__init__(parts, tenancy, feeding, stages, Saves(parts, tenancy, feeding, stages))

    # Steps

    async def step(
        self,
        x: Any = FEED,
        target: Any = NO_TARGET,
        *,
        return_outputs: bool = True,
        update: bool = True,
        scaler: GradScaler | None = None,
        learning_rate: float | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> StepResult:
        """Run one mini-batch through the pipeline, and add its gradients to the parameters' ``.grad``.

        ``x`` and ``target`` are nested values whose tensors share the batch dimension (every micro-batch gets those in
        ``NoChunk`` whole), ``Arguments`` for a model or a loss that takes several, or ``Microbatches`` that are cut
        already. A ``UserDict``, as tokenizers return it, stands for keyword arguments, and so does a dict for a traced
        model. In training mode with gradients enabled, ``loss_fn(output, target)`` of every micro-batch is
        differentiated; without a target it is called with the output alone. After ``eval()`` or under
        ``torch.no_grad`` only forwards run, and the loss only if a target is given. ``update=False`` leaves out the
        pipeline's optimizers, to accumulate gradients over steps. ``scaler`` multiplies gradients by its scale.
        Without ``x``, the pipeline's ``feed`` makes both (``feed_step``).
        ``learning_rate`` is set in all parameter groups of the pipeline's optimizers before they update; one that
        ``parameter_groups`` gave an ``lr`` keeps its ratio to the others.
        ``num_items_in_batch`` takes the place of the sum of the counts that the loss returns: the mini-batch then adds
        its share to the mean over so many labels, of several steps whose gradients are accumulated, as transformers'
        Trainer gives it to a model; ``result.loss`` is that share.
        Steps of one pipeline run one after the other. Returns when the last task is issued.

        Raises ``BatchError`` or ``OptionError`` before anything runs, ``TaskError`` if a task fails. After an
        error or a cancellation the gradients are what they were before, and another step may follow.
        """
        step = StepOptions(return_outputs, update, scaler, learning_rate, num_items_in_batch)
        return await drive(one_step(self._tenancy, self._feeding, x, target, step, blocking=False))

    def steps(
        self,
        batches: Iterable[Any] | AsyncIterable[Any],
        *,
        ahead: int = 1,
        return_outputs: bool = True,
        update: bool = True,
        scaler: GradScaler | None = None,
    ) -> AsyncGenerator[StepResult, None]:
        """The results of many mini-batches, in order: ``async for result in pipe.steps(loader)``.

        Each of ``batches``, an iterable or an asynchronous one, is x, a pair ``(x, target)`` or ``Batch(x, target)``,
        which may have a ``learning_rate`` and, without x, leaves the mini-batch to the pipeline's ``feed``; the options
        are those of ``step``. ``ahead`` steps begin behind the one whose result is due, and each device goes on to the
        next step when it is at the end of one. So the devices do not wait while results are read, and the next
        mini-batch is fetched and cut.
        Losses and weights are bit-equal to those of ``step`` one by one, if the mini-batches are made independently of
        the results.

        Steps overlap if the pipeline has the optimizers of all parameters that train (or only runs forwards), its
        schedule has an order, and only values join its stages: no tied parameters, deferred batch norms or scaler.
        Others run one by one (``why_steps_wait`` says why), as does everything with ``ahead=0``. While a later step
        computes, the model is between two steps: ``state_dict()``, ``step`` and ``pipe(x)`` raise ``OverlapError``, and
        parameters, gradients and optimizers must be left alone.

        A failed step ends those behind it and raises ``TaskError``, after the results before it. What is wrong with a
        mini-batch, or raised by ``batches``, is raised there as well. Leaving the loop completes the steps that have
        begun, without their results. A cancellation ends them as it ends ``step``.
        """
        check_batches(batches, ahead, blocking=False)
        step = StepOptions(return_outputs, update, scaler)
        return run_steps(StepRun(self._parts, self._tenancy, self._feeding, step, ahead), batches)

    async def generate(self, inputs: Any, **options: Any) -> Tensor:
        """Tokens that the model generates, as its own ``generate`` returns them: ``await pipe.generate(batch)``.

        ``inputs`` are token ids or a tokenizer's batch, padded at the left; ``options`` are those of transformers'
        ``generate`` (greedy, sampling, beams), which does all but the forwards. These run in the stages, which keep
        the caches of their layers; micro-batches of requests fill them. The result is padded at the right. In
        evaluation mode, which is left as it was found. Sampling draws from torch's default generator, for one
        micro-batch after the other: of a single one, the same tokens as the model's own.

        Raises ``OptionError`` where the stages are in workers, compiled or traced, or have replicas. A cancellation
        ends the call before the next token.
        """
        generation = self._generation(inputs, options)
        tokens = asyncio.ensure_future(asyncio.to_thread(generation.elsewhere))
        try:
            return await asyncio.shield(tokens)
        except asyncio.CancelledError:
            generation.cancel()
            await asyncio.wait([tokens])
            raise

    @property
    def why_steps_wait(self) -> str | None:
        """Why training steps of ``steps`` would run one by one; ``None`` if they would overlap."""
        return why_alone(self._parts, self._tenancy, self.graph, training=True)

    # Files

    async def save(
        self,
        folder: str | PathLike[str],
        *,
        state: Mapping[str, Resumable] = NO_STATE,
        extra: object = None,
        format: SaveFormat = "safetensors",  # noqa: A002
        background: bool = False,
    ) -> asyncio.Future[None]:
        """Write everything that training goes on from to ``folder``, for ``load`` with any split of the model.

        That is: the model's state, what the pipeline's optimizers remember, the generator of draws, the step count, the
        states of the objects in ``state`` (``{"loader": loader}``), and ``extra``, of tensors and plain values. The
        folder is written as a whole: whenever this process is killed, ``load`` finds the former save or the new one.

        ``format``: ``"safetensors"`` has the weights under the unsplit model's names, or what the ``save_pretrained``
        of a model of transformers or peft writes, and they pass through this process. ``"dcp"`` is torch's distributed
        checkpoint, with ``model`` and ``optim``, to which each worker writes what it has. The workers need a folder
        that all of them see.

        Returns when everything is on disk. With ``background``, when everything is copied to host memory: steps may go
        on, and to await the result is to wait for the end. So do the next save, and closing. Raises ``OptionError`` or
        ``OverlapError`` before anything is written, and ``OSError``, ``TypeError`` (something in ``state`` or ``extra``
        is no plain value) or ``WorkerLostError`` when it could not be written.
        """
        saving = asyncio.wrap_future(await drive(self._saves.save(folder, state, extra, format, blocking=False)))
        if not background:
            await saving
        return saving

    async def load(self, folder: str | PathLike[str], *, state: Mapping[str, Resumable] = NO_STATE) -> Any:
        """Go on from what ``save`` has written to ``folder``, and return its ``extra``.

        The pipeline has the same model and kind of optimizer; split, devices, workers, replicas and schedule may
        differ. The objects in ``state`` get theirs. Raises ``OptionError`` if a file is missing or damaged, and
        ``StateDictError`` for names or shapes of another model; nothing has changed then.
        """
        return await drive(self._saves.load(folder, state, blocking=False))

    # Schedule

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step follows."""
        return self._parts.graphs.schedule

    @property
    def checkpoint(self) -> CheckpointMode:
        """Which micro-batches are recomputed."""
        return self._parts.checkpoint

    @property
    def microbatches(self) -> int:
        """Into how many micro-batches a large enough mini-batch is cut, for each replica."""
        return self._parts.options.microbatches

    @property
    def graph(self) -> TaskGraph:
        """The task graph of the next training step, if its mini-batch is cut into ``microbatches`` for each replica."""
        return self._parts.graphs(self._parts.options.pieces, Phase.STEP, self.checkpoint, True)

    def change_schedule(self, schedule: str | Schedule, *, order: Literal["strict", "hint"] = "strict") -> None:
        """Follow another schedule from the next step on; a step under way keeps the old one.

        Stages stay where they are. Raises ``ScheduleError`` and changes nothing if the schedule would place them
        elsewhere, or does not work for this number of stages and micro-batches.
        """
        graphs = self._parts.graphs
        found, number = find_schedule(schedule, order=order), graphs.new_number()
        check_ordered(self._parts.factory, found)
        graphs.add(number, found, self._parts.options.pieces, self.checkpoint)
        self._backend.add_schedule(number, found)
        graphs.number = number
        self._arguments = replace(self._arguments, schedule=schedule, order=order)

    def change_share(self, share: Share) -> None:
        """Have ``share`` of the pool's devices from the next step on.

        Raises ``OptionError`` for the share of another job, and where the stages are in workers, which keep theirs.
        """
        if share.job != self._tenancy.tenant.share.job:
            raise OptionError(f"the share is that of job {share.job!r}, not of {self._tenancy.tenant.share.job!r}")
        self._backend.check_share()
        self._tenancy.tenant.share = share
        self._arguments = replace(self._arguments, share=share)

    def __repr__(self) -> str:
        return pipeline_text(self._parts, self.graph)

    def _repr_html_(self) -> str:
        return pipeline_html(self._parts, self.graph)

    @property
    def compiled(self) -> tuple[CompiledStage, ...]:
        """What was compiled of the stages so far, in their order; nothing of stages that no step has called yet."""
        return compiled_stages(self._backend.compilations)

    # Opening and closing

    def __enter__(self) -> NoReturn:
        """Raises ``ArgumentTypeError``: opening may wait."""
        raise ArgumentTypeError("a pipeline is opened by 'async with'; without await, use 'with pipe.sync() as pipe:'")

    def __exit__(self, *_: object) -> None:
        """There is nothing to leave."""

    async def __aenter__(self) -> Pipeline:
        await drive(self._tenancy.opened())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for steps under way, then end every thread. May be called again.

        A step that begins meanwhile, or a backward of an output, raises ``PipelineClosedError``.
        """
        await drive(self._saves.ended())
        await drive(self._tenancy.closed())

    def sync(self) -> SyncPipeline:
        """The same pipeline for callers without ``await``; it also works where a loop already runs."""
        return SyncPipeline(self, self._parts, self._tenancy, self._feeding, self._backend, self._saves)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the model as it is now, the options without observers, the optimizers' states.

        Raises ``OptionError`` if the stages live in workers.
        """
        self._backend.refuse("a copy of the pipeline", "copy state_dict() and optimizer_states()")
        every = self._parts.resources.optimizers
        optimizers = {stage: optimizer.state_dict() for stage, optimizer in every.items()}
        schedules = schedule_states(self._parts.resources.schedules)
        return {"arguments": self._arguments.for_copy(), "optimizers": optimizers, "schedules": schedules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a pipeline that is not open yet."""
        self._set_up(state["arguments"])
        for stage, optimizer in self._parts.resources.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][stage])
        load_schedule_states(self._parts.resources.schedules, state["schedules"])

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """The optimizers of the stages, if the pipeline updates them; with replicas, those of the first.

        Raises ``OptionError`` if they live in workers.
        """
        self._backend.refuse("optimizers", "use optimizer_states(), and step(learning_rate=)")
        count = self._parts.stages_per_row
        return {stage: each for stage, each in self._parts.resources.optimizers.items() if stage < count}

    @property
    def observers(self) -> list[Observer]:
        """The observers. The list may be changed at any time."""
        return self._tenancy.tenant.observers.shown


def _check_recomputation(parts: PipelineParts) -> None:
    """Raise if the model asks for recomputation, which a trace leaves to the pipeline, and the pipeline does none."""
    if parts.staged.recomputes and parts.checkpoint is CheckpointMode.NEVER:
        raise OptionError(
            f"{parts.staged.recomputes} calls torch.utils.checkpoint, in whose place the pipeline recomputes stages, "
            "but checkpoint='never' keeps everything; give checkpoint='always' or 'except_last', or switch it off in "
            "the model (gradient_checkpointing_disable() of a Hugging Face model) and trace again"
        )
