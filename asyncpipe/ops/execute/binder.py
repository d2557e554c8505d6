"""The binder: gives each task of a step its computation, on the stream of its lane.

Everything here but ``bind`` runs on the thread of the task's device. No locks are needed: the graph orders tasks that
touch the same tensors (``ops/execute/step_tensors.py``), and dictionary operations are atomic under the GIL. What the
tasks of a stage compute is in ``ops/execute/compute.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.autograd.fork_join import forget_failed_backward
from asyncpipe.ops.autograd.random_streams import device_draws
from asyncpipe.ops.device.compile_gate import compile_gate
from asyncpipe.ops.device.copies import Copier
from asyncpipe.ops.device.device_clock import Timing
from asyncpipe.ops.device.inflow import Inflow
from asyncpipe.ops.device.streams import AcceleratorStream, CpuStream, LaneStream, record
from asyncpipe.ops.execute.compute import StageCompute
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.host_optimizer import update, updated_by
from asyncpipe.ops.execute.instruments import Instruments
from asyncpipe.ops.execute.learning_rates import set_learning_rate
from asyncpipe.ops.execute.offloading import OffloadedGraph
from asyncpipe.ops.execute.reductions import Reductions
from asyncpipe.ops.execute.replica_sums import ReplicaSums
from asyncpipe.ops.execute.step_tensors import StepPlan, StepTensors
from asyncpipe.ops.execute.surroundings import Surroundings
from asyncpipe.ops.execute.update_undo import UpdateUndo
from asyncpipe.ops.model.replicas import Twins
from asyncpipe.ops.model.sharded import gradient_norm, gradient_norms
from asyncpipe.ops.model.stage import Stage
from asyncpipe.ops.model.ties import Ties

__all__ = ["Binder", "StageResources", "normalize"]


@dataclass(frozen=True, slots=True, eq=False)
class StageResources:
    """What all steps of a pipeline share: stages, streams, optimizers."""

    stages: Sequence[Stage]
    ties: Ties
    streams: Mapping[Lane, LaneStream]
    copiers: Mapping[Lane, Copier]
    guard: GradientGuard
    optimizers: Mapping[int, torch.optim.Optimizer]
    """By stage; one for each stage that is updated inside the step."""
    schedules: Mapping[int, LRScheduler]
    """By stage: what sets the learning rate of its optimizer after each update, if the pipeline has schedules."""
    sums: Mapping[int, ReplicaSums]
    """By position of a stage in its row, where replicas update parameters of their own."""
    undo: UpdateUndo
    instruments: Instruments

    def begin_replicas(self) -> None:
        """No step runs, and one is about to begin: have the stages of later rows as those of row 0."""
        self.ties.begin()
        for each in self.sums.values():
            each.begin()

    def forget_replicas(self) -> None:
        """The parameters of all rows are in workers now."""
        self.ties.twins = Twins()
        for each in self.sums.values():
            each.forget()


_NOTHING = nullcontext()

_names: WeakKeyDictionary[TaskGraph, list[str]] = WeakKeyDictionary()
"""What profilers call the tasks of each graph."""
_offloads: WeakKeyDictionary[TaskGraph, OffloadedGraph] = WeakKeyDictionary()
"""What each graph offloads."""


class Binder:
    """Binds the tasks of ``graph`` (a whole step, or its forward or backward alone) to what they compute with."""

    def __init__(
        self,
        graph: TaskGraph,
        plan: StepPlan,
        tensors: StepTensors,
        resources: StageResources,
        context: CallerContext,
        crossings: Crossings | None = None,
    ) -> None:
        """``crossings``: what passes to and from other workers, if ``graph`` is a part of a step."""
        self.notes = StepNotes()
        """What the tasks measure besides their times."""
        self._graph = graph
        if graph not in _names:
            # The names last: another thread, whose steps follow the same graph, looks for them.
            _offloads[graph] = OffloadedGraph(graph)
            _names[graph] = [task.id for task in graph.tasks]
        self._names, self._offloads = _names[graph], _offloads[graph]
        self._plan = plan
        self._variables = context.variables
        self._tensors = tensors
        self._resources = resources
        drew = self.notes.drew
        streams = resources.streams
        self._draws = {lane.device: device_draws(plan.seed, streams[lane].device, drew) for lane in graph.lanes}
        """What the tasks of each device draw from."""
        self._compute_of = StageCompute(
            *(graph, plan, tensors, resources.stages, streams, resources.copiers, context),
            *(self._draws, self.notes, self._offloads),
        )
        self._timings: dict[int, Timing] = {}
        """Of the tasks that accelerators have queued."""
        self.last: dict[int, torch.Event] = {}
        """By number of a lane: the event behind the last of its tasks that was queued."""
        self._streams = [resources.streams[lane] for lane in graph.lanes]
        """Of the graph's lanes."""
        self._on_host = all(isinstance(stream, CpuStream) for stream in resources.streams.values())
        """Whether there is no other device than the CPU."""
        self._rows = graph.rows
        self._reductions = Reductions(graph, tensors, resources.sums, resources.guard)
        self._gates = frozenset(graph.gates)
        self._crossings = crossings

    def begin(self, ready: Mapping[torch.device, torch.Event]) -> Inflow:
        """Begin to bring what the caller gives, which ``ready`` is behind; before the first task, on any thread."""
        self._tensors.caller_ready = ready
        return self._compute_of.begin_inflow()

    def bind(self, task: Task) -> Callable[[], Timing | None]:
        """The computation of ``task``, to be called on its device's thread inside ``around``."""
        function = self._bound(task)
        return function if self._crossings is None else partial(self._run_and_send, task, function, self._crossings)

    def _bound(self, task: Task) -> Callable[[], Timing | None]:
        if task.kind is TaskKind.COPY:
            return partial(self._run, task, self._pass_on if self._on_host else self._copy)
        if task.kind in (TaskKind.OFFLOAD, TaskKind.LOAD):
            return partial(self._run, task, self._move)
        action = self._action(task.kind)
        if task.number in self._offloads.frees:
            action = partial(self._free_and, action)
        return partial(self._run, task, action if self._on_host else partial(self._queue, action))

    def around(self, device: str) -> AbstractContextManager[None]:
        """What the tasks of ``device`` run inside, one or many."""
        stream = self._resources.streams[Lane(device, Queue.COMPUTE)]
        return Surroundings(stream, self._plan.training, self._draws[device], self._variables)

    def _action(self, kind: TaskKind) -> Callable[[Task], None]:
        # Not a table of bound methods: its reference cycle would keep the binder and the stages alive until the garbage
        # collector runs.
        if kind is TaskKind.FORWARD:
            return self._compute_of.forward
        if kind is TaskKind.BACKWARD:
            return self._compute_of.backward
        if kind is TaskKind.RECOMPUTE:
            return self._compute_of.recompute
        if kind is TaskKind.INPUT_GRADIENT:
            return self._compute_of.input_gradient
        if kind is TaskKind.WEIGHT_GRADIENT:
            return self._compute_of.weight_gradient
        if kind is TaskKind.SUM:
            return self._sum
        if kind is TaskKind.REDUCE:
            return self._reduce
        if kind is TaskKind.GATHER:
            return self._gather
        if kind is TaskKind.NORM:
            return self._norm
        assert kind is TaskKind.UPDATE, "copies compute nothing"
        return self._update

    def _run(self, task: Task, compute: Callable[[Task], Timing | None]) -> Timing | None:
        instruments = self._resources.instruments
        gate = compile_gate.task() if compile_gate.is_used else _NOTHING
        with instruments.named(self._names[task.number]), gate:
            try:
                timing = compute(task)
            except BaseException:
                forget_failed_backward()
                raise
        if instruments.sample_memory:
            instruments.sample(self._stream(task).device, self.notes)
        return timing

    def _run_and_send(self, task: Task, function: Callable[[], Timing | None], crossings: Crossings) -> Timing | None:
        timing = function()
        crossings.left(task.number, None if timing is None else timing.ended)
        return timing

    def _queue(self, compute: Callable[[Task], None], task: Task) -> Timing | None:
        """Queue a task's computation behind what it depends on, on the stream of its lane."""
        stream = self._stream(task)
        self._await_dependencies(task, stream)
        timing = stream.begin()
        compute(task)
        return self._finish(task, timing)

    def _stream(self, task: Task) -> LaneStream:
        return self._streams[self._graph.lane_of[task.number]]

    def _pass_on(self, task: Task) -> None:
        """A copy between devices of one CPU: nothing moves, and nothing is to be waited for."""
        source = task.source
        assert source is not None
        tensors: Sequence[Tensor | None]
        if task.microbatch == WHOLE_STEP:
            tensors, put = self._tied(task, source)
            put(list(tensors))
        elif task.is_gradient_copy:
            tensors = self._tensors.gradients[task.microbatch, source, task.stage]
        else:
            tensors = self._tensors.activations[task.microbatch, source, task.stage].tensors
        self.notes.copied[task.number] = sum([tensor.nbytes for tensor in tensors if tensor is not None])

    def _copy(self, task: Task) -> Timing | None:
        """Copy between two stages: activations forward or gradients back, of a micro-batch or of tied parameters."""
        assert task.source is not None
        lane = self._stream(task)
        copier = self._resources.copiers[task.lane]
        tensors, put = self._tied(task, task.source) if task.microbatch == WHOLE_STEP else self._sent(task, task.source)
        self.notes.copied[task.number] = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        side = copier.side(tensors)
        # A copy from an accelerator to the CPU is done when its side stream is, every other copy when its lane is.
        stream = side if side is not None and not isinstance(lane, AcceleratorStream) else lane
        # Tied tensors are read and written here. For those of a micro-batch the copier makes its lane current.
        with lane.use() if task.microbatch == WHOLE_STEP or side is not None else _NOTHING, torch.no_grad():
            self._await_dependencies(task, stream)
            if side is not None and side is not stream:
                self._await_dependencies(task, side)
            timing = stream.begin()
            put(copier.copy(tensors, side))
            return self._finish(task, timing)

    def _move(self, task: Task) -> Timing | None:
        """Move what a forward keeps to the host (O), or back (L). Nothing where the device's memory is the host's."""
        lane, compute = self._stream(task), self._resources.streams[Lane(task.lane.device, Queue.COMPUTE)]
        kept = self._tensors.kept.get((task.microbatch, task.stage))
        with lane.use(), torch.no_grad():
            self._await_dependencies(task, lane)
            if task.number in self._offloads.frees:
                # Hazard: what is freed here goes back to the compute stream's memory, and an offload may still read it.
                self._await_dependencies(task, compute)
                self._free(task)
            timing = lane.begin()
            if kept is not None:
                moved = kept.offload(lane) if task.kind is TaskKind.OFFLOAD else kept.load(lane, compute)
                self.notes.copied[task.number] = moved
            return self._finish(task, timing)

    def _free_and(self, action: Callable[[Task], None], task: Task) -> None:
        self._free(task)
        action(task)

    def _free(self, task: Task) -> None:
        """Give back the memory of what was offloaded before ``task``, which waits for that."""
        for key in self._offloads.frees.get(task.number, ()):
            if (kept := self._tensors.kept.get(key)) is not None:
                kept.free()

    def _sent(self, task: Task, source: int) -> tuple[Sequence[Tensor | None], Callable[[list[Tensor | None]], None]]:
        """The tensors of one micro-batch that ``task`` copies, and a function that stores the copies."""
        key = task.microbatch, source, task.stage
        if task.is_gradient_copy:
            return self._tensors.gradients[key], partial(self._tensors.gradients.__setitem__, key)
        packet = self._tensors.activations[key]

        def put(moved: list[Tensor | None]) -> None:
            packet.tensors = [tensor for tensor in moved if tensor is not None]

        return packet.tensors, put

    def _tied(self, task: Task, source: int) -> tuple[Sequence[Tensor | None], Callable[[list[Tensor | None]], None]]:
        """The tied tensors that ``task`` copies, values or gradients, and a function that stores the copies."""
        arrived = self._tensors.tied_arrived.pop((source, task.stage), None)
        if task.is_gradient_copy:
            gradients = arrived or self._resources.ties.pop_gradients(task.stage, source)
            return gradients, partial(self._tensors.tied_gradients.__setitem__, (source, task.stage))
        ties = self._resources.ties
        return arrived or ties.values(source, task.stage), partial(ties.take, source, task.stage)

    def _await_dependencies(self, task: Task, stream: LaneStream) -> None:
        """Make ``stream`` wait for the task's dependencies.

        Hazard: the task reads tensors that its dependencies may still be writing on other streams.
        """
        if self._timings:
            for dependency in self._graph.dependencies[task.number]:
                if (timing := self._timings.get(dependency)) is not None:
                    stream.follow(timing)
        for event in () if self._crossings is None else self._crossings.brought(task.number):
            # Hazard: the edge's stream may still be bringing what another worker has sent.
            stream.wait(event)
        if task.number in self._gates and task.microbatch in self._tensors.gradients_ready:
            # Hazard: the autograd engine may still be writing the caller's gradient on its own stream.
            stream.wait(self._tensors.gradients_ready.pop(task.microbatch))

    def _finish(self, task: Task, timing: Timing | None) -> Timing | None:
        if timing is not None:
            self.last[self._graph.lane_of[task.number]] = timing.end()
            self._timings[task.number] = timing
        return timing

    # Tasks of the whole step

    def _pause_draws(self, task: Task) -> None:
        """An optimizer draws from the default generators."""
        self._draws[task.lane.device].pause()

    def _sum(self, task: Task) -> None:
        """Add the gradients of replicas to those of this stage's parameters, in the order of the stages."""
        self._pause_draws(task)
        with torch.no_grad():
            self._resources.ties.sum_gradients(task.stage, self._tensors.tied_gradients)

    def _reduce(self, task: Task) -> None:
        """Add up the own part of a bucket over the replicas."""
        lane, compute = self._stream(task), self._resources.streams[Lane(task.lane.device, Queue.COMPUTE)]
        here = [not stage.device.is_elsewhere for stage in self._resources.stages]
        with lane.use(), self._beside_counts(task):
            made = self._reductions.reduce(task, here, partial(self._beside, task))
        # Hazard: gradients that hooks have made were allocated on this lane, and the compute stream reads them. Their
        # memory must not be reused before that read is done.
        compute.keep(made)

    def _gather(self, task: Task) -> None:
        """Take the parts of a bucket that the replicas have added up, or updated."""
        self._reductions.gather(task, partial(self._beside, task))

    @contextmanager
    def _beside(self, task: Task, like: Tensor) -> Iterator[Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
        """For ``task`` to read what another replica has on the device of ``like``: a stream there, behind the task's
        dependencies, is current. Gives what brings tensors to the task's own device."""
        lane, copier = self._stream(task), self._resources.copiers[task.lane]
        side = copier.side([like])

        def bring(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            if self._on_host:
                return tensors
            # Hazard: this lane reads gradients of a compute stream, which frees them behind hooks, or when the step
            # fails. Their memory must not be reused before that read is done.
            lane.keep(tensor for tensor in tensors if tensor.device == lane.device)
            moved = copier.copy(tensors, side)
            if side is not None and not isinstance(lane, AcceleratorStream):
                # Hazard: this thread reads on the host what the copy has not brought yet.
                lane.wait(record(side.stream))
            return [tensor for tensor in moved if tensor is not None]

        if side is not None:
            self._await_dependencies(task, side)
        with nullcontext() if side is None else side.use():
            yield bring

    def _update(self, task: Task) -> None:
        """Run the stage's optimizer on its complete gradients, and clear them."""
        self._pause_draws(task)
        optimizer = self._resources.optimizers[task.stage]
        schedule = self._resources.schedules.get(task.stage)
        parameters = updated_by(optimizer)
        undo, guard = self._resources.undo, self._resources.guard
        own = (*self._resources.stages[task.stage].module.parameters(), *parameters) if undo.is_on else ()
        earlier = {parameter: guard.earlier(parameter) for parameter in own}
        with torch.no_grad():
            if self._plan.clip_norm is None:
                self._complete(task, parameters)
                if self._plan.gradient_norms and (self._reductions.shards or not self._rows.stage_row(task.stage)):
                    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                    self._tensors.gradient_norms[task.stage] = gradient_norm(gradients)
                if self._plan.clip_value is not None:
                    nn.utils.clip_grad_value_(parameters, self._plan.clip_value)
            else:
                (norm,) = self._brought(task, [self._total(task.stage)])
                if not self._reductions.shards and self._reductions.has(task.stage):
                    self._reductions.begin_update(task.stage)
                nn.utils.clip_grads_with_norm_(parameters, self._plan.clip_norm, norm)
        if self._plan.learning_rate is not None:
            set_learning_rate(optimizer, self._plan.learning_rate)
        guard.forget(parameters)  # They have the earlier ones in them.
        undo.save(self._tensors, optimizer, schedule, earlier)
        if schedule is not None and task.stage == self._graph.wiring.updates[0]:
            rate = optimizer.param_groups[0]["lr"]
            # The host does not wait for one that is on an accelerator.
            self._tensors.rates += [float(rate)] if not isinstance(rate, Tensor) or rate.is_cpu else []
        update(optimizer, self._stream(task))
        guard.updated(parameters)
        if schedule is not None:
            schedule.step()

    def _complete(self, task: Task, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients of ``parameters`` those that the optimizer uses."""
        with self._beside_counts(task):
            if self._reductions.has(task.stage):
                # Hazard: the optimizer reads on this stream what was allocated on that of A. Its memory must not be
                # reused before that read is done.
                self._stream(task).keep(self._reductions.begin_update(task.stage))
            elif self._plan.clip_norm is None and not self._resources.undo.is_on:
                normalize(parameters, self._tensors)
                self._resources.guard.commit_some(parameters)
            else:  # The step may still fail before the optimizer uses them, or the update be undone.
                normalize(parameters, self._tensors)
                self._resources.guard.complete(parameters)

    def _norm(self, task: Task) -> None:
        """Complete the stage's gradients and take their norm; at the last such task, take that of all stages."""
        stage, tensors = task.stage, self._tensors
        parameters = updated_by(self._resources.optimizers[stage])
        with torch.no_grad():
            if self._reductions.shards or not self._reductions.has(stage):
                self._complete(task, parameters)
            # In the model's order, so that the norm of all has the same bits wherever the model is cut.
            mine = frozenset(parameters)
            in_order = [each for each in self._resources.stages[stage].module.parameters() if each in mine]
            gradients = [each.grad for each in in_order or parameters if each.grad is not None]
            norms = gradient_norms(gradients) if gradients else torch.zeros(1, device=self._stream(task).device)
            tensors.norms[stage] = norms
            if self._plan.gradient_norms:
                tensors.gradient_norms[stage] = torch.linalg.vector_norm(norms)
            if stage == self._graph.wiring.norm:
                brought = self._brought(task, [each for _, each in sorted(tensors.norms.items())])
                tensors.gradient_norms[WHOLE_STEP] = torch.linalg.vector_norm(torch.cat(brought))

    def _total(self, stage: int) -> Tensor:
        """The norm of all gradients, for U of ``stage``."""
        came = self._tensors.totals.get(stage)
        return self._tensors.gradient_norms[WHOLE_STEP] if came is None else came

    def _brought(self, task: Task, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What other tasks have made, which ``task`` depends on, on its device."""
        brought: list[Tensor] = []
        for tensor in tensors:
            with self._beside(task, tensor) as bring:
                brought += bring([tensor])
        return brought

    @contextmanager
    def _beside_counts(self, task: Task) -> Iterator[None]:
        """Streams for ``task`` to read the losses' counts from, where these are on another accelerator."""
        lane = self._stream(task)
        counts = [each for each in self._tensors.counts.values() if not each.is_cpu and each.device != lane.device]
        with ExitStack() as streams:
            for device in dict.fromkeys(count.device for count in counts):
                side = AcceleratorStream(device)
                for counted in self._graph.tasks:
                    is_last = counted.kind is TaskKind.FORWARD and self._rows.is_last(counted.stage)
                    if is_last and counted.number in self._timings:
                        # Hazard: the copy out of that device, on this side stream, reads counts that a last stage's
                        # forwards may still be writing.
                        side.follow(self._timings[counted.number])
                # Hazard: the counts were allocated on a last stage's compute stream and are read on this one. Their
                # memory must not be reused before that read is done.
                side.keep(count for count in counts if count.device == device)
                streams.enter_context(side.use())
            if counts:
                streams.enter_context(lane.use())
            yield


def normalize(parameters: Iterable[nn.Parameter], tensors: StepTensors) -> None:
    """Divide new gradients by the sum of the losses' counts, if the losses return counts."""
    if not tensors.counts:
        return
    factors: dict[torch.device, Tensor | None] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            device = parameter.device
            if device not in factors:
                factors[device] = tensors.normalizer(device)
            factor = factors[device]
            if factor is None:
                return
            parameter.grad.mul_(factor)
