"""What F, R, B, I and W compute: the forward of one stage, and the backward through its local graph.

Each stage has an autograd graph of its own. What it receives are leaves of that graph, what it sends is detached from
it, and gradients pass from stage to stage through the step's tables. Runs on the threads of the stages' devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.lower import CheckpointMode
from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import LossError, StageError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.checkpoint import checkpoint, is_checkpointing, is_recomputing
from asyncpipe.ops.autograd.random_streams import RandomStream, check_repeated, random_stream
from asyncpipe.ops.autograd.split_backward import SplitBackward
from asyncpipe.ops.device.copies import Copier
from asyncpipe.ops.device.streams import LaneStream
from asyncpipe.ops.execute.parameter_hooks import hooked, without_hooks
from asyncpipe.ops.execute.shared_values import NOBODY, Readers, as_they_are, refuse_overwriting, shared_readers
from asyncpipe.ops.execute.step_tensors import LocalGraph, StepPlan, StepTensors
from asyncpipe.ops.model.buffers import BufferValues
from asyncpipe.ops.model.microbatch import Arguments, Packet
from asyncpipe.ops.model.stage import CALLER, Stage

__all__ = ["StageCompute"]


class _LossResult(NamedTuple):
    """What the last stage returns to the caller in a step with a loss."""

    loss: Tensor
    counted: Tensor | None
    output: Any


@dataclass(slots=True, eq=False)
class _StageRun:
    """One stage, with the loss if it is the last, as a function of tensors that computes the same at every call.

    An autograd graph refers to this, which the garbage collector cannot see through. To avoid a cycle, this refers
    neither to the step's tables nor to the tensors that the caller gets.
    """

    plan: StepPlan
    context: CallerContext
    stage: Stage
    microbatch: int
    received: Mapping[int, Packet]
    target: Arguments
    packets: dict[int, Packet] = field(default_factory=dict)
    """What the stage sends, without the tensors, which are the return value: autograd functions return only these."""
    buffers: BufferValues = field(default_factory=dict)
    """What a recomputation needs to know of the stage's buffers."""
    readers: Readers = field(default_factory=list)
    """Who else reads what the stage receives; empty if nobody does."""
    next_readers: Mapping[int, Readers] = field(default_factory=dict)
    """The same of what it sends, by user."""
    drawn: list[Tensor] = field(default_factory=list)
    """What a first run drew, which a recomputation must draw again."""
    computed: Sequence[Tensor | None] = ()
    """A sample of what it sent, which must come out again."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the stage sends.

        Runs on the device's thread; or, for a recomputation that no R task did, on a thread of the autograd engine.
        """
        plan, stage = self.plan, self.stage
        repeated = plan.training and plan.checkpoint is not CheckpointMode.NEVER
        given = stage.inputs.given(tensors, repeated)
        rest = iter(given)
        before = as_they_are(given) if self.readers else ()
        random = random_stream(plan.seed, self.microbatch, stage.index, stage.device.physical)
        with self.context.entered(), random, stage.buffers.during(self.buffers):
            sent = stage.module({source: packet.rebuild(rest) for source, packet in self.received.items()})
            stage.inputs.saw(tensors, given)
            if self.readers:
                refuse_overwriting(stage.index, self.readers, given, before)
            self.packets = {user: Packet(value) for user, value in sent.items()}
            flat = [tensor for packet in self.packets.values() for tensor in packet.tensors]
            if not flat:
                raise _without_tensors(stage.index, sent)
            if CALLER in sent and plan.loss is not None:
                output = sent[CALLER]
                loss, count = _loss_and_count(plan.loss(output, *self.target.args, **self.target.kwargs))
                if torch.is_grad_enabled() and not loss.requires_grad:
                    raise LossError(
                        "the loss does not depend on any parameter; does a stage or loss_fn detach its output?"
                    )
                self.packets[CALLER] = Packet(_LossResult(loss, count, output if plan.keep_outputs else None))
                flat = [tensor for packet in self.packets.values() for tensor in packet.tensors]
            if repeated:
                self._draw_again(random)
        if repeated:
            self._compute_again(flat)
        if (len(flat) > 1 or self.readers) and CALLER not in self.packets and not (repeated and is_recomputing()):
            sent = {user: packet.tensors for user, packet in self.packets.items()}
            self.next_readers = shared_readers(sent, given, self.readers)
        for packet in self.packets.values():
            packet.tensors = []
        return flat

    def _draw_again(self, random: RandomStream) -> None:
        """In a first run, note what was drawn; in a second one, check that it was the same."""
        if is_checkpointing():
            self.drawn = random.drawn()
        elif is_recomputing():
            check_repeated(self.stage.index, self.drawn, random.drawn())

    def _compute_again(self, flat: Sequence[Tensor]) -> None:
        """The same of what was computed."""
        if is_checkpointing():
            self.computed = self.stage.outputs.sample(self.microbatch, flat)
        elif is_recomputing():
            self.stage.outputs.compare(self.computed, flat)


@dataclass(slots=True, eq=False)
class StageCompute:
    """Forward, recompute and backward of every stage, on the tensors of one step."""

    graph: TaskGraph
    plan: StepPlan
    tensors: StepTensors
    stages: Sequence[Stage]
    streams: Mapping[Lane, LaneStream]
    copiers: Mapping[Lane, Copier]
    context: CallerContext
    sources: list[list[int]] = field(init=False)
    """By stage: what it receives something from."""
    hooked: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    """By stage: its parameters with hooks."""
    trained: dict[int, bool] = field(default_factory=dict)
    """By stage: whether a parameter of it needs a gradient."""

    def __post_init__(self) -> None:
        self.sources = [[CALLER] for _ in self.stages]
        for source, user in sorted(self.graph.wiring.links):
            self.sources[user].append(source)

    # Forward

    def forward(self, task: Task) -> None:
        """Take what the stage receives; store what it sends and, if a backward follows, its local graph."""
        i, stage = task.microbatch, self.stages[task.stage]
        received = self._received(i, stage.index)
        from_caller = received[CALLER].tensors if CALLER in received else []
        leaves = {source: self._leaves(source, packet, stage) for source, packet in received.items()}
        run = _StageRun(self.plan, self.context, stage, i, received, self._target(i, stage))
        inputs = _flat(leaves)
        if self.tensors.readers:
            run.readers = self._readers(i, stage.index, leaves)
        recomputation = None
        if self._recomputes(i, stage, inputs):
            with stage.parameters.during():
                flat, recomputation = checkpoint(run, inputs)
        else:
            flat = _run_once(run, inputs)
        if self.plan.training:
            if from_caller:
                _tell_of_overwriting(from_caller, leaves[CALLER])
            # An input that a parameter was added to in place is the middle of the graph: no backward ends there.
            leaves = {source: [t if t.is_leaf else t.detach() for t in each] for source, each in leaves.items()}
        rest = iter(flat)
        # Taken from the run: the caller's outputs will refer to the graph that refers to it, which would be a cycle.
        packets, run.packets = run.packets, {}
        outputs = {user: list(islice(rest, packet.count)) for user, packet in packets.items()}
        for user, packet in packets.items():
            self._send(i, stage.index, user, packet, outputs[user])
        for user, readers in run.next_readers.items():
            self.tensors.readers[i, stage.index, user] = readers
        if self.plan.training:
            self.tensors.local_graphs[i, stage.index] = LocalGraph(leaves, outputs, recomputation)

    def _recomputes(self, i: int, stage: Stage, inputs: Sequence[Tensor]) -> bool:
        """Whether to checkpoint a forward. Not where nothing needs a gradient: what it sends must not seem to."""
        if not self.plan.training or not self.plan.checkpoint.recomputes(i, self.graph.shape.microbatches):
            return False
        if stage.index not in self.trained:
            self.trained[stage.index] = any(parameter.requires_grad for parameter in stage.module.parameters())
        return self.trained[stage.index] or any(tensor.requires_grad for tensor in inputs)

    def _received(self, i: int, j: int) -> dict[int, Packet]:
        activations = self.tensors.activations
        sources = self.sources[j]
        # The caller gives something to few stages.
        first = 0 if (i, CALLER, j) in activations else 1
        return {source: activations.pop((i, source, j)) for source in sources[first:]}

    def _readers(self, i: int, j: int, leaves: Mapping[int, Sequence[Tensor]]) -> Readers:
        """Who else reads what stage ``j`` receives, tensor by tensor; empty if nobody does."""
        found = {source: self.tensors.readers.pop((i, source, j), None) for source in leaves}
        if not any(found.values()):
            return []
        return [r for source, tensors in leaves.items() for r in found[source] or [NOBODY] * len(tensors)]

    def _leaves(self, source: int, packet: Packet, stage: Stage) -> list[Tensor]:
        """The stage's inputs as leaves, which require a gradient where their sender uses it. Empties the packet."""
        tensors: Sequence[Tensor] = packet.tensors
        if source == CALLER:
            tensors = self._from_caller(tensors, stage)
        packet.tensors = []
        wants = packet.wants_gradient
        # The caller's too, whose gradients a whole step does not hand on: a reentrant torch.utils.checkpoint in the
        # first stage makes gradients of its parameters only if its input requires one.
        training = self.plan.training
        # Micro-batches are views of one batch. Only ``data`` has versions of its own: if a stage overwrites its
        # micro-batch, what was saved of the others is still what it was.
        bare = [tensor.data if source == CALLER else tensor.detach() for tensor in tensors]
        if training:
            for tensor, want in zip(bare, wants, strict=True):
                if want:
                    tensor.requires_grad_()
        return bare

    def _target(self, i: int, stage: Stage) -> Arguments:
        """The arguments of the loss besides the output, on the last stage's device."""
        if stage.index < len(self.stages) - 1 or i not in self.tensors.targets:
            return Arguments.of()
        target = Packet(self.tensors.targets.pop(i))
        return Arguments.wrap(target.rebuild(self._from_caller(target.tensors, stage)))

    def _from_caller(self, tensors: Sequence[Tensor], stage: Stage) -> list[Tensor]:
        """The caller's tensors on the stage's device, safe to read on its compute stream."""
        copier = self.copiers[Lane(stage.device.name, Queue.COMPUTE)]
        return [copier.fetch(tensor, self.tensors.caller_ready) for tensor in tensors]

    def _compute_stream(self, stage: Stage) -> LaneStream:
        return self.streams[Lane(stage.device.name, Queue.COMPUTE)]

    def _send(self, i: int, j: int, user: int, packet: Packet, outputs: Sequence[Tensor]) -> None:
        packet.wants_gradient = [tensor.requires_grad for tensor in outputs]
        packet.tensors = [tensor.detach() for tensor in outputs]
        if user != CALLER:
            self.tensors.activations[i, j, user] = packet
            return
        if self.plan.loss is not None:
            result: _LossResult = packet.rebuild(packet.tensors)
            self.tensors.losses[i] = result.loss
            if result.counted is not None:
                self.tensors.counts[i] = result.counted
            if not self.plan.keep_outputs:
                return
            packet = Packet(result.output)
        self.tensors.outputs[i] = packet

    # Backward

    def recompute(self, task: Task) -> None:
        """Run the forward again, unless that is done already or nothing needs a gradient."""
        recomputation = self.tensors.local_graphs[task.microbatch, task.stage].recomputation
        if recomputation is not None:
            recomputation.retain = self.tensors.retain
            recomputation.run()

    def backward(self, task: Task) -> None:
        """From the gradients of what the stage sent, make those of what it received and of its parameters."""
        i, j = task.microbatch, task.stage
        retain = self.tensors.retain
        local_graphs = self.tensors.local_graphs
        local_graph = local_graphs[i, j] if retain else local_graphs.pop((i, j))
        if local_graph.recomputation is not None:
            local_graph.recomputation.retain = retain
            # Unless an R task has. Not inside the backward, on a thread of the engine, which has not this task's turn.
            local_graph.recomputation.run()
        output_gradients = self._output_gradients(i, j, local_graph)
        ends = _flat(local_graph.outputs)
        pairs = [(t, g) for t, g in zip(ends, output_gradients, strict=True) if g is not None and t.requires_grad]
        leaves = _flat(local_graph.inputs)
        try:
            if pairs:
                tensors, starts = zip(*pairs, strict=True)
                with self._draws(task, 1), without_hooks(self._hooked(j)):
                    torch.autograd.backward(tensors, starts, retain_graph=retain)
            self._hand_back(i, j, local_graph, [leaf.grad for leaf in leaves])
        finally:
            for leaf in leaves:
                leaf.grad = None

    def input_gradient(self, task: Task) -> None:
        """The half of ``backward`` that earlier stages wait for. Only in whole steps, so no graph is retained."""
        i, j = task.microbatch, task.stage
        local_graph = self.tensors.local_graphs.pop((i, j))
        gradients = self._output_gradients(i, j, local_graph)
        if local_graph.recomputation is not None:
            leaves, outputs = local_graph.recomputation.take()
        else:
            leaves, outputs = _flat(local_graph.inputs), _flat(local_graph.outputs)
        split = SplitBackward(outputs, gradients, leaves)
        with self._draws(task, 1), without_hooks(self._hooked(j)):
            self._hand_back(i, j, local_graph, split.input_gradients())
        self.tensors.split_backwards[i, j] = split

    def weight_gradient(self, task: Task) -> None:
        """The other half of ``backward``: the parameters' gradients, from what ``input_gradient`` stored."""
        with self._draws(task, 2), without_hooks(self._hooked(task.stage)):
            self.tensors.split_backwards.pop((task.microbatch, task.stage)).weight_gradients()

    def _draws(self, task: Task, branch: int) -> RandomStream:
        """What a backward draws from. torch's checkpoint, inside a stage, sets the state of its forward there."""
        device = self.stages[task.stage].device.physical
        return random_stream(self.plan.seed, task.microbatch, task.stage, device, branch)

    def _hooked(self, j: int) -> list[nn.Parameter]:
        """The stage's parameters that had hooks when its first backward of this step began."""
        if j not in self.hooked:
            self.hooked[j] = hooked(self.stages[j].module.parameters())
        return self.hooked[j]

    def _output_gradients(self, i: int, j: int, local_graph: LocalGraph) -> list[Tensor | None]:
        """The gradients of what the stage sent, taken from the tables."""
        gradients: list[Tensor | None] = []
        for user, outputs in local_graph.outputs.items():
            if user == CALLER and self.plan.whole_step:
                gradients += self._loss_gradient(outputs, i)
                continue
            taken = self.tensors.gradients.pop((i, user, j), [None] * len(outputs))
            if user == CALLER:
                # Hazard: this compute stream reads memory allocated on a stream of the caller or of the autograd
                # engine. Its memory must not be reused before that read is done.
                stream = self._compute_stream(self.stages[j])
                stream.keep(gradient for gradient in taken if gradient is not None)
            gradients += taken
        return gradients

    def _hand_back(self, i: int, j: int, local_graph: LocalGraph, gradients: Sequence[Tensor | None]) -> None:
        """Store the gradients of what the stage received, for the stages that sent it."""
        rest = iter(gradients)
        for source, leaves in local_graph.inputs.items():
            mine = list(islice(rest, len(leaves)))
            if source != CALLER or (not self.plan.whole_step and any(leaf.requires_grad for leaf in leaves)):
                self.tensors.gradients[i, j, source] = mine

    def _loss_gradient(self, outputs: Sequence[Tensor], i: int) -> list[Tensor | None]:
        if i in self.tensors.counts:
            # A count on the CPU becomes an argument of the kernel: `to` would make the host wait for the device.
            start = torch.empty_like(outputs[0]).fill_(self.tensors.counts[i])
        else:
            start = torch.full_like(outputs[0], self.plan.weights[i])
        if self.plan.scale is not None:
            start = start * self.plan.scale
        return [start, *[None] * (len(outputs) - 1)]


def _run_once(run: _StageRun, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a run that is not repeated. Raises ``StageError`` if autograd refuses a write into a leaf."""
    try:
        return run(inputs)
    except RuntimeError as error:
        if "leaf Variable that requires grad is being used in an in-place operation" not in str(error):
            raise
        raise StageError(
            f"stage {run.stage.index} overwrites in place a parameter, or what it received and did not overwrite in "
            "its first forward; use an operation that is not in place, or clone the tensor first"
        ) from error


def _tell_of_overwriting(given: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Count a write into ``leaves`` as one into what the caller has ``given``, of which a graph may have saved it."""
    for tensor, leaf in zip(given, leaves, strict=True):
        if leaf._version:
            torch.autograd.graph.increment_version(tensor)


def _flat(tensors_by_link: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in tensors_by_link.values() for tensor in tensors]


def _without_tensors(index: int, sent: Mapping[int, Any]) -> StageError:
    value = next(iter(sent.values()), None)
    # A link with skips wraps the output; name the type that the module itself returned.
    kind = type(getattr(value, "output", value)).__name__
    return StageError(
        f"stage {index} returned {kind} without any tensor; a stage must return a tensor, or a nested tuple, list or "
        "dict that holds one"
    )


def _loss_and_count(returned: Any) -> tuple[Tensor, Tensor | None]:
    """The loss and its count, from what a loss function returned: a loss, or (mean loss, number of samples)."""
    loss, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LossError(f"loss_fn must return a tensor without dimensions, got {got}; reduce it to a scalar")
    if count is None:
        return loss, None
    # A number stays on the CPU: bringing it to the loss's device would make the host wait for the device.
    on_device = isinstance(count, Tensor) and not count.is_cpu
    count = torch.as_tensor(count, device=loss.device if on_device else "cpu").detach()
    if count.dim():
        raise LossError(f"loss_fn returned a count of shape {tuple(count.shape)}; it must be one number")
    return loss, count
