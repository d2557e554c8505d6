"""``y = pipe(x)``: a forward whose loss and backward belong to the caller. The walk:

1. ``PreparedCall`` checks and cuts the arguments. The forward graph runs while the caller's thread blocks.
2. The outputs become part of the caller's autograd graph, behind an entry node and one exit node per micro-batch
   (``ops/autograd/caller_graph.py``).
3. ``loss.backward()`` reaches these nodes, which call ``CallBackward`` (``call_backward.py``).

Inside a task, the forward runs on the task's own thread. Everything here runs on the caller's thread.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.task import Lane, Queue
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.errors import OptionError, RecomputeError
from asyncpipe.ops.autograd.bare_thread import bare_thread
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.caller_graph import attach
from asyncpipe.ops.autograd.checkpoint import is_recomputing
from asyncpipe.ops.autograd.random_streams import draw_step_seed
from asyncpipe.ops.execute.caller_gradients import CallerGradients
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.model.microbatch import Arguments, Microbatches, Packet, cut, gather, has_loss, keywords
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.ops.torch_internals import version_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.call_backward import CallBackward, RecordedCall
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.step import StepHere
from asyncpipe.pipeline.step_inputs import NO_TARGET, differing, loss_weights, target_of
from asyncpipe.runtime.execution import Execution
from asyncpipe.runtime.inline import run_inline
from asyncpipe.runtime.task_threads import inside_task
from asyncpipe.runtime.waits import Waiting, drive_blocking

__all__ = ["PreparedCall", "call"]


def call(parts: PipelineParts, tenancy: Tenancy, arguments: Arguments) -> Any:
    """The model's output for ``arguments``; blocks. ``Pipeline.__call__`` says the rest."""
    if inside_task():
        return _call_inside_task(parts, tenancy, arguments)
    return drive_blocking(_called(parts, tenancy, arguments))


def _called(parts: PipelineParts, tenancy: Tenancy, arguments: Arguments) -> Waiting[Any]:
    tenancy.check_caller(blocking=True)
    yield from tenancy.turn.acquired(nested=True)
    try:
        tenancy.check()
        parts.check_between_steps()
        return (yield from PreparedCall(parts, tenancy, arguments).run())
    finally:
        tenancy.turn.release()


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
    before = [(buffer, version_of(buffer)) for buffer in parts.module.buffers()]
    output = PreparedCall(parts, tenancy, arguments).run_inline()
    now = list(parts.module.buffers())
    if len(now) != len(before) or any(b is not n or version_of(b) != v for (b, v), n in zip(before, now, strict=True)):
        raise RecomputeError(
            "a recomputation called a pipeline that changes its buffers (running statistics?), which the forward had "
            "changed already; call eval() on that pipeline, or use checkpoint='never' for the one that calls"
        )
    return output


class PreparedCall(StepHere[Any]):
    """The arguments of a ``pipe(x)``, checked and cut, for its forward."""

    def __init__(self, parts: PipelineParts, tenancy: Tenancy, arguments: Arguments) -> None:
        options = parts.options
        parts.check_model()
        context = CallerContext.capture(modes=parts.has_executors)
        batch: Any = arguments
        if len(arguments.args) == 1 and not arguments.kwargs and isinstance(arguments.args[0], Microbatches | UserDict):
            batch = keywords(arguments.args[0])
        made = cut(batch, options.pieces, dim=options.batch_dim)
        self._ready_made = made.ready_made
        pieces = [Arguments.wrap(piece) for piece in made.pieces]
        takes = parts.taken(pieces)
        self._given = tensors_of(pieces)
        self._parameters = [parameter for parameter in parts.module.parameters() if parameter.requires_grad]
        """The parameters that gradients go to."""
        recording = context.grad and not context.inference
        training = recording and any(tensor.requires_grad for tensor in [*self._parameters, *self._given])
        if training and parts.module.training:
            parts.batch_norms.saw(parts.module, len(made.sizes))
        plan = StepPlan(
            loss=None,
            weights=loss_weights(made.sizes, options.loss_reduction == "mean"),
            scale=None,
            # Inside a task, a recomputation calls again, and must draw the same: from the task's own random stream.
            seed=draw_step_seed(None if inside_task() else options.generator),
            # Nothing is recomputed in evaluation mode, as in torchgpipe.
            checkpoint=parts.checkpoint if parts.module.training else CheckpointMode.NEVER,
            keep_outputs=True,
            training=training,
            whole_step=False,
            sizes=differing(made.sizes),
            batch_dim=options.batch_dim,
        )
        target = target_of(parts, batch)
        self._labels = [] if target is NO_TARGET else getattr(target, "pieces", [target])
        """In the arguments, if the model knows of labels there: those of each micro-batch that the caller has cut."""
        self._inputs = CallerGradients(batch, pieces, takes, options.batch_dim) if training else None
        """What the backward makes gradients of the caller's tensors with; ``None`` if there will be none."""
        means = options.loss_reduction == "mean"
        self._is_padded_unevenly = means and parts.padded_labels.are_uneven(pieces, made.sizes)
        graph = parts.graphs(len(pieces), Phase.FORWARD, plan.checkpoint, False)
        super().__init__(parts, tenancy, graph, plan, StepTensors.of(takes), context)

    def run_inline(self) -> Any:
        """Run the forwards on the calling thread, inside the task that called."""
        with self._abandoned_on_error():
            self._begin()
            with bare_thread():
                run_inline(self.graph, self._binder.bind, self._binder.around)
            self._inflow.wait()
            return self._finish(None)

    def _begin(self, *, in_line: bool = False) -> None:
        self.parts.resources.begin_replicas()
        self.parts.resources.ties.refresh()
        if not inside_task():
            # The tasks of an abandoned backward may wait for the one that called.
            self.parts.resources.guard.wait_for_abandoned()
        self._inflow = self._binder.begin(self._fence.begin())

    def _finish(self, execution: Execution | None) -> Any:
        """The outputs, as part of the caller's graph; gathered unless the caller made the micro-batches."""
        packets = [packet for _, packet in sorted(self._tensors.outputs.items())]
        self._tensors.outputs.clear()
        results = [tensor for packet in packets for tensor in packet.tensors]
        self._fence.end(results, self._binder.last.values())
        self.parts.commit_statistics()
        if self._inputs is not None:
            self._attach(packets, self._inputs)
        outputs = [packet.rebuild(packet.tensors) for packet in packets]
        if self._is_padded_unevenly and has_loss(outputs[0]):
            self.parts.padded_labels.warn()
        if not self._ready_made:
            outputs = [gather(outputs, self.parts.options.batch_dim, self._plan.weights)]
        if self._labels and (own_loss := self.parts.staged.own_loss) is not None:
            outputs = [own_loss.with_loss(output, mine) for output, mine in zip(outputs, self._labels, strict=True)]
        return outputs if self._ready_made else outputs[0]

    def _attach(self, packets: Sequence[Packet], inputs: CallerGradients) -> None:
        """Make the tensors of ``packets`` part of the caller's autograd graph."""
        forward = RecordedCall(
            self.parts,
            self.tenancy,
            self.parts.graphs(self.graph.shape.microbatches, Phase.BACKWARD, self._plan.checkpoint, False),
            self._plan,
            self._tensors,
            self._context,
            inputs,
            self._parameters,
            self._needed(),
            # Backwards of a frozen pipeline have no gradients to keep from each other, and take no turns.
            self.parts.resources.guard if self._parameters else GradientGuard(),
        )
        ends = [*map(_alias_of_leaf, inputs.ends), *self._aliases()]
        outputs = [
            [t.requires_grad_(wants) for t, wants in zip(packet.tensors, packet.wants_gradient, strict=True)]
            for packet in packets
        ]
        for packet, attached in zip(packets, attach(CallBackward(forward), ends, outputs), strict=True):
            packet.tensors = attached

    def _needed(self) -> list[tuple[Tensor, int]]:
        """What the backward needs the values of, and nobody watches besides, with its version of now.

        Stages compute with aliases of the caller's tensors that have versions of their own; and a recomputation uses
        the parameters again, which no graph has saved.
        """
        needed = list(self._given)
        needed += [] if self._plan.checkpoint is CheckpointMode.NEVER else self._parameters
        return [(tensor, version_of(tensor)) for tensor in needed if not tensor.is_inference()]

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
        for parameter in self._parameters:
            with lanes[id(parameter)].use() if id(parameter) in lanes else nullcontext():
                yield _alias_of_leaf(parameter)


def _alias_of_leaf(tensor: Tensor) -> Tensor:
    """``tensor`` behind a node on the current stream, if it is a leaf on an accelerator (see ``_aliases``)."""
    return tensor if tensor.is_cpu or not tensor.is_leaf else tensor.view_as(tensor)
