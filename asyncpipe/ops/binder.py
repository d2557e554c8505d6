"""The binder: gives each task of one step its computation, and owns the step's tensors.

A forward leaves an output for the next stage and a *residue* for its own backward. Both are taken out where
they are used, so that nothing lives longer than the graph says::

    _inputs[i, j]     output of stage j-1, put by F(i, j-1), moved by C(i, j-1>j), taken by F(i, j)
    _residues[i, j]   put by F(i, j), recomputed by R(i, j), taken by B(i, j)
    _gradients[i, j]  gradient of stage j's output, put by B(i, j+1), moved by C(i, j+1>j), taken by B(i, j)

Everything here but ``bind`` and ``close`` runs on the thread of the task's device. No locks: the graph orders
whoever touches the same entry, and dictionaries bear the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncpipe.core.graph import TaskGraph
from asyncpipe.core.lower import CheckpointMode
from asyncpipe.core.task import Lane, Queue, Task, TaskKind
from asyncpipe.errors import LossError, StageError
from asyncpipe.ops.checkpoint import Recomputation, checkpoint
from asyncpipe.ops.context import CallerContext
from asyncpipe.ops.copy import Copier, to_device
from asyncpipe.ops.microbatch import Packet
from asyncpipe.ops.random import RandomStream
from asyncpipe.ops.stage import Stage
from asyncpipe.ops.stream import CudaStream, LaneStream, Timing

__all__ = ["Binder", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step is to compute, one entry a micro-batch."""

    inputs: list[Any]
    loss: Callable[..., Tensor] | None
    """Called with the last stage's output, and with the target if there are targets."""
    targets: list[Any]
    """Empty where the loss needs none."""
    weights: Sequence[float]
    """By how much each micro-batch's loss counts: the gradient that its backward starts from."""
    seed: int
    checkpoint: CheckpointMode
    keep_outputs: bool
    training: bool


@dataclass(slots=True, eq=False)
class _Residue:
    """What a forward keeps for its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    recomputation: Recomputation | None


@dataclass(slots=True, eq=False)
class _Cell:
    """Takes the structure of a stage's output past autograd functions, which carry tensors only."""

    packet: Packet | None = field(default=None)


class Binder:
    """Binds the tasks of one step of ``graph`` to ``stages`` and ``streams``."""

    def __init__(
        self,
        graph: TaskGraph,
        plan: StepPlan,
        stages: Sequence[Stage],
        streams: Mapping[Lane, LaneStream],
        copiers: Mapping[Lane, Copier],
        context: CallerContext,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._graph = graph
        self._plan = plan
        self._stages = stages
        self._streams = streams
        self._copiers = copiers
        self._context = context
        self._inputs: dict[tuple[int, int], Packet] = {(i, 0): Packet(x) for i, x in enumerate(plan.inputs)}
        self._residues: dict[tuple[int, int], _Residue] = {}
        self._gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self._targets: dict[int, Any] = {}
        self._events: dict[int, torch.cuda.Event] = {}
        self._actions: dict[TaskKind, Callable[[Task], None]] = {
            TaskKind.FORWARD: self._forward,
            TaskKind.RECOMPUTE: self._recompute,
            TaskKind.BACKWARD: self._backward,
        }

    def bind(self, task: Task) -> Callable[[], Timing | None]:
        """The computation of ``task``, for its executor."""
        return partial(self._copy if task.kind is TaskKind.COPY else self._compute, task)

    def close(self) -> None:
        """Drop every tensor that is left; the tracebacks of a failed step may keep the binder alive."""
        tables = (self._inputs, self._residues, self._gradients, self._targets, self._events, self.losses, self.outputs)
        for table in tables:
            table.clear()
        self._plan.inputs.clear()
        self._plan.targets.clear()

    # Tasks

    def _compute(self, task: Task) -> Timing | None:
        stream = self._streams[task.lane]
        with stream.use(), torch.set_grad_enabled(self._plan.training):
            self._await_dependencies(task, stream)
            timing = stream.begin()
            self._actions[task.kind](task)
            return self._finish(task, timing, stream)

    def _copy(self, task: Task) -> Timing | None:
        """Move what stage ``source`` left for ``stage``: an activation onward, or a gradient back."""
        key = task.microbatch, task.stage
        lane = self._streams[task.lane]
        copier = self._copiers[task.lane]
        back = task.is_gradient_copy
        tensors: Sequence[Tensor | None] = self._gradients[key] if back else self._inputs[key].tensors
        side = copier.side(tensors)
        # A copy out of CUDA memory to the CPU is over when its side stream is; every other one when its lane is.
        stream = side if side is not None and not isinstance(lane, CudaStream) else lane
        with lane.use(), torch.no_grad():
            self._await_dependencies(task, stream)
            if side is not None and side is not stream:
                self._await_dependencies(task, side)
            timing = stream.begin()
            moved = copier.copy(tensors, side)
            if back:
                self._gradients[key] = moved
            else:
                self._inputs[key].tensors = [tensor for tensor in moved if tensor is not None]
            return self._finish(task, timing, stream)

    def _await_dependencies(self, task: Task, stream: LaneStream) -> None:
        """Order the task behind what its dependencies queued on other streams: it reads what they write."""
        if self._events:
            for dependency in self._graph.dependencies[task.number]:
                event = self._events.get(dependency)
                if event is not None:
                    stream.wait(event)

    def _finish(self, task: Task, timing: Timing | None, stream: LaneStream) -> Timing | None:
        if timing is not None:
            assert isinstance(stream, CudaStream)
            self._events[task.number] = timing.end(stream.stream)
        return timing

    # Forward

    def _forward(self, task: Task) -> None:
        i, j = task.microbatch, task.stage
        stage = self._stages[j]
        packet = self._inputs.pop((i, j))
        leaves = self._leaves(packet.tensors, stage)
        if j == len(self._stages) - 1 and self._plan.targets:
            target = Packet(self._plan.targets[i])
            self._targets[i] = target.rebuild(self._from_caller(target.tensors, stage))
        cell = _Cell()
        function = partial(self._run_stage, i, stage, packet, cell)
        recomputation = None
        if self._plan.training and self._plan.checkpoint.recomputes(i, self._graph.shape.microbatches):
            outputs, recomputation = checkpoint(function, leaves)
        else:
            outputs = function(leaves)
        if self._plan.training:
            self._residues[i, j] = _Residue(leaves, outputs, recomputation)
        assert cell.packet is not None
        self._hand_on(i, j, cell.packet, [tensor.detach() for tensor in outputs])

    def _leaves(self, tensors: Sequence[Tensor], stage: Stage) -> list[Tensor]:
        """Inputs that gradients can be taken of. Those of stage 0 come from the caller and need none."""
        wants_grad = self._plan.training and stage.index > 0
        if not stage.index:
            tensors = self._from_caller(tensors, stage)
        return [t.detach().requires_grad_(wants_grad and (t.is_floating_point() or t.is_complex())) for t in tensors]

    def _from_caller(self, tensors: Sequence[Tensor], stage: Stage) -> list[Tensor]:
        """The caller's tensors on the stage's device, safe to read on its compute stream."""
        moved = [to_device(tensor, stage.device.physical) for tensor in tensors]
        # Allocated on the caller's stream: freed by the caller meanwhile, their memory must not be reused.
        self._streams[Lane(stage.device.name, Queue.COMPUTE)].keep([*tensors, *moved])
        return moved

    def _run_stage(self, i: int, stage: Stage, packet: Packet, cell: _Cell, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The stage (and at the last one the loss) as a function of tensors, the same whenever it is called.

        Runs on the device's thread, or on one of the autograd engine's when nothing recomputed it before.
        """
        # A first operation in place would overwrite what the stage before, or a recomputation, still reads.
        tensors = [tensor.clone() for tensor in tensors] if stage.copies_input else tensors
        with self._context.entered(), RandomStream(self._plan.seed, i, stage.index, stage.device.physical):
            output = stage(packet.rebuild(tensors))
            cell.packet = Packet(output)
            if not cell.packet.tensors:
                raise StageError(
                    f"stage {stage.index} returned {type(output).__name__} without any tensor; a stage must return a "
                    "tensor, or a nested tuple, list or dict that holds one"
                )
            if stage.index == len(self._stages) - 1 and self._plan.loss is not None:
                cell.packet = Packet(self._with_loss(output, i, self._plan.loss))
        return cell.packet.tensors

    def _with_loss(self, output: Any, i: int, loss_fn: Callable[..., Tensor]) -> tuple[Any, ...]:
        loss = loss_fn(output, *([self._targets[i]] if self._plan.targets else []))
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError(f"loss_fn must return a tensor without dimensions, got {got}; reduce it to a scalar")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LossError("the loss does not depend on any parameter; does a stage or loss_fn detach its output?")
        return (loss, output) if self._plan.keep_outputs else (loss,)

    def _hand_on(self, i: int, j: int, packet: Packet, tensors: list[Tensor]) -> None:
        if j < len(self._stages) - 1:
            packet.tensors = tensors
            self._inputs[i, j + 1] = packet
            return
        result = packet.rebuild(tensors)
        if self._plan.loss is None:
            self.outputs[i] = result
            return
        self.losses[i] = result[0]
        if self._plan.keep_outputs:
            self.outputs[i] = result[1]

    # Backward

    def _recompute(self, task: Task) -> None:
        recomputation = self._residues[task.microbatch, task.stage].recomputation
        assert recomputation is not None
        recomputation.run()

    def _backward(self, task: Task) -> None:
        i, j = task.microbatch, task.stage
        residue = self._residues.pop((i, j))
        is_last = j == len(self._stages) - 1
        grads = self._loss_gradient(residue.outputs, i) if is_last else self._gradients.pop((i, j))
        pairs = [
            (tensor, grad)
            for tensor, grad in zip(residue.outputs, grads, strict=True)
            if tensor.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        if j > 0:
            self._gradients[i, j - 1] = [leaf.grad for leaf in residue.inputs]

    def _loss_gradient(self, outputs: Sequence[Tensor], i: int) -> list[Tensor | None]:
        return [torch.full_like(outputs[0], self._plan.weights[i]), *[None] * (len(outputs) - 1)]
