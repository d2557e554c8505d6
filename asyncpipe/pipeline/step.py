"""How every step runs, wherever its stages are: ``StepProtocol``, and ``StepHere`` for those of this process.

``PreparedStep`` is one whole training or evaluation step here, ``RemoteStep`` (``remote_step.py``) one in workers,
``PreparedCall`` (``call.py``) the forward of a ``pipe(x)``. Everything here runs on the caller's thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from asyncpipe.core.graph.task import WHOLE_STEP
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.device.inflow import Inflow
from asyncpipe.ops.device.streams import Fence
from asyncpipe.ops.execute.binder import Binder, normalize
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.result import StepResult
from asyncpipe.pipeline.step_inputs import StepInputs
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.portal import PortalCall, whole
from asyncpipe.runtime.step_driver import DrivenStep
from asyncpipe.runtime.waits import Waiting

__all__ = ["PreparedStep", "StepHere", "StepProtocol"]

_Execution = TypeVar("_Execution", bound=DrivenStep)
_Result = TypeVar("_Result")


class StepProtocol(ABC, Generic[_Execution, _Result]):
    """How every step runs: begin, run its graph, then finish or, after any exception, abandon.

    A subclass prepares the step in its constructor: it checks and cuts the mini-batch, and changes nothing yet. Then
    either ``run`` is called once, or ``start``, behind the steps of a line, and later ``finish`` or ``abandon``.
    """

    def __init__(self, parts: PipelineParts, tenancy: Tenancy, graph: TaskGraph) -> None:
        self.parts = parts
        self.tenancy = tenancy
        self.graph = graph

    def run(self) -> Waiting[_Result]:
        """Run the step on the pool's loop, for both kinds of callers. It follows no other: its ``Line`` is its own."""
        with self._abandoned_on_error():
            self._begin()
            execution = yield from whole(self._submit(Line()))
            return (yield from self.finish(execution))

    def start(self, line: Line[_Execution]) -> PortalCall[_Execution]:
        """Begin it behind the last step of ``line``.

        It leaves gradients alone: the ``StepRun`` that has the line sets them aside and restores them.
        """
        with self._abandoned_on_error():
            self._begin(in_line=True)
            return self._submit(line)

    def finish(self, execution: _Execution) -> Waiting[_Result]:
        """Return the result. Call it when the last task is issued. If it raises, the caller must call ``abandon``."""
        try:
            yield from self._until_read()
            return self._finish(execution)
        except RuntimeError as error:
            if is_device_error(error):
                # A kernel failed after it was queued. ``completed()`` raises the error that names its task.
                yield from self.tenancy.pool.on_loop(execution.completed())
            raise

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        # On the caller's thread: a cancellation may come when the devices are done and the caller does not know it yet.
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    @abstractmethod
    def _begin(self, *, in_line: bool = False) -> None:
        """Make ready what the step changes."""

    @abstractmethod
    def _submit(self, line: Line[_Execution]) -> PortalCall[_Execution]:
        """Have it begin on the pool's loop."""

    def _until_read(self) -> Waiting[None]:
        """Wait until the caller may overwrite the mini-batch. Here nothing is to be waited for."""
        yield from ()

    @abstractmethod
    def _finish(self, execution: _Execution) -> _Result:
        """The result of a step whose last task is issued."""

    @abstractmethod
    def abandon(self) -> None:
        """Undo what it did, and drop its tensors. Call it only when no device works on the step any more."""


class StepHere(StepProtocol[Execution, _Result]):
    """A step whose stages are in this process.

    Its lanes wait for what the caller has queued; afterwards the caller's streams wait for the lanes.
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
        super().__init__(parts, tenancy, graph)
        self._plan = plan
        self._tensors = tensors
        tensors.items = plan.items
        self._context = context
        self._fence = Fence(parts.resources.streams.values(), tensors.given())
        self._binder = Binder(graph, plan, tensors, parts.resources, context, crossings)
        self._inflow = Inflow({}, {})

    def _submit(self, line: Line[Execution]) -> PortalCall[Execution]:
        return self.tenancy.start(self.graph, self._binder, line)

    def _until_read(self) -> Waiting[None]:
        if not self._inflow.is_read:
            # Hazard: the caller overwrites pinned memory that copies still read. (All else has been read.)
            yield from self.tenancy.pool.on_loop(asyncio.to_thread(self._inflow.wait))

    def abandon(self) -> None:
        self._inflow.close()
        self.parts.discard_statistics()
        self._tensors.close()
        # The device comes last: if it has failed, every call fails, and the error that is raised already says more.
        with suppress(Exception):
            self._fence.end()


class PreparedStep(StepHere[StepResult]):
    """A mini-batch that is checked and cut, for one step with a loss, or for forwards only in evaluation mode."""

    def __init__(
        self,
        parts: PipelineParts,
        inputs: StepInputs,
        tenancy: Tenancy,
        graph: TaskGraph | None = None,
        tensors: StepTensors | None = None,
        crossings: Crossings | None = None,
    ) -> None:
        """Changes nothing yet.

        In a worker, ``graph`` is that worker's part of the step, and ``crossings`` puts what arrives into ``tensors``.
        """
        # Without the mini-batch: each micro-batch is dropped when its last reader has taken it.
        self.inputs = inputs.emptied()
        self._has_set_gradients_aside = False
        self._in_line = False
        self._is_part = crossings is not None
        tensors = tensors or StepTensors.of(inputs.batch.takes, inputs.batch.targets)
        plan = replace(inputs.plan, loss=parts.options.loss_fn if inputs.has_loss else None)
        super().__init__(parts, tenancy, graph or inputs.graph(parts), plan, tensors, inputs.context, crossings)
        self._binder.notes.size = inputs.size(parts)

    @property
    def _guards_gradients(self) -> bool:
        """Whether the step itself sets gradients aside; one in a line leaves that to its ``StepRun``."""
        return self.inputs.training and not self._in_line

    def _begin(self, *, in_line: bool = False) -> None:
        self._in_line = in_line
        resources = self.parts.resources
        if self._guards_gradients:
            resources.guard.enter(owner=self, member=self)
        if not in_line:  # Otherwise an earlier step may be updating the parameters.
            resources.begin_replicas()
        resources.ties.refresh()
        self._inflow = self._binder.begin(self._fence.begin())
        if self._guards_gradients:
            self._has_set_gradients_aside = True
            resources.guard.begin(self.parts.module.parameters())

    def _finish(self, execution: Execution) -> StepResult:
        losses = [loss for _, loss in sorted(self._tensors.losses.items())]
        outputs = [packet.rebuild(packet.tensors) for _, packet in sorted(self._tensors.outputs.items())]
        norms = self._tensors.gradient_norms
        results = tensors_of([losses, list(self._tensors.counts.values()), outputs, list(norms.values())])
        self._fence.end(results, self._binder.last.values())
        with torch.no_grad():
            loss = self.inputs.mean_loss(self.parts, losses, self._tensors)
            gathered = self.inputs.gather(outputs)
            self.parts.loss_watch.saw(loss)
            norms = self.parts.joined_norms(norms)
        rate = next(iter(self._tensors.rates), None)
        if not self._is_part:
            self._binder.notes.gradient_norm = norms.get(WHOLE_STEP)
        self._commit()
        return StepResult(loss, tuple(losses), gathered, execution, self.tenancy.pool.portal, norms, rate)

    def abandon(self) -> None:
        resources = self.parts.resources
        resources.undo.fail(self._tensors)
        if self._has_set_gradients_aside:
            resources.guard.roll_back()
            resources.ties.drop_gradients()
        super().abandon()
        if not self._in_line:
            resources.undo.close()
        resources.guard.leave(self)

    def _commit(self) -> None:
        """Keep what the step has left in gradients and buffers."""
        if self._guards_gradients:
            with torch.no_grad():
                # Parameters that were updated inside the step have no gradient any more. A has divided by the counts of
                # all replicas, of which a worker knows only some.
                if not self.parts.resources.sums:
                    normalize(self.parts.module.parameters(), self._tensors)
                self.parts.resources.guard.commit()
            self._has_set_gradients_aside = False
            self.parts.resources.guard.leave(self)
        self.parts.resources.undo.keep(self._tensors)
        self.parts.resources.ties.twins.updated()
        self.parts.commit_statistics()
        self._tensors.close()
