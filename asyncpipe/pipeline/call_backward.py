"""The backward of ``y = pipe(x)``, driven by the caller's autograd engine through the nodes that ``call.py`` added.

``loss.backward()`` reaches the exit nodes from the last micro-batch to the first, then the entry node
(``ops/autograd/caller_graph.py``)::

    exit m-1 ... 0 ──▶ CallBackward.release: opens the gate of the micro-batch; the first one begins the graph
    entry          ──▶ CallBackward.finish:  waits for the graph; the gradients of inputs and parameters

The backwards of a micro-batch wait at its gate for the gradients that its exit brings. Passes of the engine on several
threads take turns (``ops/execute/gradient_turn.py``): one that has to wait keeps what its exits bring, and begins its
graph in ``finish``, which may block.

``release`` runs on a thread of the engine if the outputs are on CUDA, and everything else on the thread that called
``backward``. An engine that stops half-way tells nobody: it drops what it holds, and the pass is abandoned by that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import BackwardError, PipelineClosedError
from asyncpipe.ops.autograd.bare_thread import bare_thread
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.random_streams import turns_paused
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.device.streams import Fence, begin_behind, record
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.ops.execute.caller_gradients import CallerGradients
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.stage import CALLER
from asyncpipe.ops.torch_internals import pass_number, queue_callback, version_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.runtime.execution import Execution, Gates
from asyncpipe.runtime.inline import run_inline
from asyncpipe.runtime.line import Line
from asyncpipe.runtime.portal import PortalCall
from asyncpipe.runtime.task_threads import inside_task

__all__ = ["CallBackward", "RecordedCall"]

_CLOSED = "the pipeline is closed, and with it the backward of its outputs"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """What the forward of a ``pipe(x)`` leaves for its backward, and how one is started, abandoned and undone."""

    parts: PipelineParts
    tenancy: Tenancy
    graph: TaskGraph
    """That of the backward, fixed at the forward: the schedule may have changed when the caller runs it."""
    plan: StepPlan
    tensors: StepTensors
    context: CallerContext
    inputs: CallerGradients
    parameters: Sequence[nn.Parameter]
    """The parameters that gradients go to."""
    needed: Sequence[tuple[Tensor, int]]
    """What must not be overwritten before the backward, and its version."""
    guard: GradientGuard

    def check_unchanged(self) -> None:
        """Raise ``BackwardError`` if something that the backward needs was overwritten."""
        for tensor, version in self.needed:
            if version_of(tensor) != version:
                what = "parameter" if any(tensor is each for each in self.parameters) else "tensor given to pipe(x)"
                raise BackwardError(
                    f"a {what}, of shape {tuple(tensor.shape)}, was overwritten in place between pipe(x) and its "
                    "backward, which needs the old values; call backward first, or clone the tensor before the change"
                )

    def start(self, gates: Gates) -> PortalCall[Execution] | _InlineBackward:
        """Submit the backward graph to the pipeline's loop; inside a task, keep it for the thread that waits for it."""
        binder = Binder(self.graph, self.plan, self.tensors, self.parts.resources, self.context)
        if inside_task():
            return _InlineBackward(self.graph, binder)
        return self.tenancy.start(self.graph, binder, Line(), gates)

    def abandon(self, execution: PortalCall[Execution] | _InlineBackward, thread: int | None) -> None:
        """End a backward whose result nobody will take, and undo what it did once its tasks have ended.

        On ``thread``, the one that called ``backward``, this waits for the end, so that the caller finds the gradients
        as they were. A thread of the autograd engine must not wait: on CUDA, tasks may need it in order to end. In a
        forked child there is nothing to end.
        """
        if not self.tenancy.pool.process.is_this:
            return
        self.guard.abandon()
        if threading.get_ident() == thread:
            execution.end()
            self._undo_abandoned()
        else:
            # Meanwhile this object keeps the threads of the tasks alive.
            execution.future.add_done_callback(self._undo_abandoned)
            if not execution.future.done():
                execution.cancel()

    def _undo_abandoned(self, _: object = None) -> None:
        self.drop_gradients()
        self.guard.end_abandoned()

    def drop_gradients(self) -> None:
        """Drop the gradients that a failed backward leaves at replicas and in the tables."""
        self.parts.resources.ties.drop_gradients()
        self.clear()

    def clear(self) -> None:
        """Empty the tables, except for what another backward needs."""
        tables = self.tensors
        if tables.retain:
            tables.gradients.clear()
            tables.gradients_ready.clear()
            tables.tied_gradients.clear()
        else:
            tables.close()


class _InlineBackward:
    """A backward graph inside the task that asks for it, in place of a ``PortalCall``.

    It begins when it is waited for: then the gradients are there for which the gates wait elsewhere.
    """

    def __init__(self, graph: TaskGraph, binder: Binder) -> None:
        self._run: Callable[[], None] | None = partial(run_inline, graph, binder.bind, binder.around)
        self.future: Future[None] = Future()
        self.future.set_result(None)

    def wait(self) -> None:
        """Run it."""
        assert self._run is not None
        with bare_thread():
            self._run()

    def end(self) -> None:
        """Drop it."""
        self._run = None

    cancel = end


class CallBackward:
    """The backward of one ``pipe(x)``: what the exits and the entry call.

    It keeps the pipeline's threads alive as long as an output may still be differentiated, and no longer: autograd
    nodes hold this object, and the cycle collector does not see them.
    """

    def __init__(self, forward: RecordedCall) -> None:
        self._forward: RecordedCall | None = forward
        self._passes: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()
        """By the engine's number for a pass. With ``retain_graph`` several may be under way, on several threads."""

    def release(self, microbatch: int, gradients: Sequence[Tensor | None], *, retain: bool) -> None:
        """Take the caller's gradients of a micro-batch for the last stage, and open its gate."""
        number = pass_number()
        running = self._passes.get(number) or self._start(number, retain)
        with running.abandoned_on_error():
            running.give(microbatch, gradients)

    def finish(self) -> list[Tensor | None]:
        """Wait until the last backward is issued; the gradients of the inputs, then of the parameters."""
        running = self._passes.pop(pass_number(), None)
        if running is None:
            raise BackwardError("the backward of a pipeline reached its inputs without passing its outputs")
        with running.abandoned_on_error(), turns_paused():
            taken = running.wait()
        return running.hand_over(taken)

    def _start(self, number: int, retain: bool) -> _BackwardPass:
        if self._forward is None:
            raise BackwardError(
                "a second backward through the same pipe(x): its activations are gone; give the first one "
                "retain_graph=True, or call the pipeline again"
            )
        self._passes[number] = running = _BackwardPass(self._forward, number, retain)
        if not retain:
            self._forward = None
        return running


class _BackwardPass:
    """A backward graph under way, for one pass of the autograd engine::

        waiting ──(the pipeline's turn)──▶ begun ──▶ ended ──(the pass is over)──▶ left

    Only the engine keeps it alive, as a callback for the end of the pass. If the engine stops before it reaches the
    entry, because another node of the caller's graph raised, it drops the callback, and this object's finalizers
    abandon the backward and leave the turn.
    """

    def __init__(self, forward: RecordedCall, number: int, retain: bool) -> None:
        self._forward = forward
        self._check_open()
        self._number, self._retain = number, retain
        self._given: list[tuple[int, Sequence[Tensor | None], torch.Event | None]] = []
        """What the exits have brought while it waits: micro-batch, gradients, and when these may be read."""
        self._closed_gates = set(range(forward.graph.shape.microbatches))
        self._has_begun = False
        self._failure: RuntimeError | None = None
        """What the device raised when the caller's gradients were taken."""
        self._member = object()
        # Finalizers run from the last to the first: what is abandoned is known to the guard before the turn is left.
        self._leave = weakref.finalize(self, forward.guard.leave, self._member)
        self._leave.atexit = False
        self._abandon: weakref.finalize[..., _BackwardPass] | None = None
        queue_callback(self)

    def __call__(self) -> None:
        """The engine's pass is over."""
        self._leave()

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Abandon the backward at once on an error (Ctrl-C), whose traceback would keep this object alive longer."""
        try:
            yield
        except BaseException:
            if self._abandon is not None:
                self._abandon()
            self._leave()
            raise

    def give(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Start the backward of ``microbatch`` from ``gradients``, now or when it is this pass's turn."""
        event = None
        try:
            event = _arrival(gradients)
        except RuntimeError as error:
            if not is_device_error(error):
                raise
            # Perhaps a task of this backward has broken the device: its error says more, and ``wait`` raises it.
            self._failure = self._failure or error
        self._given.append((microbatch, gradients, event))
        # Never waits: on a thread of the engine, every other backward on its device would stop.
        enter = self._forward.guard.enter_at_once
        if not self._has_begun and enter(self._number, self._member, inside_task=inside_task()):
            self._begin()
        if self._has_begun:
            self._open_given()

    def wait(self) -> dict[int, Tensor | None]:
        """The new gradients by ``id`` of the parameter, once the last backward is issued. Raises if a task failed.

        They may be read on the streams that are current here, on the thread that called ``backward``: the engine takes
        them for made there, since the entry is on the CPU, and lets other streams wait for these.
        """
        forward = self._forward
        forward.tenancy.check_process()
        if not self._has_begun:
            forward.guard.enter(self._number, self._member, inside_task=inside_task())
            self._begin()
            self._open_given()
        # With all gates open the backward may have ended, and the pipeline may be closed.
        if self._closed_gates:
            self._open(sorted(self._closed_gates, reverse=True))
        assert self._abandon is not None
        self._abandon.detach()
        self._fence = Fence(forward.parts.resources.streams.values())
        # Removed from this object: the error holds this frame, and the call must not hold the error through it.
        execution = self.__dict__.pop("_execution")
        try:
            self._end(execution.wait())
        except BaseException:
            execution.end()
            forward.drop_gradients()
            forward.guard.roll_back()
            # The device comes last: if it has failed, every call fails, and the error says already why.
            with suppress(Exception):
                self._fence.end()
            raise
        finally:
            del execution
        return forward.guard.pop_gradients()

    def hand_over(self, taken: dict[int, Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, then those of the parameters, which ``wait`` has ``taken``, for the caller."""
        forward, tables = self._forward, self._forward.tensors
        made = chain(taken.values(), *tables.gradients.values())
        self._fence.hand_over(gradient for gradient in made if gradient is not None)
        inputs = forward.inputs.collect(tables.gradients)
        forward.clear()
        return [*inputs, *[taken.pop(id(parameter), None) for parameter in forward.parameters]]

    def _check_open(self) -> None:
        tenancy = self._forward.tenancy
        if not inside_task():
            tenancy.check_caller(blocking=True)
        # The driver of a shared pool would still run the graph.
        if not (tenancy.is_up if inside_task() else tenancy.is_open):
            raise PipelineClosedError(_CLOSED)

    def _begin(self) -> None:
        """Start the backward graph, now that the pipeline's gradients are those of this pass."""
        self._has_begun = True
        self._check_open()
        self._forward.check_unchanged()
        forward, resources = self._forward, self._forward.parts.resources
        forward.tensors.retain = self._retain
        self._gates = Gates()
        # Perhaps on a thread of the autograd engine, whose current streams are not the caller's. Of these, all lanes
        # wait for what led to the first gradients.
        begin_behind(resources.streams.values(), [event for *_, event in self._given if event is not None])
        try:
            forward.guard.begin(forward.parameters)
            self._execution = forward.start(self._gates)
        except BaseException:
            forward.guard.roll_back()
            raise
        thread = None if any(stage.device.is_accelerator for stage in resources.stages) else threading.get_ident()
        self._abandon = weakref.finalize(self, forward.abandon, self._execution, thread)
        self._abandon.atexit = False

    def _open_given(self) -> None:
        tables, rows = self._forward.tensors, self._forward.graph.rows
        given, self._given = self._given, []
        for microbatch, gradients, event in given:
            tables.gradients[microbatch, CALLER, rows.last_stage(microbatch)] = list(gradients)
            if event is not None:
                tables.gradients_ready[microbatch] = event
            # The exits run from the last micro-batch to the first. One that was passed over has no gradient.
            self._open([i for i in sorted(self._closed_gates, reverse=True) if i >= microbatch])

    def _open(self, microbatches: Sequence[int]) -> None:
        """Open the gates of these micro-batches, in this order."""
        tenancy = self._forward.tenancy
        tenancy.check_process()
        self._closed_gates.difference_update(microbatches)
        if isinstance(self._execution, _InlineBackward):
            return
        if tenancy.pool.portal.loop.is_closed():
            raise PipelineClosedError(_CLOSED)
        self._gates.open(microbatches)

    def _end(self, execution: Execution | None) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._fence.end()
        except RuntimeError as error:
            if execution is not None and is_device_error(error):
                # One of the kernels failed after it was queued: the error of its task says which.
                self._forward.tenancy.pool.call(execution.completed())
            raise


def _arrival(gradients: Sequence[Tensor | None]) -> torch.Event | None:
    """An event behind what the current stream has queued for ``gradients``; ``None`` if they are on a CPU."""
    device = next((gradient.device for gradient in gradients if gradient is not None and not gradient.is_cpu), None)
    return None if device is None else record(torch.get_device_module(device).current_stream(device))
