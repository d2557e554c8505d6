"""``StepProtocol``, by which every step runs, and ``PreparedStep``, one whole training or evaluation step.

Everything here runs on the caller's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.device.streams import Fence
from asyncpipe.ops.execute.binder import Binder, normalize
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.overlap import why_alone
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step_inputs import StepInputs
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.portal import PortalCall
from asyncpipe.runtime.waits import Waiting

__all__ = ["PreparedStep", "StepProtocol"]

_Result = TypeVar("_Result")


class StepProtocol(ABC, Generic[_Result]):
    """How every step runs: begin, run its graph, then finish or, after any exception, abandon.

    A subclass prepares the step in its constructor: it checks and cuts the mini-batch, and changes nothing yet.
    ``run`` is then called once.
    """

    def __init__(
        self,
        parts: PipelineParts,
        tenancy: Tenancy,
        graph: TaskGraph,
        plan: StepPlan,
        tensors: StepTensors,
        context: CallerContext,
        crossings: Crossings | None = None,
    ) -> None:
        """``crossings``: what the step's part in this worker exchanges with those in others."""
        self.parts = parts
        self.tenancy = tenancy
        self._graph = graph
        self._plan = plan
        self._tensors = tensors
        self._context = context
        self._fence = Fence(parts.resources.streams.values(), tensors.given())
        self._binder = Binder(graph, plan, tensors, parts.resources, context, crossings)

    def run(self) -> Waiting[_Result]:
        """Run the step on the pool's loop, for both kinds of callers."""
        with self._begun():
            execution = yield from self.tenancy.pool.on_loop(self._execution())
            try:
                return self._finish(execution)
            except RuntimeError as error:
                if is_device_error(error):
                    # One of the step's kernels failed after it was queued: the error of its task says which.
                    yield from self.tenancy.pool.on_loop(execution.completed())
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
    """A mini-batch that is checked and cut, for one step with a loss, or for forwards only in evaluation mode."""

    def __init__(
        self,
        inputs: StepInputs,
        tenancy: Tenancy,
        graph: TaskGraph | None = None,
        tensors: StepTensors | None = None,
        crossings: Crossings | None = None,
    ) -> None:
        """Changes nothing. In a worker ``graph`` is its part of the step, with the tables that ``crossings`` fills."""
        # Without the mini-batch: each micro-batch is dropped when its last reader has taken it.
        self._inputs = inputs.emptied()
        self._has_set_gradients_aside = False
        self._run_has_gradients = False
        """Whether a run of overlapping steps sets the gradients aside, and restores them."""
        tensors = tensors or StepTensors.of(inputs.takes, inputs.targets)
        super().__init__(inputs.parts, tenancy, graph or inputs.graph, inputs.plan, tensors, inputs.context, crossings)

    def _begin(self) -> None:
        resources = self.parts.resources
        if self.training and not self._run_has_gradients:
            resources.guard.enter(self, self)
        resources.ties.refresh()
        self._tensors.caller_ready = self._fence.begin()
        if self.training and not self._run_has_gradients:
            self._has_set_gradients_aside = True
            resources.guard.begin(self.parts.module.parameters())

    def _finish(self, execution: Execution) -> StepResult:
        losses = [loss for _, loss in sorted(self._tensors.losses.items())]
        outputs = [packet.rebuild(packet.tensors) for _, packet in sorted(self._tensors.outputs.items())]
        norms = dict(sorted(self._tensors.gradient_norms.items()))
        self._fence.end(tensors_of([losses, list(self._tensors.counts.values()), outputs, list(norms.values())]))
        with torch.no_grad():
            loss = self._inputs.mean_loss(losses, self._tensors)
            gathered = self._inputs.gather(outputs)
            if self.training and not self._run_has_gradients:
                self._commit_gradients()
        self.parts.commit_statistics()
        self._tensors.close()
        return StepResult(loss, tuple(losses), gathered, execution, self.tenancy.pool.portal, norms)

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
    def is_fed(self) -> bool:
        """Whether the pipeline's feed has made its mini-batch."""
        return self._inputs.options.is_fed

    @property
    def overlaps(self) -> bool:
        """Whether it may be under way together with others: all that a step leaves behind is made by its tasks."""
        alone = why_alone(self.parts, self.tenancy, self._graph, training=self.training)
        return alone is None and not (self.training and self._inputs.options.scaler is not None)

    def start(self, line: Line[Execution]) -> PortalCall[Execution]:
        """Begin it behind the last step of ``line``; then ``finish`` or ``drop`` it."""
        self._run_has_gradients = True
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
