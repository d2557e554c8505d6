"""``y = pipe(x)``: a forward whose loss and backward belong to the caller. The walk:

1. ``PreparedCall`` checks and cuts the arguments. The forward graph runs while the caller's thread blocks.
2. The outputs become part of the caller's autograd graph, behind an entry node and one exit node per micro-batch
   (``ops/autograd/caller_graph.py``).
3. ``loss.backward()`` reaches the last exit: ``CallBackward.release`` starts the backward graph, in which the backwards
   of each micro-batch wait at a gate, and opens the first gate. The other exits open theirs.
4. The autograd engine reaches the entry: ``CallBackward.finish`` waits and returns the gradients.

Passes of the engine on several threads take turns (``ops/execute/gradient_turn.py``). One that has to wait keeps what
its exits bring, and starts its backward graph in ``finish``, which may block.

Everything here runs on the caller's thread, except ``release``, which runs on a thread of the autograd engine if the
outputs are on CUDA.
"""

from __future__ import annotations

import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.errors import BackwardError, OptionError, PipelineClosedError, RecomputeError
from asyncpipe.ops.autograd.bare_thread import bare_thread
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.caller_graph import attach
from asyncpipe.ops.autograd.checkpoint import is_recomputing
from asyncpipe.ops.autograd.random_streams import draw_step_seed, turns_paused
from asyncpipe.ops.device.device_errors import is_device_error
from asyncpipe.ops.device.streams import Fence, begin_behind
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.ops.execute.caller_gradients import CallerGradients
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.microbatch import Arguments, Microbatches, Packet, cut, gather, has_loss, keywords
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.ops.model.stage import CALLER
from asyncpipe.ops.model.ties import Ties
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.step import StepProtocol, loss_weights
from asyncpipe.runtime.execution import Bind, Execution, Gates
from asyncpipe.runtime.inline import run_inline
from asyncpipe.runtime.portal import Portal, PortalCall
from asyncpipe.runtime.task_threads import inside_task

__all__ = ["CallBackward", "PreparedCall", "call"]

_CLOSED = "the pipeline is closed, and with it the backward of its outputs"


def call(parts: PipelineParts, tenancy: Tenancy, arguments: Arguments) -> Any:
    """The model's output for ``arguments``; blocks. ``Pipeline.__call__`` says the rest."""
    if inside_task():
        return _call_inside_task(parts, tenancy, arguments)
    tenancy.check_caller(blocking=True)
    with tenancy.blocking_turn:
        tenancy.check()
        _portal(tenancy)
        return PreparedCall(parts, tenancy, arguments).run_blocking()


def _portal(tenancy: Tenancy) -> Portal:
    """The thread of the pipeline's loop. Raises ``PipelineClosedError`` if the loop has none of its own."""
    if tenancy.pool.portal is None:
        raise PipelineClosedError(
            "pipe(x) blocks its thread, which drives this pipeline's loop; open it with 'with pipe.sync()', or "
            "give it loop='own', or use 'await pipe.step(x, target)'"
        )
    return tenancy.pool.portal


def _call_inside_task(parts: PipelineParts, tenancy: Tenancy, arguments: Arguments) -> Any:
    """As ``call``, on the calling thread alone (``runtime/inline.py``).

    It takes no turn: a step that holds one may wait for this thread. It is part of a step under way, so it also runs
    when closing has begun, which waits for that step.
    """
    if not tenancy.is_up:
        tenancy.check()
    if parts.deferred and parts.module.training:
        raise OptionError(
            "deferred batch norms gather statistics until the end of a step, and a call inside a task has no step of "
            "its own; call eval() before, or leave deferred_batch_norm out"
        )
    if not is_recomputing():
        return PreparedCall(parts, tenancy, arguments).run_inline()
    before = [(buffer, buffer._version) for buffer in parts.module.buffers()]
    output = PreparedCall(parts, tenancy, arguments).run_inline()
    now = list(parts.module.buffers())
    if len(now) != len(before) or any(b is not n or b._version != v for (b, v), n in zip(before, now, strict=True)):
        raise RecomputeError(
            "a recomputation called a pipeline that changes its buffers (running statistics?), which the forward had "
            "changed already; call eval() on that pipeline, or use checkpoint='never' for the one that calls"
        )
    return output


class PreparedCall(StepProtocol[Any]):
    """The arguments of a ``pipe(x)``, checked and cut, for a forward and later a backward."""

    def __init__(self, parts: PipelineParts, tenancy: Tenancy, arguments: Arguments) -> None:
        options = parts.options
        context = CallerContext.capture()
        batch: Any = arguments
        if len(arguments.args) == 1 and not arguments.kwargs and isinstance(arguments.args[0], Microbatches | UserDict):
            batch = keywords(arguments.args[0])
        made = cut(batch, options.microbatches, dim=options.batch_dim)
        self._ready_made = made.ready_made
        pieces = [Arguments.wrap(piece) for piece in made.pieces]
        takes = [parts.takes(piece) for piece in pieces]
        self.parameters = [parameter for parameter in parts.module.parameters() if parameter.requires_grad]
        """The parameters that gradients go to."""
        self.guard = parts.resources.guard if self.parameters else GradientGuard()
        """Keeps the gradients of backwards apart. Those of a frozen pipeline have none to keep from each other."""
        inputs = tensors_of(pieces)
        recording = context.grad and not context.inference
        self._training = recording and (bool(self.parameters) or any(tensor.requires_grad for tensor in inputs))
        plan = StepPlan(
            loss=None,
            weights=loss_weights(made.sizes, options.loss_reduction == "mean"),
            scale=None,
            # Inside a task, a recomputation calls again, and must draw the same: from the task's own random stream.
            seed=draw_step_seed(None if inside_task() else options.generator),
            # Nothing is recomputed in evaluation mode, as in torchgpipe.
            checkpoint=parts.checkpoint if parts.module.training else CheckpointMode.NEVER,
            keep_outputs=True,
            training=self._training,
            whole_step=False,
        )
        self._inputs = CallerGradients(batch, pieces, takes, options.batch_dim) if self._training else None
        means = options.loss_reduction == "mean"
        self._is_padded_unevenly = means and parts.padded_labels.are_uneven(pieces, made.sizes)
        graph = parts.graphs(len(pieces), Phase.FORWARD, plan.checkpoint, False)
        super().__init__(parts, tenancy, graph, plan, StepTensors.of(takes), context)

    def run_inline(self) -> Any:
        """Run the forwards on the calling thread, inside the task that called."""
        with self._begun():
            with bare_thread():
                run_inline(self._graph, self._binder.bind)
            return self._finish(None)

    def _begin(self) -> None:
        self.parts.resources.ties.refresh()
        if not inside_task():
            # The tasks of an abandoned backward may wait for the one that called.
            self.parts.resources.guard.wait_for_abandoned()
        self._tensors.caller_ready = self._fence.begin()

    def _finish(self, execution: Execution | None) -> Any:
        """The outputs, as part of the caller's graph; gathered unless the caller made the micro-batches."""
        packets = [packet for _, packet in sorted(self._tensors.outputs.items())]
        self._tensors.outputs.clear()
        # The outputs keep this object alive, which must not keep the forward's binder.
        del self._binder
        self._fence.end(tensor for packet in packets for tensor in packet.tensors)
        self.parts.commit_statistics()
        if self._training:
            # Fixed now: the schedule may have changed when the caller runs the backward.
            shape, checkpoint = self._graph.shape, self._plan.checkpoint
            self._backward_graph = self.parts.graphs(shape.microbatches, Phase.BACKWARD, checkpoint, False)
            self._attach(packets, CallBackward(self, self._tensors))
        outputs = [packet.rebuild(packet.tensors) for packet in packets]
        if self._is_padded_unevenly and has_loss(outputs[0]):
            self.parts.padded_labels.warn()
        return outputs if self._ready_made else gather(outputs, self.parts.options.batch_dim, self._plan.weights)

    def _attach(self, packets: Sequence[Packet], backward: CallBackward) -> None:
        assert self._inputs is not None
        ends = [*map(_alias_of_leaf, self._inputs.ends), *self._aliases()]
        outputs = [
            [t.requires_grad_(wants) for t, wants in zip(packet.tensors, packet.wants_gradient, strict=True)]
            for packet in packets
        ]
        for packet, attached in zip(packets, attach(backward, ends, outputs), strict=True):
            packet.tensors = attached

    def _aliases(self) -> Iterator[Tensor]:
        """The parameters, for the caller's graph; aliases of those on an accelerator.

        autograd accumulates a gradient on the stream that was current when the parameter's node was made, and has one
        such node as long as a graph with the parameter lives. Hazard: on a stream of the caller's, the backwards of the
        lanes would wait there for whatever the caller has queued, and autograd warns of that. So the node is made on
        the stream of the parameter's lane, and the gradient gets there by a node of the same stream.
        """
        resources = self.parts.resources
        lanes = {
            id(parameter): resources.streams[Lane(stage.device.name, Queue.COMPUTE)]
            for stage in reversed(resources.stages)
            if stage.device.is_accelerator
            for parameter in stage.module.parameters()
        }
        for parameter in self.parameters:
            with lanes[id(parameter)].use() if id(parameter) in lanes else nullcontext():
                yield _alias_of_leaf(parameter)

    def start_backward(self, gates: Gates) -> PortalCall[Execution] | _InlineBackward:
        """Submit the backward graph, on the forward's tensors and in its context, to the pipeline's loop.

        Inside a task it runs there instead, when it is waited for.
        """
        graph = self._backward_graph
        binder = Binder(graph, self._plan, self._tensors, self.parts.resources, self._context)
        if inside_task():
            return _InlineBackward(graph, binder.bind)
        return self.portal.submit(self.tenancy.step(graph, binder.bind, binder.notes, gates))

    @property
    def portal(self) -> Portal:
        """The thread of the pipeline's loop."""
        return _portal(self.tenancy)

    @property
    def microbatches(self) -> int:
        """How many micro-batches there are."""
        return self._graph.shape.microbatches

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the caller's tensors, in the order of ``CallerGradients.ends``."""
        assert self._inputs is not None
        return self._inputs.collect(self._tensors.gradients)


class CallBackward:
    """The backward of one ``pipe(x)``: a graph behind gates that the exits open, and an entry that waits for it.

    It keeps the pipeline's threads alive as long as an output may still be differentiated, and no longer: autograd
    nodes hold this object, and the cycle collector does not see them. If the engine stops on the way, because another
    node of the caller's graph raised, the backward is cancelled.
    """

    def __init__(self, call: PreparedCall, tensors: StepTensors) -> None:
        self._call: PreparedCall | None = call
        self._tensors = tensors
        self._passes: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()
        """By the engine's number for a pass. With ``retain_graph`` several may be under way, on several threads."""

    def release(self, microbatch: int, gradients: Sequence[Tensor | None], *, retain: bool) -> None:
        """Take the caller's gradients of a micro-batch for the last stage, and open its gate."""
        number = torch._C._current_graph_task_id()
        running = self._passes.get(number) or self._start(number, retain)
        with running.abandoned_on_error():
            running.give(microbatch, gradients)

    def finish(self) -> list[Tensor | None]:
        """Wait until the last backward is issued; the gradients of the inputs, then of the parameters."""
        running = self._passes.pop(torch._C._current_graph_task_id(), None)
        if running is None:
            raise BackwardError("the backward of a pipeline reached its inputs without passing its outputs")
        with running.abandoned_on_error(), turns_paused():
            taken = running.wait()
        running.hand_over([*taken.values(), *chain.from_iterable(self._tensors.gradients.values())])
        inputs = running.call.input_gradients()
        _clear(self._tensors)
        return [*inputs, *[taken.pop(id(parameter), None) for parameter in running.call.parameters]]

    def _start(self, number: int, retain: bool) -> _BackwardPass:
        if self._call is None:
            raise BackwardError(
                "a second backward through the same pipe(x): its activations are gone; give the first one "
                "retain_graph=True, or call the pipeline again"
            )
        self._passes[number] = running = _BackwardPass(self._call, self._tensors, number, retain)
        if not retain:
            self._call = None
        return running


class _InlineBackward:
    """A backward graph inside the task that asks for it, in place of a ``PortalCall``.

    It begins when it is waited for: then the gradients are there for which the gates wait elsewhere.
    """

    def __init__(self, graph: TaskGraph, bind: Bind) -> None:
        self._run: Callable[[], None] | None = partial(run_inline, graph, bind)
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


class _BackwardPass:
    """A backward graph under way, for one pass of the autograd engine::

        waiting ──(the pipeline's turn)──▶ begun ──▶ ended ──(the pass is over)──▶ left

    Only the engine keeps it alive, as a callback for the end of the pass. If the engine stops before it reaches the
    entry, it drops the callback, and this object's finalizers abandon the backward and leave the turn. Nothing else
    tells of that.
    """

    def __init__(self, call: PreparedCall, tensors: StepTensors, number: int, retain: bool) -> None:
        self.call = call
        self._check_open()
        self._tensors = tensors
        self._number = number
        self._retain = retain
        self._given: list[tuple[int, Sequence[Tensor | None], torch.Event | None]] = []
        """What the exits have brought while it waits: micro-batch, gradients, and when these may be read."""
        self._closed = set(range(call.microbatches))
        self._has_begun = False
        self._failure: RuntimeError | None = None
        """What the device raised when the caller's gradients were taken."""
        self._guard = call.guard
        self._member = object()
        # Finalizers run from the last to the first: what is abandoned is known to the guard before the turn is left.
        self._leave = weakref.finalize(self, self._guard.leave, self._member)
        self._leave.atexit = False
        self._abandon: weakref.finalize[..., _BackwardPass] | None = None
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """The engine's pass is over."""
        self._leave()

    def _begin(self) -> None:
        """Start the backward graph, now that the pipeline's gradients are those of this pass."""
        self._has_begun = True
        self._check_open()
        resources = self.call.parts.resources
        self._tensors.retain = self._retain
        self._gates = Gates()
        # Perhaps on a thread of the autograd engine, whose current streams are not the caller's. Of these, all lanes
        # wait for what led to the first gradients.
        begin_behind(resources.streams.values(), [event for *_, event in self._given if event is not None])
        try:
            self._guard.begin(self.call.parameters)
            self._execution = self.call.start_backward(self._gates)
        except BaseException:
            self._guard.roll_back()
            raise
        self._undo = partial(_undo, resources.ties, self._tensors)
        thread = None if any(stage.device.is_accelerator for stage in resources.stages) else threading.get_ident()
        self._abandon = weakref.finalize(
            self, _abandon, self._execution, self._guard, self._undo, self.call.tenancy, thread
        )
        self._abandon.atexit = False

    def _check_open(self) -> None:
        tenancy = self.call.tenancy
        if not inside_task():
            tenancy.check_caller(blocking=True)
        # The driver of a shared pool would still run the graph.
        if not (tenancy.is_up if inside_task() else tenancy.is_open):
            raise PipelineClosedError(_CLOSED)

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
        if not self._has_begun and self._guard.enter_at_once(self._number, self._member, inside_task=inside_task()):
            self._begin()
        if self._has_begun:
            self._open_given()

    def _open_given(self) -> None:
        last = len(self.call.parts.resources.stages) - 1
        given, self._given = self._given, []
        for microbatch, gradients, event in given:
            self._tensors.gradients[microbatch, CALLER, last] = list(gradients)
            if event is not None:
                self._tensors.gradients_ready[microbatch] = event
            # The exits run from the last micro-batch to the first. One that was passed over has no gradient.
            self._open([i for i in sorted(self._closed, reverse=True) if i >= microbatch])

    def _open(self, microbatches: Sequence[int]) -> None:
        """Open the gates of these micro-batches, in this order."""
        self.call.tenancy.check_process()
        self._closed.difference_update(microbatches)
        if isinstance(self._execution, _InlineBackward):
            return
        try:
            self._gates.open(microbatches, self.call.portal.loop)
        except RuntimeError as error:
            raise PipelineClosedError(_CLOSED) from error

    def hand_over(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the caller's streams read ``gradients``, which the lanes have made; after ``wait``."""
        self._fence.hand_over(gradient for gradient in gradients if gradient is not None)

    def wait(self) -> dict[int, Tensor | None]:
        """The new gradients by ``id`` of the parameter, once the last backward is issued. Raises if a task failed.

        They may be read on the streams that are current here, on the thread that called ``backward``: the engine takes
        them for made there, since the entry is on the CPU, and lets other streams wait for these.
        """
        self.call.tenancy.check_process()
        if not self._has_begun:
            self._guard.enter(self._number, self._member, inside_task=inside_task())
            self._begin()
            self._open_given()
        # With all gates open the backward may have ended, and the pipeline may be closed.
        if self._closed:
            self._open(sorted(self._closed, reverse=True))
        assert self._abandon is not None
        self._abandon.detach()
        self._fence = Fence(self.call.parts.resources.streams.values())
        # Removed from this object: the error holds this frame, and the call must not hold the error through it.
        execution = self.__dict__.pop("_execution")
        try:
            self._end(execution.wait())
        except BaseException:
            execution.end()
            self._undo()
            self._guard.roll_back()
            # The device comes last: if it has failed, every call fails, and the error says already why.
            with suppress(Exception):
                self._fence.end()
            raise
        finally:
            del execution
        return self._guard.take()

    def _end(self, execution: Execution | None) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._fence.end()
        except RuntimeError as error:
            if execution is not None and is_device_error(error):
                # One of the kernels failed after it was queued: the error of its task says which.
                self.call.portal.call(execution.completed())
            raise


def _abandon(
    execution: PortalCall[Execution] | _InlineBackward,
    guard: GradientGuard,
    undo: Callable[[], None],
    tenancy: Tenancy,
    thread: int | None,
) -> None:
    """End a backward whose result nobody will take, and undo what it did once its tasks have ended.

    On ``thread``, the one that called ``backward``, this waits for the end, so that the caller finds the gradients as
    they were. A thread of the autograd engine must not wait: on CUDA, tasks may need it in order to end. In a forked
    child there is nothing to end.
    """
    if not tenancy.pool.process.is_this:
        return
    guard.abandon()
    if threading.get_ident() == thread:
        execution.end()
        _undo_abandoned(guard, undo, tenancy)
    else:
        execution.future.add_done_callback(partial(_undo_abandoned, guard, undo, tenancy))
        if not execution.future.done():
            execution.cancel()


def _undo_abandoned(guard: GradientGuard, undo: Callable[[], None], tenancy: Tenancy, _: object = None) -> None:
    """Called when the tasks of an abandoned backward have ended. Holding ``tenancy`` kept their threads alive."""
    undo()
    guard.end_abandoned()


def _undo(ties: Ties, tensors: StepTensors) -> None:
    """Drop the gradients that a failed backward leaves at replicas and in the tables."""
    ties.drop_gradients()
    _clear(tensors)


def _clear(tensors: StepTensors) -> None:
    """Empty the tables, except for what another backward needs."""
    if tensors.retain:
        tensors.gradients.clear()
        tensors.gradients_ready.clear()
        tensors.tied_gradients.clear()
    else:
        tensors.close()


def _alias_of_leaf(tensor: Tensor) -> Tensor:
    """``tensor`` behind a node on the current stream, if it is a leaf on an accelerator (see ``_aliases``)."""
    return tensor if tensor.is_cpu or not tensor.is_leaf else tensor.view_as(tensor)


def _arrival(gradients: Sequence[Tensor | None]) -> torch.Event | None:
    """An event behind what the current stream has queued for ``gradients``; ``None`` if they are on a CPU."""
    device = next((gradient.device for gradient in gradients if gradient is not None and not gradient.is_cpu), None)
    if device is None:
        return None
    module = torch.get_device_module(device)
    event: torch.Event = module.Event(blocking=True)
    event.record(module.current_stream(device))
    return event
