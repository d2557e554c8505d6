"""What F, R, B, I and W compute: a stage as a function of tensors, and backwards through its own local graph.

A stage's graph is cut at its borders: what it receives are leaves, what it sends is detached, and a gradient
crosses the border as a tensor of the step. Runs on the threads of the stages' devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.errors import LossError, StageError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.checkpoint import checkpoint, is_recomputing
from asyncpipe.ops.autograd.random_streams import RandomStream
from asyncpipe.ops.autograd.split_backward import SplitBackward
from asyncpipe.ops.device.copies import to_device
from asyncpipe.ops.device.streams import LaneStream
from asyncpipe.ops.execute.step_tensors import LocalGraph, StepPlan, StepTensors
from asyncpipe.ops.model.microbatch import Arguments, Packet
from asyncpipe.ops.model.running_statistics import untouched
from asyncpipe.ops.model.stage import CALLER, Stage

__all__ = ["StageCompute"]


class _LossResult(NamedTuple):
    """What the last stage gives the caller in a step with a loss."""

    loss: Tensor
    counted: Tensor | None
    output: Any


@dataclass(slots=True, eq=False)
class _StageRun:
    """A stage (and at the last one the loss) as a function of tensors, the same whenever it is called.

    A residue keeps it, in an autograd graph that hides what it refers to from the garbage collector: so it knows
    nothing of the step's tables, nor of what the caller gets.
    """

    plan: StepPlan
    context: CallerContext
    stage: Stage
    microbatch: int
    received: Mapping[int, Packet]
    target: Arguments
    packets: dict[int, Packet] = field(default_factory=dict)
    """What the stage sends, without its tensors: autograd functions carry nothing else."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs on the device's thread, or on one of the autograd engine's when nothing recomputed it before."""
        plan, stage = self.plan, self.stage
        # A first operation in place would overwrite what the stage before, or a recomputation, still reads.
        rest = iter([tensor.clone() for tensor in tensors] if stage.module.overwrites_input else tensors)
        random = RandomStream(plan.seed, self.microbatch, stage.index, stage.device.physical)
        with self.context.entered(), random, untouched(stage.statistics if is_recomputing() else ()):
            sent = stage.module({source: packet.rebuild(rest) for source, packet in self.received.items()})
            self.packets = {user: Packet(value) for user, value in sent.items()}
            _check_tensors(stage.index, sent, self.packets)
            if CALLER in sent and plan.loss is not None:
                self.packets[CALLER] = Packet(self._with_loss(sent[CALLER], plan.loss))
        flat = [tensor for packet in self.packets.values() for tensor in packet.tensors]
        for packet in self.packets.values():
            packet.tensors = []
        return flat

    def _with_loss(self, output: Any, loss_fn: Callable[..., Any]) -> _LossResult:
        loss, count = _loss_and_count(loss_fn(output, *self.target.args, **self.target.kwargs))
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LossError("the loss does not depend on any parameter; does a stage or loss_fn detach its output?")
        return _LossResult(loss, count, output if self.plan.keep_outputs else None)

    def take_packets(self) -> dict[int, Packet]:
        """What the stage sends; the caller's will soon hold what hangs on this very backward."""
        packets, self.packets = self.packets, {}
        return packets


class StageCompute:
    """Forward, recompute and backward of every stage, on the tensors of one step."""

    def __init__(
        self,
        graph: TaskGraph,
        plan: StepPlan,
        tensors: StepTensors,
        stages: Sequence[Stage],
        streams: Mapping[Lane, LaneStream],
        context: CallerContext,
    ) -> None:
        self._plan = plan
        self._tensors = tensors
        self._stages = stages
        self._streams = streams
        self._context = context
        self._microbatches = graph.shape.microbatches
        self._sources: list[list[int]] = [[CALLER] for _ in stages]
        for source, user in sorted(graph.wiring.links):
            self._sources[user].append(source)

    # Forward

    def forward(self, task: Task) -> None:
        """Take what the stage receives, leave what it sends, and the residue if a backward follows."""
        i, stage = task.microbatch, self._stages[task.stage]
        received = self._received(i, stage.index)
        leaves = {source: self._leaves(source, packet, stage) for source, packet in received.items()}
        run = _StageRun(self._plan, self._context, stage, i, received, self._target(i, stage))
        inputs = [leaf for leaves_of_link in leaves.values() for leaf in leaves_of_link]
        recomputation = None
        if self._plan.training and self._plan.checkpoint.recomputes(i, self._microbatches):
            flat, recomputation = checkpoint(run, inputs)
        else:
            flat = run(inputs)
        rest = iter(flat)
        packets = run.take_packets()
        outputs = {user: _some(rest, packet.count) for user, packet in packets.items()}
        for user, packet in packets.items():
            self._send(i, stage.index, user, packet, outputs[user])
        if self._plan.training:
            self._tensors.residues[i, stage.index] = LocalGraph(leaves, outputs, recomputation)

    def _received(self, i: int, j: int) -> dict[int, Packet]:
        keys = ((source, (i, source, j)) for source in self._sources[j])
        activations = self._tensors.activations
        return {source: activations.pop(key) for source, key in keys if source != CALLER or key in activations}

    def _leaves(self, source: int, packet: Packet, stage: Stage) -> list[Tensor]:
        """Inputs that gradients can be taken of, where their maker can use one. Empties the packet."""
        tensors: Sequence[Tensor] = packet.tensors
        if source == CALLER:
            tensors = self._from_caller(tensors, stage)
        packet.tensors = []
        wants = packet.wants_gradient
        # A step of its own ends at its input; the caller's own graph goes on only behind pipe(x).
        here = self._plan.training and (source != CALLER or not self._plan.whole_step)
        return [tensor.detach().requires_grad_(here and want) for tensor, want in zip(tensors, wants, strict=True)]

    def _target(self, i: int, stage: Stage) -> Arguments:
        """What the loss takes beside the last stage's output, on that stage's device."""
        if stage.index < len(self._stages) - 1 or i not in self._tensors.targets:
            return Arguments.of()
        target = Packet(self._tensors.targets.pop(i))
        return Arguments.wrap(target.rebuild(self._from_caller(target.tensors, stage)))

    def _from_caller(self, tensors: Sequence[Tensor], stage: Stage) -> list[Tensor]:
        """The caller's tensors on the stage's device, safe to read on its compute stream."""
        moved = [to_device(tensor, stage.device.physical) for tensor in tensors]
        # Allocated on the caller's stream: freed by the caller meanwhile, their memory must not be reused.
        self._streams[Lane(stage.device.name, Queue.COMPUTE)].keep([*tensors, *moved])
        return moved

    def _send(self, i: int, j: int, user: int, packet: Packet, outputs: Sequence[Tensor]) -> None:
        packet.wants_gradient = [tensor.requires_grad for tensor in outputs]
        packet.tensors = [tensor.detach() for tensor in outputs]
        if user != CALLER:
            self._tensors.activations[i, j, user] = packet
            return
        if self._plan.loss is not None:
            result: _LossResult = packet.rebuild(packet.tensors)
            self._tensors.losses[i] = result.loss
            if result.counted is not None:
                self._tensors.counts[i] = result.counted
            if not self._plan.keep_outputs:
                return
            packet = Packet(result.output)
        self._tensors.outputs[i] = packet

    # Backward

    def recompute(self, task: Task) -> None:
        """Run the forward again, if nothing has yet."""
        recomputation = self._tensors.residues[task.microbatch, task.stage].recomputation
        assert recomputation is not None
        recomputation.retain = self._tensors.retain
        recomputation.run()

    def backward(self, task: Task) -> None:
        """From the gradients of what the stage sent to those of what it received; parameters' on the way."""
        i, j = task.microbatch, task.stage
        retain = self._tensors.retain
        residues = self._tensors.residues
        residue = residues[i, j] if retain else residues.pop((i, j))
        if residue.recomputation is not None:
            residue.recomputation.retain = retain
        outputs = [tensor for tensors in residue.outputs.values() for tensor in tensors]
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(outputs, self._output_gradients(i, j, residue), strict=True)
            if tensor.requires_grad and gradient is not None
        ]
        leaves = [leaf for leaves_of_link in residue.inputs.values() for leaf in leaves_of_link]
        try:
            if pairs:
                tensors, starts = zip(*pairs, strict=True)
                with _without_hooks(() if self._plan.whole_step else self._stages[j].module.parameters()):
                    torch.autograd.backward(tensors, starts, retain_graph=retain)
            self._hand_back(i, j, residue, [leaf.grad for leaf in leaves])
        finally:
            for leaf in leaves:
                leaf.grad = None

    def input_gradient(self, task: Task) -> None:
        """The half of ``backward`` that earlier stages wait for. Part of whole steps alone: nothing is retained."""
        i, j = task.microbatch, task.stage
        residue = self._tensors.residues.pop((i, j))
        gradients = self._output_gradients(i, j, residue)
        if residue.recomputation is not None:
            leaves, outputs = residue.recomputation.take()
        else:
            leaves = [leaf for leaves_of_link in residue.inputs.values() for leaf in leaves_of_link]
            outputs = [tensor for tensors in residue.outputs.values() for tensor in tensors]
        split = SplitBackward(outputs, gradients, leaves)
        self._hand_back(i, j, residue, split.input_gradients())
        self._tensors.halves[i, j] = split

    def weight_gradient(self, task: Task) -> None:
        """The other half of ``backward``: parameters' gradients, from what ``input_gradient`` left."""
        self._tensors.halves.pop((task.microbatch, task.stage)).weight_gradients()

    def _output_gradients(self, i: int, j: int, residue: LocalGraph) -> list[Tensor | None]:
        """Taken from where the stages that got the outputs have left them."""
        return [
            gradient
            for user, tensors in residue.outputs.items()
            for gradient in self._gradients_of(i, j, user, tensors)
        ]

    def _hand_back(self, i: int, j: int, residue: LocalGraph, gradients: Sequence[Tensor | None]) -> None:
        """Leave the gradients of what the stage received to the stages that sent it."""
        rest = iter(gradients)
        for source, leaves in residue.inputs.items():
            mine = [next(rest) for _ in leaves]
            if source != CALLER or any(leaf.requires_grad for leaf in leaves):
                self._tensors.gradients[i, j, source] = mine

    def _gradients_of(self, i: int, j: int, user: int, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if user == CALLER and self._plan.whole_step:
            return self._loss_gradient(outputs, i)
        gradients = self._tensors.gradients.pop((i, user, j), [None] * len(outputs))
        if user != CALLER:
            return gradients
        there = [gradient for gradient in gradients if gradient is not None]
        # Allocated on a stream of the caller or of the autograd engine, read on this compute stream.
        self._streams[Lane(self._stages[j].device.name, Queue.COMPUTE)].keep(there)
        return gradients

    def _loss_gradient(self, outputs: Sequence[Tensor], i: int) -> list[Tensor | None]:
        start = torch.full_like(outputs[0], self._plan.weights[i])
        if i in self._tensors.counts:
            start = self._tensors.counts[i].to(start)
        if self._plan.scale is not None:
            start = start * self._plan.scale
        return [start, *[None] * (len(outputs) - 1)]


@contextmanager
def _without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """The caller's engine passes on the whole gradients of ``parameters``: their hooks are not for parts of them."""
    aside = [
        (hooks, dict(hooks))
        for parameter in parameters
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if hooks
    ]
    try:
        for hooks, _ in aside:
            hooks.clear()
        yield
    finally:
        for hooks, kept in aside:
            hooks.update(kept)


def _some(tensors: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(tensors) for _ in range(count)]


def _check_tensors(index: int, sent: Mapping[int, Any], packets: Mapping[int, Packet]) -> None:
    if any(packet.count for packet in packets.values()):
        return
    value = next(iter(sent.values()), None)
    # What travels between stages is wrapped; say what the module itself returned.
    kind = type(getattr(value, "output", value)).__name__
    raise StageError(
        f"stage {index} returned {kind} without any tensor; a stage must return a tensor, or a nested tuple, list or "
        "dict that holds one"
    )


def _loss_and_count(returned: Any) -> tuple[Tensor, Tensor | None]:
    """What a loss function returned: the loss, or (mean loss, over how many)."""
    loss, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or loss.dim():
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LossError(f"loss_fn must return a tensor without dimensions, got {got}; reduce it to a scalar")
    if count is None:
        return loss, None
    count = torch.as_tensor(count, device=loss.device).detach()
    if count.dim():
        raise LossError(f"loss_fn returned a count of shape {tuple(count.shape)}; it must be one number")
    return loss, count
