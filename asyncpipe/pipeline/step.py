"""``StepProtocol``, by which every step runs, and ``PreparedStep``, one whole training or evaluation step.

Everything here runs on the caller's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.random_streams import turns_paused
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.device.streams import Fence
from asyncpipe.ops.execute.binder import Binder, normalize
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step_inputs import StepInputs, StepOptions
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.started_step import Line, StartedStep

__all__ = ["PreparedStep", "StepProtocol", "why_alone"]

_Result = TypeVar("_Result")


class StepProtocol(ABC, Generic[_Result]):
    """How every step runs: begin, run its graph, then finish or, after any exception, abandon.

    A subclass prepares the step in its constructor: it checks and cuts the mini-batch, and changes nothing yet.
    ``run`` or ``run_blocking`` is then called once.
    """

    def __init__(
        self,
        parts: PipelineParts,
        tenancy: Tenancy,
        graph: TaskGraph,
        plan: StepPlan,
        tensors: StepTensors,
        context: CallerContext,
    ) -> None:
        self.parts = parts
        self.tenancy = tenancy
        self._graph = graph
        self._plan = plan
        self._tensors = tensors
        self._context = context
        self._fence = Fence(parts.resources.streams.values(), tensors.given())
        self._binder = Binder(graph, plan, tensors, parts.resources, context)

    async def run(self) -> _Result:
        """Run the step on the pipeline's loop, from a coroutine of any loop."""
        with self._begun():
            execution = await self.tenancy.pool.run(self._execution())
            try:
                return self._finish(execution)
            except RuntimeError as error:
                if is_device_error(error):
                    # One of the step's kernels failed after it was queued: the error of its task says which.
                    await self.tenancy.pool.run(execution.completed())
                raise

    def run_blocking(self) -> _Result:
        """Run the step on the pipeline's loop, which is in a thread of its own, and block until it is issued."""
        with self._begun():
            with turns_paused():
                execution = self.tenancy.pool.call(self._execution())
            try:
                return self._finish(execution)
            except RuntimeError as error:
                if is_device_error(error):
                    self.tenancy.pool.call(execution.completed())  # As above.
                raise

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Begin the step, and abandon it if this or the block raises."""
        try:
            self._begin()
            yield
        except BaseException:
            self._abandon()
            raise

    def _execution(self) -> Coroutine[Any, Any, Execution]:
        return self.tenancy.step(self._graph, self._binder.bind, self._binder.around, self._binder.notes)

    @abstractmethod
    def _begin(self) -> None:
        """Order the lanes behind what the caller has queued."""

    @abstractmethod
    def _finish(self, execution: Execution) -> _Result:
        """The result of a step whose last task is issued. Orders the caller's streams behind the step."""

    def _abandon(self) -> None:
        """Undo what the step did to running statistics, and drop its tensors."""
        self.parts.discard_statistics()
        self._tensors.close()
        # The device comes last: if it has failed, every call fails, and the error that is raised already says more.
        with suppress(Exception):
            self._fence.end()


class PreparedStep(StepProtocol[StepResult]):
    """A mini-batch that is checked and cut, for one step with a loss, or for forwards only in evaluation mode.

    Making one changes nothing but the caller's random state. Raises ``BatchError`` or ``OptionError``.
    """

    def __init__(self, parts: PipelineParts, tenancy: Tenancy, x: Any, target: Any, step: StepOptions) -> None:
        self._inputs = inputs = StepInputs.prepare(parts, x, target, step)
        self._has_set_gradients_aside = False
        self._is_started = False
        tensors = StepTensors.of(inputs.takes, inputs.targets)
        super().__init__(parts, tenancy, inputs.graph, inputs.plan, tensors, inputs.context)

    def _begin(self) -> None:
        resources = self.parts.resources
        if self.training and not self._is_started:
            resources.guard.enter(self, self)
        resources.ties.refresh()
        self._tensors.caller_ready = self._fence.begin()
        if self.training and not self._is_started:
            self._has_set_gradients_aside = True
            resources.guard.begin(self.parts.module.parameters())

    def _finish(self, execution: Execution) -> StepResult:
        losses = [loss for _, loss in sorted(self._tensors.losses.items())]
        outputs = [packet.rebuild(packet.tensors) for _, packet in sorted(self._tensors.outputs.items())]
        self._fence.end(tensors_of([losses, list(self._tensors.counts.values()), outputs]))
        with torch.no_grad():
            loss = self._inputs.mean_loss(losses, self._tensors)
            gathered = self._inputs.gather(outputs)
            if self.training and not self._is_started:
                self._commit_gradients()
        self.parts.commit_statistics()
        self._tensors.close()
        return StepResult(loss, tuple(losses), gathered, execution, self.tenancy.pool.portal)

    def _abandon(self) -> None:
        if self._has_set_gradients_aside:
            self.parts.resources.guard.roll_back()
            self.parts.resources.ties.drop_gradients()
        super()._abandon()
        self.parts.resources.guard.leave(self)

    # Steps that overlap (``steps.py``), whose gradients are set aside, and restored, by their run

    @property
    def training(self) -> bool:
        """Whether it has backwards."""
        return self._inputs.training

    @property
    def overlaps(self) -> bool:
        """Whether it may be under way together with others: all that a step leaves behind is made by its tasks."""
        alone = why_alone(self.parts, self.tenancy, self._graph, training=self.training)
        return alone is None and not (self.training and self._inputs.options.scaler is not None)

    def start(self, line: Line) -> StartedStep:
        """Begin it behind the last step of ``line``; then ``finish`` or ``drop`` it."""
        self._is_started = True
        with self._begun():
            return self.tenancy.start(self._graph, self._binder.bind, self._binder.around, self._binder.notes, line)

    def finish(self, execution: Execution) -> StepResult:
        """Its result; its last task is issued. If this raises, it is still to be dropped."""
        return self._finish(execution)

    def drop(self) -> None:
        """Drop its tensors; no thread uses it any more."""
        self._abandon()

    def _commit_gradients(self) -> None:
        # Parameters that were updated inside the step have no gradient any more.
        normalize(self.parts.module.parameters(), self._tensors)
        self.parts.resources.guard.commit()
        self._has_set_gradients_aside = False
        self.parts.resources.guard.leave(self)


def why_alone(parts: PipelineParts, tenancy: Tenancy, graph: TaskGraph, *, training: bool) -> str | None:
    """Why steps of ``graph`` cannot be under way together; ``None`` if they can."""
    resources = parts.resources
    if graph.rule is not None:
        return "the schedule decides as it goes what comes next"
    if resources.ties.links:
        return "stages on several devices share parameters or buffers"
    if parts.deferred:
        return "deferred batch norms count whole mini-batches"
    if not tenancy.overlaps_steps:
        return "the devices are shared with other jobs, or have a policy of their own"
    if not training:
        return None
    if not set(Wiring.chain(graph.shape.stages).links) <= set(graph.wiring.links):
        return "not every stage gets values from the one before it"
    updated = {
        id(parameter)
        for stage in graph.wiring.updates
        for group in resources.optimizers[stage].param_groups
        for parameter in group["params"]
    }
    loss = parts.options.loss_fn
    others = loss.parameters() if isinstance(loss, nn.Module) else ()
    # Parameters of the loss have an optimizer of the caller's, which runs between two steps.
    if any(p.requires_grad for p in others) or any(
        id(p) not in updated for p in parts.module.parameters() if p.requires_grad
    ):
        return "the pipeline does not have the optimizers of all parameters that train"
    return None
