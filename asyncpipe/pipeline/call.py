"""``y = pipe(x)``: a forward whose loss and backward are the caller's, walked.

1. ``PreparedCall`` checks and cuts the arguments; the forward graph runs; the caller's thread blocks meanwhile.
2. ``finish`` hangs the outputs on exits and an entry (``ops/autograd/caller_graph.py``), in the caller's graph.
3. ``loss.backward()`` reaches the last exit: ``CallBackward.release`` submits the backward graph, whose backwards
   wait at a gate for each micro-batch, and opens the first gate; the other exits open theirs.
4. The engine reaches the entry: ``CallBackward.finish`` waits, and returns the gradients.

Everything here runs on the caller's thread, but ``release``, which for outputs on CUDA runs on the engine's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.errors import BackwardError, PipelineClosedError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.caller_graph import attach
from asyncpipe.ops.autograd.random_streams import draw_step_seed
from asyncpipe.ops.device.streams import Fence
from asyncpipe.ops.execute.binder import Binder
from asyncpipe.ops.execute.caller_gradients import CallerGradients
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.microbatch import Arguments, Microbatches, Packet, cut, gather
from asyncpipe.ops.model.stage import CALLER
from asyncpipe.ops.model.ties import Ties
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.step import Machinery
from asyncpipe.runtime.execution import Execution, Gates
from asyncpipe.runtime.portal import Call

if TYPE_CHECKING:
    from asyncpipe.core.graph.task_graph import TaskGraph

__all__ = ["PreparedCall"]

_CLOSED = "the pipeline is closed, and with it the backward of its outputs"


class PreparedCall:
    """A forward that is checked and cut: ``begin``, run ``graph`` with ``bind``, then ``finish`` or ``abandon``."""

    def __init__(self, machinery: Machinery, arguments: Arguments) -> None:
        self._machinery = machinery
        self._context = context = CallerContext.capture()
        batch: Any = arguments
        if len(arguments.args) == 1 and not arguments.kwargs and isinstance(arguments.args[0], Microbatches):
            batch = arguments.args[0]
        made = cut(batch, machinery.microbatches, dim=machinery.batch_dim)
        self._ready_made = made.ready_made
        pieces = [Arguments.wrap(piece) for piece in made.pieces]
        takes = [machinery.takes(piece) for piece in pieces]
        self._parameters = [parameter for parameter in machinery.module.parameters() if parameter.requires_grad]
        inputs = [leaf for leaf in tree_leaves(pieces) if isinstance(leaf, Tensor)]
        recording = context.grad and not context.inference
        self._training = recording and (bool(self._parameters) or any(tensor.requires_grad for tensor in inputs))
        self._plan = StepPlan(
            loss=None,
            weights=(),
            scale=None,
            seed=draw_step_seed(machinery.generator),
            # Nothing is recomputed in evaluation mode, as the ancestors did it.
            checkpoint=machinery.checkpoint if machinery.module.training else CheckpointMode.NEVER,
            keep_outputs=True,
            training=self._training,
            whole_step=False,
        )
        self._inputs = CallerGradients(batch, pieces, takes, machinery.batch_dim) if self._training else None
        self.graph = machinery.graphs(len(pieces), Phase.FORWARD, self._plan.checkpoint, False)
        self._tensors = StepTensors.of(takes)
        self._fence = Fence(machinery.equipment.streams.values())
        binder = Binder(self.graph, self._plan, self._tensors, machinery.equipment, context)
        self.bind, self.notes = binder.bind, binder.notes

    def begin(self) -> None:
        """Order the lanes behind what the caller has queued."""
        self._machinery.equipment.ties.refresh()
        self._machinery.equipment.guard.settle()
        self._fence.begin()

    def finish(self, pipeline: object, tenancy: Tenancy) -> Any:
        """The outputs, as part of the caller's graph; gathered unless the micro-batches were ready-made."""
        packets = [packet for _, packet in sorted(self._tensors.outputs.items())]
        self._tensors.outputs.clear()
        # The outputs keep this object; the forward's binder is done.
        del self.bind
        self._fence.end(tensor for packet in packets for tensor in packet.tensors)
        self._machinery.commit_statistics()
        if self._training:
            means = _Means(self._backward_graph(), self, pipeline, tenancy)
            self._tie(packets, CallBackward(means, self._tensors))
        outputs = [packet.rebuild(packet.tensors) for packet in packets]
        return outputs if self._ready_made else gather(outputs, self._machinery.batch_dim)

    def abandon(self) -> None:
        """Drop the tensors of a forward that failed."""
        self._fence.end()
        self._machinery.discard_statistics()
        self._tensors.close()

    def _tie(self, packets: Sequence[Packet], backward: CallBackward) -> None:
        assert self._inputs is not None
        ends = [*self._inputs.ends, *self._parameters]
        outputs = [
            [t.requires_grad_(wants) for t, wants in zip(packet.tensors, packet.wants_gradient, strict=True)]
            for packet in packets
        ]
        for packet, tied in zip(packets, attach(backward, ends, outputs), strict=True):
            packet.tensors = tied

    def _backward_graph(self) -> TaskGraph:
        return self._machinery.graphs(self.graph.shape.microbatches, Phase.BACKWARD, self._plan.checkpoint, False)

    def backward_binder(self, graph: TaskGraph) -> Binder:
        """The binder of the backward graph, on the forward's tensors and in the forward's context."""
        return Binder(graph, self._plan, self._tensors, self._machinery.equipment, self._context)

    @property
    def machinery(self) -> Machinery:
        """What all steps of the pipeline share."""
        return self._machinery

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that gradients go to."""
        return self._parameters

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the caller's tensors, in the order of the ends."""
        assert self._inputs is not None
        return self._inputs.collect(self._tensors.gradients)


class _Means(NamedTuple):
    """What a backward is run with."""

    graph: TaskGraph
    call: PreparedCall
    pipeline: object
    tenancy: Tenancy


class CallBackward:
    """The backward of one ``pipe(x)``: a graph behind gates that the exits open, and an entry that waits.

    Holds the pipeline alive while an output may still be differentiated, and no longer: what is kept of it in a
    loss is kept by nodes of autograd, which the cycle collector does not see. If the engine stops on the way
    (another node of the caller's graph raised), the backward is cancelled.
    """

    def __init__(self, means: _Means, tensors: StepTensors) -> None:
        self._means: _Means | None = means
        self._tensors = tensors
        self._last = len(means.call.machinery.equipment.stages) - 1
        self._running: Callable[[], _Running | None] = _nothing

    def release(self, microbatch: int, gradients: Sequence[Tensor | None], *, retain: bool) -> None:
        """Take the caller's gradients of a micro-batch to the last stage, and open its gate."""
        running = self._running() or self._start(retain)
        with running.given_up_on_errors():
            self._tensors.gradients[microbatch, CALLER, self._last] = list(gradients)
            event = _arrival(gradients)
            if event is not None:
                self._tensors.arrivals[microbatch] = event
            # What stands behind this one in the chain and has not come by now will not: it has no gradient.
            running.open([i for i in sorted(running.closed, reverse=True) if i >= microbatch])

    def finish(self) -> list[Tensor | None]:
        """Wait until the last backward is issued; gradients of the inputs, then of the parameters."""
        running, self._running = self._running(), _nothing
        if running is None:
            raise BackwardError("the backward of a pipeline reached its inputs without passing its outputs")
        with running.given_up_on_errors():
            # Where there is none, all may be done, and the pipeline closed.
            if running.closed:
                running.open(sorted(running.closed, reverse=True))
            taken = running.wait()
        running.hand_over([*taken.values(), *chain.from_iterable(self._tensors.gradients.values())])
        inputs = running.call.input_gradients()
        _clear(self._tensors)
        return [*inputs, *[taken.pop(id(parameter), None) for parameter in running.call.parameters]]

    def _start(self, retain: bool) -> _Running:
        if self._means is None:
            raise BackwardError(
                "a second backward through the same pipe(x): its activations are gone; give the first one "
                "retain_graph=True, or call the pipeline again"
            )
        self._tensors.retain = retain
        running = _Running(self._means, self._tensors)
        self._running = weakref.ref(running)
        if not retain:
            self._means = None
        return running


class _Running:
    """A backward graph under way.

    Belongs to one pass of the autograd engine, which alone keeps it, as a callback for the end of the pass: where
    the engine stops before the entry, nothing else tells.
    """

    def __init__(self, means: _Means, tensors: StepTensors) -> None:
        # On a pool that others use, the driver would still run it.
        if not means.tenancy.is_open:
            raise PipelineClosedError(_CLOSED)
        self.call = call = means.call
        self.closed = set(range(means.graph.shape.microbatches))
        equipment = call.machinery.equipment
        assert means.tenancy.portal is not None
        self._portal = means.tenancy.portal
        self._pipeline = means.pipeline  # Its threads live until the backward has ended.
        self._guard = equipment.guard
        self._fence = Fence(equipment.streams.values())
        self._gates = Gates()
        self._fence.begin()
        try:
            self._guard.begin(call.parameters)
            binder = call.backward_binder(means.graph)
            run = means.tenancy.step(means.graph, binder.bind, binder.notes, self._gates)
            self._done: Call[Execution] = self._portal.submit(run)
        except BaseException:
            self._guard.roll_back()
            raise
        self._undo = partial(_undo, equipment.ties, tensors)
        thread = None if any(stage.device.is_cuda for stage in equipment.stages) else threading.get_ident()
        self._dropped: weakref.finalize[..., _Running] = weakref.finalize(
            self, _give_up, self._done, self._guard, self._undo, means.pipeline, thread
        )
        self._dropped.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """The engine's pass is over."""

    @contextmanager
    def given_up_on_errors(self) -> Iterator[None]:
        """An error (Ctrl-C) gives it up at once: the frames of its traceback would keep it for longer."""
        try:
            yield
        except BaseException:
            self._dropped()
            raise

    def open(self, microbatches: Sequence[int]) -> None:
        """Open these gates, in this order."""
        self.closed.difference_update(microbatches)
        try:
            self._gates.open(microbatches, self._portal.call_soon)
        except RuntimeError as error:
            raise PipelineClosedError(_CLOSED) from error

    def hand_over(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the caller's streams read ``gradients``, which the lanes have made; after ``wait``."""
        self._fence.hand_over(gradient for gradient in gradients if gradient is not None)

    def wait(self) -> dict[int, Tensor | None]:
        """The new gradients by parameter, once the last backward is issued; raises what went wrong there."""
        self._dropped.detach()
        # Taken out: an error holds this frame, and must not be held by what the frame holds.
        done = self.__dict__.pop("_done")
        try:
            done.wait()
        except BaseException:
            done.end()
            self._undo()
            self._guard.roll_back()
            raise
        finally:
            # The caller's streams must be behind every lane before the engine reads the gradients there.
            self._fence.end()
            del done
        return self._guard.take()


def _give_up(
    done: Call[Execution], guard: GradientGuard, undo: Callable[[], None], pipeline: object, thread: int | None
) -> None:
    """Nobody will come for this backward: end it, and forget what it did when its tasks have ended.

    On ``thread``, the one that called ``backward``, wait for that, so that the caller finds gradients as they were.
    One of the engine's own threads must not wait: on CUDA, tasks may need it to come to an end.
    """
    guard.give_up()
    if threading.get_ident() == thread:
        done.end()
        _forget(guard, undo, pipeline)
    else:
        done.future.add_done_callback(partial(_forget, guard, undo, pipeline))
        if not done.future.done():
            done.cancel()


def _forget(guard: GradientGuard, undo: Callable[[], None], pipeline: object, _: object = None) -> None:
    """Its tasks have ended. ``pipeline`` had to live until here: its threads end with it."""
    undo()
    guard.forget()


def _undo(ties: Ties, tensors: StepTensors) -> None:
    """Drop what a backward that failed leaves, at the replicas and in the tables."""
    ties.drop_gradients()
    _clear(tensors)


def _clear(tensors: StepTensors) -> None:
    """Leave nothing in the tables but what another backward needs."""
    if tensors.retain:
        tensors.gradients.clear()
        tensors.arrivals.clear()
        tensors.tied.clear()
    else:
        tensors.close()


def _nothing() -> None:
    """No backward is under way."""


def _arrival(gradients: Sequence[Tensor | None]) -> torch.cuda.Event | None:
    """An event behind what the current stream has queued for these gradients; ``None`` where they are on a CPU."""
    device = next((gradient.device for gradient in gradients if gradient is not None and gradient.is_cuda), None)
    if device is None:
        return None
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
