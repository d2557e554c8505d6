"""What F, R, B, I and W compute: the forward of one stage, and the backward through its local graph.

Each stage has an autograd graph of its own. What it receives are leaves of that graph, what it sends is detached from
it, and gradients pass from stage to stage through the step's tables. Runs on the threads of the stages' devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.task import Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.errors import LossError, StageError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.checkpoint import checkpoint
from asyncpipe.ops.autograd.parameter_hooks import hooked, without_hooks
from asyncpipe.ops.autograd.random_streams import DeviceDraws
from asyncpipe.ops.autograd.run_backward import as_of, run_backward
from asyncpipe.ops.autograd.split_backward import SplitBackward
from asyncpipe.ops.device.copies import Copier
from asyncpipe.ops.device.inflow import Inflow, Key
from asyncpipe.ops.device.streams import LaneStream
from asyncpipe.ops.execute.offloading import KeptActivations, OffloadedGraph, ghost, has_own_memory, storages_of
from asyncpipe.ops.execute.shared_values import NOBODY, Readers
from asyncpipe.ops.execute.stage_run import LossResult, StageRun, StageSetup
from asyncpipe.ops.execute.step_tensors import LocalGraph, StepPlan, StepTensors
from asyncpipe.ops.model.microbatch import Arguments, Packet
from asyncpipe.ops.model.stage import CALLER, Stage
from asyncpipe.ops.torch_internals import tree_leaves, version_of

__all__ = ["StageCompute"]

_NOTHING = nullcontext()
_NO_ARGUMENTS = Arguments.of()
_NO_READERS: Readers = []


class StageCompute:
    """Forward, recompute and backward of every stage, on the tensors of one step."""

    def __init__(
        self,
        graph: TaskGraph,
        plan: StepPlan,
        tensors: StepTensors,
        stages: Sequence[Stage],
        streams: Mapping[Lane, LaneStream],
        copiers: Mapping[Lane, Copier],
        context: CallerContext,
        draws: Mapping[str, DeviceDraws],
        notes: StepNotes,
        offloads: OffloadedGraph,
    ) -> None:
        """``draws``: by device, what its tasks draw from. ``notes`` get what is seen of stages."""
        self.stages = stages
        self._rows = graph.rows
        self._plan = plan
        self._tensors = tensors
        # Of a stage that another worker has, no task runs here.
        here = [stage for stage in stages if not stage.device.is_elsewhere]
        lanes = {stage.index: Lane(stage.device.name, Queue.COMPUTE) for stage in here}
        self._streams = {stage: streams[lane] for stage, lane in lanes.items()}
        """Of the stages' devices."""
        self._copiers = {stage: copiers[lane] for stage, lane in lanes.items()}
        """To the stages' devices."""
        self._inflow = Inflow({}, {})
        self._setups = {
            stage.index: StageSetup(stage, plan, context, draws[stage.device.name], notes) for stage in here
        }
        self._sources: list[list[int]] = [[] for _ in stages]
        """By stage: the earlier stages that it receives something from."""
        for source, user in sorted(graph.wiring.links):
            self._sources[user].append(source)
        self._hooked: dict[int, list[nn.Parameter]] = {}
        """By stage: its parameters with hooks."""
        self._trained: dict[int, bool] = {}
        """By stage: whether a parameter of it needs a gradient."""
        self._offloads = offloads
        self._state_storages: dict[int, set[int]] = {}
        """By stage that offloads: the memory of its parameters and buffers."""

    # Forward

    def begin_inflow(self) -> Inflow:
        """Begin to bring what the caller gives to accelerators, before the first task."""
        if all(copier.is_on_host for copier in self._copiers.values()):
            return self._inflow
        tables, given = self._tensors, dict[Copier, dict[Key, Sequence[Tensor]]]()
        sent: dict[Key, Sequence[Tensor]] = {key: packet.tensors for key, packet in tables.activations.items()}
        sent.update((i, [target]) for i, target in tables.targets.items() if isinstance(target, Tensor))
        for key, tensors in sent.items():
            copier = self._copiers.get(self._rows.last_stage(key) if isinstance(key, int) else key[2])
            if copier is not None and not copier.is_on_host and copier.needs(tensors):
                given.setdefault(copier, {})[key] = tensors
        self._inflow = Inflow(given, tables.caller_ready)
        return self._inflow

    def forward(self, task: Task) -> None:
        """Take what the stage receives; store what it sends and, if a backward follows, its local graph."""
        i, j = task.microbatch, task.stage
        setup, tables, training = self._setups[j], self._tensors, self._plan.training
        received = self._received(i, j)
        from_caller = received[CALLER].tensors if CALLER in received else ()
        kept = self._kept(i, setup.stage, from_caller) if training and (i, j) in self._offloads.kept else None
        leaves: dict[int, list[Tensor]] = {}
        inputs: list[Tensor] = []
        for source, packet in received.items():
            leaves[source] = mine = self._leaves((i, source, j), packet)
            inputs += mine
        readers = self._readers(i, j, leaves) if tables.readers else _NO_READERS
        run = StageRun(setup, i, received, self._target(i, j), readers)
        recomputation = None
        with _NOTHING if kept is None else kept.saving():
            if setup.is_repeated and self._recomputes(i, setup.stage, inputs):
                with setup.stage.parameters.during():
                    flat, recomputation = checkpoint(run, inputs)
            else:
                flat = _run_once(run, inputs, j)
        if training:
            if from_caller:
                _tell_of_overwriting(from_caller, leaves[CALLER])
            _end_at_inputs(leaves)
        # Taken from the run: the caller's outputs will refer to the graph that refers to it, which would be a cycle.
        packets, run.packets = run.packets, {}
        outputs = _by_link(packets, flat)
        for user, packet in packets.items():
            self._send(i, j, user, packet, outputs[user])
        if run.next_readers is not None:
            for user, others in run.next_readers.items():
                tables.readers[i, j, user] = others
        if kept is not None or (recomputation is not None and self._plan.whole_step):
            # Recomputed, or gone for a while: in between, nobody here needs the values of what was sent.
            outputs = {user: [ghost(output) for output in sent] for user, sent in outputs.items()}
        if kept is not None:
            kept.keep_inputs(_flat(leaves))
            tables.kept[i, j] = kept
        if training:
            tables.local_graphs[i, j] = LocalGraph(leaves, outputs, recomputation)

    def _kept(self, i: int, stage: Stage, from_caller: Sequence[Tensor]) -> KeptActivations | None:
        """What will hold what a forward keeps; ``None`` where the stage's device has no memory of its own."""
        if not has_own_memory(stage.device):
            return None
        if stage.index not in self._state_storages:
            module = stage.module
            self._state_storages[stage.index] = storages_of([*module.parameters(), *module.buffers()])
        given = [leaf for leaf in tree_leaves(self._tensors.targets.get(i)) if isinstance(leaf, Tensor)]
        return KeptActivations(self._state_storages[stage.index] | storages_of([*from_caller, *given]))

    def _recomputes(self, i: int, stage: Stage, inputs: Sequence[Tensor]) -> bool:
        """Whether to checkpoint a forward. Not where nothing needs a gradient: what it sends must not seem to."""
        if not self._plan.checkpoint.recomputes(*self._rows.place(i)):
            return False
        if stage.index not in self._trained:
            self._trained[stage.index] = any(parameter.requires_grad for parameter in stage.module.parameters())
        return self._trained[stage.index] or any(tensor.requires_grad for tensor in inputs)

    def _received(self, i: int, j: int) -> dict[int, Packet]:
        activations, received = self._tensors.activations, {}
        if (i, CALLER, j) in activations:  # The caller gives something to few stages.
            received[CALLER] = activations.pop((i, CALLER, j))
        for source in self._sources[j]:
            received[source] = activations.pop((i, source, j))
        return received

    def _readers(self, i: int, j: int, leaves: Mapping[int, Sequence[Tensor]]) -> Readers:
        """Who else reads what stage ``j`` receives, tensor by tensor; empty if nobody does."""
        found = {source: self._tensors.readers.pop((i, source, j), None) for source in leaves}
        if not any(found.values()):
            return _NO_READERS
        return [r for source, tensors in leaves.items() for r in found[source] or [NOBODY] * len(tensors)]

    def _leaves(self, key: tuple[int, int, int], packet: Packet) -> list[Tensor]:
        """The stage's inputs as leaves, which require a gradient where their sender uses it. Empties the packet."""
        tensors, packet.tensors = packet.tensors, []
        if key[1] == CALLER:
            # Micro-batches are views of one batch. Only ``data`` has versions of its own: if a stage overwrites its
            # micro-batch, what was saved of the others is still what it was.
            tensors = [tensor.data for tensor in self._from_caller(key, tensors, key[2])]
        # What a stage has sent is detached, and nobody else has it.
        # The caller's require a gradient, too, which a whole step does not hand on: a reentrant torch.utils.checkpoint
        # in the first stage makes gradients of its parameters only if its input requires one.
        if self._plan.training:
            for tensor, want in zip(tensors, packet.wants_gradient, strict=True):
                if want:
                    tensor.requires_grad_()
        return tensors

    def _target(self, i: int, j: int) -> Arguments:
        """The arguments of the loss besides the output, on the last stage's device."""
        if not self._rows.is_last(j) or i not in self._tensors.targets:
            return _NO_ARGUMENTS
        given = self._tensors.targets.pop(i)
        if isinstance(given, Tensor):
            return Arguments(tuple(self._from_caller(i, (given,), j)), {})
        target = Packet(given)
        return Arguments.wrap(target.rebuild(self._from_caller(i, target.tensors, j)))

    def _from_caller(self, key: Key, tensors: Sequence[Tensor], j: int) -> list[Tensor]:
        """The caller's tensors on the stage's device, safe to read on its compute stream."""
        if not self._copiers[j].is_on_host:
            return self._inflow.take(self._copiers[j], key, tensors)
        fetch, ready = self._copiers[j].fetch, self._tensors.caller_ready
        return [fetch(tensor, ready) for tensor in tensors]

    def _send(self, i: int, j: int, user: int, packet: Packet, outputs: Sequence[Tensor]) -> None:
        packet.wants_gradient = [tensor.requires_grad for tensor in outputs]
        packet.tensors = [tensor.detach() for tensor in outputs]
        if user != CALLER:
            self._tensors.activations[i, j, user] = packet
            return
        if self._plan.loss is not None:
            result: Tensor | LossResult = packet.rebuild(packet.tensors)
            if isinstance(result, Tensor):
                self._tensors.losses[i] = result
                return
            self._tensors.losses[i] = result.loss
            if result.counted is not None:
                self._tensors.counts[i] = result.counted
            elif self._plan.items is not None:
                raise LossError(
                    "num_items_in_batch takes the place of the counts of a loss, and loss_fn returned none; have it "
                    "return (mean, count), or leave num_items_in_batch out"
                )
            if not self._plan.keep_outputs:
                return
            packet = Packet(result.output)
        self._tensors.outputs[i] = packet

    # Backward

    def recompute(self, task: Task) -> None:
        """Run the forward again, unless that is done already or nothing needs a gradient."""
        recomputation = self._tensors.local_graphs[task.microbatch, task.stage].recomputation
        self._tensors.kept.pop((task.microbatch, task.stage), None)
        if recomputation is not None:
            recomputation.retain = self._tensors.retain
            recomputation.run()

    def backward(self, task: Task) -> None:
        """From the gradients of what the stage sent, make those of what it received and of its parameters."""
        i, j = task.microbatch, task.stage
        tables = self._tensors
        retain = tables.retain
        tables.kept.pop((i, j), None)  # From now on what autograd holds is freed as the backward goes on.
        local_graph = tables.local_graphs[i, j] if retain else tables.local_graphs.pop((i, j))
        if local_graph.recomputation is not None:
            local_graph.recomputation.retain = retain
            # Unless an R task has. Not inside the backward, on a thread of the engine, which has not this task's turn.
            local_graph.recomputation.run()
        ends, starts = [], []
        for user, outputs in local_graph.outputs.items():
            for tensor, gradient in zip(outputs, self._output_gradients(i, j, user, outputs), strict=True):
                if gradient is not None and tensor.requires_grad:
                    ends.append(tensor)
                    starts.append(gradient)
        try:
            if ends:
                compiler = self.stages[j].compiler if retain and local_graph.recomputation is None else None
                kept = _NOTHING if compiler is None else compiler.retained()
                with self._draws(task, 1), self._without_hooks(j), kept:
                    run_backward(ends, starts, retain=retain)
            for source, leaves in local_graph.inputs.items():
                self._hand_back(i, j, source, leaves, [leaf.grad for leaf in leaves])
        finally:
            for leaves in local_graph.inputs.values():
                for leaf in leaves:
                    leaf.grad = None

    def input_gradient(self, task: Task) -> None:
        """The half of ``backward`` that earlier stages wait for. Only in whole steps, so no graph is retained."""
        i, j = task.microbatch, task.stage
        self._tensors.kept.pop((i, j), None)
        local_graph = self._tensors.local_graphs.pop((i, j))
        gradients: list[Tensor | None] = []
        for user, sent in local_graph.outputs.items():
            gradients += self._output_gradients(i, j, user, sent)
        if local_graph.recomputation is not None:
            leaves, outputs = local_graph.recomputation.pop_graph()
            gradients = list(map(as_of, gradients, outputs))
        else:
            leaves, outputs = _flat(local_graph.inputs), _flat(local_graph.outputs)
        split = SplitBackward(outputs, gradients, leaves)
        with self._draws(task, 1), self._without_hooks(j):
            made = iter(split.input_gradients())
        for source, mine in local_graph.inputs.items():
            self._hand_back(i, j, source, mine, list(islice(made, len(mine))))
        self._tensors.split_backwards[i, j] = split

    def weight_gradient(self, task: Task) -> None:
        """The other half of ``backward``: the parameters' gradients, from what ``input_gradient`` stored."""
        with self._draws(task, 2), self._without_hooks(task.stage):
            self._tensors.split_backwards.pop((task.microbatch, task.stage)).weight_gradients()

    def _draws(self, task: Task, branch: int) -> AbstractContextManager[object]:
        """What a backward draws from. torch's checkpoint, inside a stage, sets the state of its forward there."""
        setup = self._setups[task.stage]
        return setup.draws.during(task.microbatch, setup.stage.position, branch)

    def _without_hooks(self, j: int) -> AbstractContextManager[None]:
        """Disables hooks of the stage's parameters that had them when its first backward of this step began."""
        if j not in self._hooked:
            self._hooked[j] = hooked(self.stages[j].module.parameters())
        return without_hooks(self._hooked[j]) if self._hooked[j] else _NOTHING

    def _output_gradients(self, i: int, j: int, user: int, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of what the stage sent to ``user``, taken from the tables."""
        if user == CALLER and self._plan.whole_step:
            return self._loss_gradient(outputs, i)
        taken = self._tensors.gradients.pop((i, user, j), None)
        if taken is None:
            return [None] * len(outputs)
        if user == CALLER:
            # Hazard: this compute stream reads memory allocated on a stream of the caller or of the autograd engine.
            # Its memory must not be reused before that read is done.
            self._streams[j].keep(gradient for gradient in taken if gradient is not None)
        return taken

    def _hand_back(self, i: int, j: int, source: int, leaves: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
        """Store the gradients of what the stage received, for the stage that sent it."""
        if source != CALLER or (not self._plan.whole_step and any(leaf.requires_grad for leaf in leaves)):
            self._tensors.gradients[i, j, source] = gradients

    def _loss_gradient(self, outputs: Sequence[Tensor], i: int) -> list[Tensor | None]:
        if i in self._tensors.counts:
            # A count on the CPU becomes an argument of the kernel: `to` would make the host wait for the device.
            start = torch.empty_like(outputs[0]).fill_(self._tensors.counts[i])
        else:
            start = torch.full_like(outputs[0], self._plan.weights[i])
        if self._plan.scale is not None:
            start = start * self._plan.scale.to(start.device)
        return [start, *[None] * (len(outputs) - 1)]


def _run_once(run: StageRun, inputs: Sequence[Tensor], stage: int) -> list[Tensor]:
    """The outputs of a run that is not repeated. Raises ``StageError`` if autograd refuses a write into a leaf."""
    try:
        return run(inputs)
    except RuntimeError as error:
        if "leaf Variable that requires grad is being used in an in-place operation" not in str(error):
            raise
        raise StageError(
            f"stage {stage} overwrites in place a parameter, or what it received and did not overwrite in "
            "its first forward; use an operation that is not in place, or clone the tensor first"
        ) from error


def _tell_of_overwriting(given: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Count a write into ``leaves`` as one into what the caller has ``given``, of which a graph may have saved it."""
    for tensor, leaf in zip(given, leaves, strict=True):
        if version_of(leaf):
            torch.autograd.graph.increment_version(tensor)


def _end_at_inputs(inputs: Mapping[int, list[Tensor]]) -> None:
    """An input that a parameter was added to in place is the middle of the graph: no backward ends there."""
    for tensors in inputs.values():
        for k, tensor in enumerate(tensors):
            if not tensor.is_leaf:
                tensors[k] = tensor.detach()


def _by_link(packets: Mapping[int, Packet], flat: list[Tensor]) -> dict[int, list[Tensor]]:
    """The tensors ``flat`` of all links by the user of each."""
    if len(packets) == 1:
        return dict.fromkeys(packets, flat)
    rest = iter(flat)
    return {user: list(islice(rest, packet.count)) for user, packet in packets.items()}


def _flat(tensors_by_link: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in tensors_by_link.values() for tensor in tensors]
