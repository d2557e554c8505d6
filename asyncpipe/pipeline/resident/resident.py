"""One pipeline's stages in this worker: loaded once, then run by parts of steps, and asked for their state."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncpipe.core.engine.edge_shape import EdgeShape, EdgeState
from asyncpipe.core.graph.part import Departure, Part, part
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.hangs.reports import WorkerReport
from asyncpipe.core.records.worker_notes import EdgeTraffic, WorkerUse
from asyncpipe.errors import EdgeError, OptionError, PipelineClosedError
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.ops.device.memory import allocated_bytes
from asyncpipe.ops.device.process_settings import ProcessSettings
from asyncpipe.ops.device.wire import from_buffers, from_wire, to_buffers
from asyncpipe.ops.edges.connect import Edges, connect
from asyncpipe.ops.edges.edge_in import EdgeIn
from asyncpipe.ops.edges.edge_out import EdgeOutCounters
from asyncpipe.ops.edges.message import EdgeHeader, EdgeMessage, ReceivedMessage
from asyncpipe.ops.edges.shaped import ShapedArrivals
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.optimizer_states import load_optimizer_states, optimizer_states
from asyncpipe.ops.execute.stage_files import StoredStages, copied_stages, stored_model, stored_optimizers
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.ops.model.feed import Feed
from asyncpipe.ops.model.shipping import NamedState, receive_model, state_names
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.ops.model.state_files import write_state
from asyncpipe.pipeline.build import PipelineParts, build
from asyncpipe.pipeline.pool import DevicePool, Tenancy
from asyncpipe.pipeline.resident.part_step import PartStep
from asyncpipe.pipeline.step_inputs import CutInputs, StepInputs, StepOptions
from asyncpipe.pipeline.wire_messages import ChangeSchedule, Flags, LoadPipeline, StepWork
from asyncpipe.runtime.arrivals import Listens
from asyncpipe.runtime.part_messages import EdgeBroken, StartPart
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.meeting import Door, meet

__all__ = ["Resident"]

MOST_BATCHES = 3
"""Of those that a feed has made: one is for the next step, one is being made, another may be left of a failed step."""


class Resident:
    """Used on the worker's loop, except for what edges call.

    A message holds its credit until the task that waits for it has run. The window of an edge has room for all messages
    of the steps that have begun here and are not settled, so no schedule can deadlock: a task may wait for any of them,
    whatever came before it and is still to be taken. What comes for a step that has not begun here takes room of others
    until it begins; and it does, since the controller tells all workers to begin a step, whatever edges do.
    """

    def __init__(self, load: LoadPipeline, pool: DevicePool, control: ControlClient) -> None:
        """Raises what ``build`` raises."""
        own = [physical for (_, physical), worker in zip(load.devices, load.workers, strict=True) if worker == load.me]
        resolve_devices(own)  # The controller may be on another host.
        named = [Device(name, torch.device(physical)) for name, physical in load.devices]
        devices = [
            device if number == load.me else device.elsewhere()
            for device, number in zip(named, load.workers, strict=True)
        ]
        self._load = replace(load, model=())  # The tensors are those of the stages now, or copied to their devices.
        self._worker_of = {device.name: worker for device, worker in zip(devices, load.workers, strict=True)}
        self._own = [device for device in devices if not device.is_elsewhere]
        self._control = control
        self._worker = control.name
        load.settings.apply()
        self._parts: PipelineParts = build(_model(load), devices, from_wire(load.options))
        self._tenancy = Tenancy(pool, self._own, Tenant(load.share), own=False)
        self._parts_of: WeakKeyDictionary[TaskGraph, Part] = WeakKeyDictionary()
        self._edges = Edges({}, {})
        self._shaped: ShapedArrivals | None = None
        """Where edges are slower than they are, or do not work."""
        self._copies: dict[str, Any] = {}
        """Copies of the own stages' states that are still to be written."""
        self._listener: Listens | None = None
        """Whose thread takes messages itself."""
        self._made: dict[int, CutInputs] = {}
        """Mini-batches of the feed that wait for their steps, by number."""
        self._epoch = 0
        self._lock = threading.Lock()
        """Guards what follows, which edges use as well."""
        self._steps: dict[int, PartStep] = {}
        """Those that were not settled."""
        self._early: dict[int, list[ReceivedMessage]] = {}
        """Messages for steps that have not begun here."""
        self._last = -1
        """The last step that has begun here."""
        self._windows: dict[int, int] = {}
        """By worker that sends: how many messages of its edge may be held here."""
        self._told: dict[int, EdgeOutCounters] = {}
        """What the controller knows of what was sent, by the worker that receives."""
        self._line: object = None
        """Whose turn the gradients are, while steps overlap."""

    async def open(self, door: Door | None) -> None:
        """Connect to the other workers, which come through ``door``, and start the devices' threads."""
        await self._tenancy.open()
        load = self._load
        # Where a worker has one device, it is this device that waits for messages. Where jobs share it, it may be busy
        # with others all the time.
        is_alone = len(self._own) == 1 and not (load.share.job or load.share.background)
        self._listener = self._tenancy.pool.threads.listener(self._own[0].name) if is_alone else None
        arrived = self._arrived
        if load.shapes is not None:
            mine = {sender: shape for (sender, receiver), shape in load.shapes.items() if receiver == load.me}
            self._shaped = ShapedArrivals(mine, self._arrived)
            arrived = self._shaped.arrived
        if load.pairs:
            assert door is not None
            self._edges = await asyncio.to_thread(self._connect, door, arrived)
        if self._listener is not None:
            for incoming in self._shared_edges():
                self._listener.listen(incoming.descriptor, incoming.take)

    def _connect(self, door: Door, arrived: Callable[[ReceivedMessage], None]) -> Edges:
        load = self._load
        secret = self._control.edge_secret
        return connect(
            load.me,
            meet(load.me, load.pairs, door, load.addresses, job=str(load.pipeline), secret=secret),
            transport=load.transports,
            device=next((device.physical for device in self._own if device.is_accelerator), None),
            on_message=arrived,
            on_broken=self._broken,
            window=1,
            # What arrives late is none of the device's.
            shared=self._listener is not None and self._shaped is None,
        )

    def _shared_edges(self) -> list[EdgeIn]:
        """Those from which the device takes messages itself."""
        return [incoming for incoming in self._edges.into.values() if incoming.is_shared]

    async def close(self) -> None:
        """Wait for steps under way, and end what belongs to the pipeline."""
        await self._tenancy.aclose()
        if self._listener is not None:
            for incoming in self._shared_edges():
                self._listener.ignore(incoming.descriptor, incoming.take)
        await asyncio.to_thread(self._edges.close)
        if self._shaped is not None:
            await asyncio.to_thread(self._shaped.close)

    def reshape(self, shapes: Mapping[tuple[str, str], EdgeShape]) -> None:
        """Give edges, by the names of both workers, other shapes."""
        numbers = {name: number for number, name in self._load.names.items()}
        for (sender, receiver), shape in shapes.items():
            if receiver != self._worker or numbers.get(sender) not in self._edges.into:
                continue
            if self._shaped is None:
                raise OptionError("edges are reshaped in a pool that shape_edges was called for before it opened")
            self._shaped.reshape(numbers[sender], shape)
            if shape.state is EdgeState.CUT:
                self._edges.into[numbers[sender]].sever()

    # Steps

    def start(self, start: StartPart) -> PartStep:
        """Begin a part of a step."""
        try:
            return self._start(start, from_buffers(start.work))
        except BaseException:
            with self._lock:
                self._last = start.step
                early = self._early.pop(start.step, [])
            for message in early:
                message.release()
            raise

    def _start(self, start: StartPart, work: StepWork) -> PartStep:
        if work.epoch > self._epoch:
            self._epoch = work.epoch
            self._edges.advance(work.epoch)
            if self._shaped is not None:
                self._shaped.advance(work.epoch)
        (work.settings or ProcessSettings()).apply()
        if work.flags is not None:
            self._set_flags(work.flags)
        inputs, takes, targets = self._inputs(work)
        tensors = StepTensors.of(takes, targets)
        graph = inputs.graph
        own = self._part(graph)
        left: dict[tuple[int, int], float] | None = {} if self._load.is_far else None
        send = partial(self._send, start.step, work.epoch, left)
        crossings = Crossings(graph, own, tensors, self._parts.resources.ties, send)
        step = PartStep(
            self._worker,
            start.step,
            inputs,
            self._tenancy,
            own,
            tensors,
            crossings,
            overlaps=work.overlaps,
            use=self._use if work.is_observed else None,
            left=left,
        )
        self._widen([*(each.part for each in self._steps.values()), own])
        before = self._steps.get(-1 if start.after is None else start.after)
        if work.overlaps and step.training and self._line is None:
            guard = self._parts.resources.guard
            self._line = object()
            guard.enter(self._line, self._line)
            guard.begin(self._parts.module.parameters(), repeats=True)
        step.begin(None if before is None else before.execution)
        with self._lock:
            self._last = start.step
            self._steps[start.step] = step
            early = self._early.pop(start.step, [])
        for message in early:
            step.arrived(message)
        return step

    def _inputs(self, work: StepWork) -> tuple[StepInputs, Sequence[Mapping[int, Any]], Sequence[Any]]:
        """The step's inputs, and what its stages take of them, and its targets, by micro-batch."""
        if work.number is not None:
            made = self._made.pop(work.number)
            takes, targets = made.takes, made.targets
        else:
            takes, targets = work.takes.taken(), work.targets.taken()
            if work.stage is not None:
                takes = [{work.stage: value} for value in takes]
        options = self._parts.options
        inputs = StepInputs(
            self._parts,
            StepOptions(update=work.update),
            work.plan.training,
            work.microbatches,
            replace(work.plan, loss=options.loss_fn if work.has_loss else None),
            work.context,
            takes,
            targets,
            ready_made=True,
            is_padded_unevenly=False,
        )
        return inputs, takes, targets

    async def make_batch(self, number: int) -> CutInputs:
        """Have the feed make the mini-batch of step ``number``, and keep what the own stages take; what it is like."""
        made = await asyncio.to_thread(self._cut, number)
        while len(self._made) >= MOST_BATCHES:
            del self._made[next(iter(self._made))]
        self._made[number] = made
        return made.without_tensors(number)

    def _cut(self, number: int) -> CutInputs:
        feed = self._parts.options.feed
        assert isinstance(feed, Feed)
        made = CutInputs.of(self._parts, *feed.batch(number), has_loss=True)
        first, last = (self._parts.resources.stages[end].device.is_elsewhere for end in (0, -1))
        return replace(
            made, takes=[{} for _ in made.sizes] if first else made.takes, targets=() if last else made.targets
        )

    def stop(self, number: int) -> None:
        """Begin no more tasks of a step."""
        if (step := self._steps.get(number)) is not None:
            step.stop()

    def settle(self, number: int, *, keep: bool) -> None:
        """A step is over in all workers."""
        with self._lock:
            step = self._steps.pop(number, None)
        if step is not None:
            step.settle(keep=keep)
        if self._line is not None and not self._steps:
            self._parts.resources.guard.end_repeats(self._line)
            self._line = None

    def _part(self, graph: TaskGraph) -> Part:
        if graph not in self._parts_of:
            self._parts_of[graph] = part(graph, [device.name for device in self._own])
        return self._parts_of[graph]

    def _widen(self, parts: Iterable[Part]) -> None:
        """Make room for all messages of ``parts``, which are under way together."""
        coming: Counter[int] = Counter()
        for each in parts:
            for device, count in each.arrivals_from.items():
                coming[self._worker_of[device]] += count
        for sender, count in coming.items():
            if count != self._windows.get(sender):
                self._windows[sender] = count
                self._edges.into[sender].set_window(count)

    def _set_flags(self, flags: Flags) -> None:
        module = self._parts.module
        for each, training in zip(module.modules(), flags.training, strict=True):
            each.training = training
        for parameter, requires_grad in zip(module.parameters(), flags.requires_grad, strict=True):
            parameter.requires_grad_(requires_grad)

    # Messages between workers

    def _send(
        self,
        step: int,
        epoch: int,
        left: dict[tuple[int, int], float] | None,
        departure: Departure,
        meta: bytes,
        tensors: Sequence[Tensor | None],
        event: torch.Event | None,
    ) -> None:
        if left is not None:
            left[departure.task, departure.dependency] = time.perf_counter()
        header = EdgeHeader(epoch, step, departure.task, departure.dependency)
        self._edges.out[self._worker_of[departure.device]].send(EdgeMessage(header, tensors, meta, event))

    def _arrived(self, message: ReceivedMessage) -> None:
        """Called on an edge's thread."""
        number = message.header.step
        with self._lock:
            step = self._steps.get(number)
            if step is None and number > self._last:
                self._early.setdefault(number, []).append(message)
                return
        if step is None:
            message.release()  # It has ended here, so it failed or was cancelled.
        else:
            step.arrived(message)

    def _broken(self, error: EdgeError) -> None:
        """Called on an edge's thread. The controller is told, which knows whether the other worker is there."""
        assert error.edge is not None
        sender, receiver = (self._load.names[int(each)] for each in error.edge)
        how = f"{type(error.__cause__).__name__}: {error.__cause__}"
        named = EdgeError(
            f"the edge from worker {sender!r} to worker {receiver!r} broke ({how})", error.peers, (sender, receiver)
        )
        self._control.send(EdgeBroken(self._load.pipeline, named), urgent=True)

    def _use(self) -> WorkerUse:
        """What the controller's observers want to know of this worker."""
        sent = {}
        for peer, edge in self._edges.out.items():
            counted = edge.counters()
            before = self._told.get(peer, EdgeOutCounters(0, 0, 0, 0.0))
            self._told[peer] = counted
            sent[self._load.names[peer]] = EdgeTraffic(
                counted.messages - before.messages,
                counted.bytes - before.bytes,
                counted.waited_seconds - before.waited_seconds,
            )
        return WorkerUse(allocated_bytes(torch.device("cpu")), sent)

    # For who looks for the root of a hang, on the thread that answers pings: nothing here may wait for another thread

    def report(self, number: int) -> WorkerReport:
        """What is known here of a step, and of the edges."""
        parts = {step: step.report() for step in tuple(self._steps.values())}
        mine = next((report for step, report in parts.items() if step.number == number), None)
        sends = {self._load.names[peer]: edge.report(number) for peer, edge in self._edges.out.items()}
        takes = {}
        for peer, edge in self._edges.into.items():
            holders = {
                step.whole.tasks[header.task].lane.device
                for header in edge.held
                for step, report in parts.items()
                if step.number == header.step and report is not None and header.task not in report.ended
            }
            under_way = 0 if self._shaped is None else self._shaped.under_way(peer)
            takes[self._load.names[peer]] = edge.report(under_way, frozenset(holders))
        moved = sum(each.sent for each in sends.values()) + sum(each.came for each in takes.values())
        if mine is not None:
            moved += len(mine.ended) + len(mine.came)
        return WorkerReport(moved, part=mine, sends=sends, takes=takes)

    def probe_edges(self) -> None:
        """Send every other worker a message that it releases at once: it is for a step that is over."""
        for edge in self._edges.out.values():
            with suppress(EdgeError):  # It is closed.
                edge.send(EdgeMessage(EdgeHeader(self._epoch, -1, 0, 0)))

    def step(self, number: int) -> PartStep | None:
        """The part of a step, if it is one of this pipeline and was not settled. From any thread."""
        return self._steps.get(number)

    # State

    def state(self) -> list[pickle.PickleBuffer]:
        """The own entries of the unsplit model's state, as ``to_buffers``; a tensor under its first name only."""
        self._check_idle()
        whole = self._parts.module.state_dict()
        state = {name: whole[name] for name, named in self._own_names().items() if named.first == name}
        return to_buffers(state, "the state of the model")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what concerns the own stages."""
        self._check_idle()
        # What modules load depends on the versions that are noted beside their state. What other workers have goes
        # along as it is, since batch norms make up what they miss.
        own = self._parts.module.state_dict()
        own.update((name, state[name]) for name in self._own_names() if name in state)
        self._parts.module.load_state_dict(own)

    def optimizer_states(self) -> list[pickle.PickleBuffer]:
        """What the own stages' optimizers remember, by name of the parameter, as ``to_buffers``."""
        self._check_idle()
        states = optimizer_states(self._parts.resources.optimizers.values(), self._parts.module)
        return to_buffers(states, "the state of the optimizers")

    def load_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over those of the own stages."""
        self._check_idle()
        load_optimizer_states(self._parts.resources.optimizers.values(), self._parts.module, states)

    def copy_stages(self) -> None:
        """Copy the states of the own stages, for ``write_copies``."""
        self._check_idle()
        stages = [stage.index for stage in self._parts.resources.stages if not stage.device.is_elsewhere]
        self._copies = copied_stages(self._parts.staged, stages, self._parts.resources.optimizers)

    async def write_copies(self, folder: Path) -> dict[str, str]:
        """Write them to files in ``folder``; returns the SHA-256 of each, by name. Steps go on meanwhile."""
        copies, self._copies = self._copies, {}
        return await asyncio.to_thread(_write, folder, copies)

    def read_stages(self, stored: StoredStages) -> None:
        """Take over what concerns the own stages of states in files."""
        self.load_state(stored_model(stored, self._own_names()))
        self.load_optimizer_states(stored_optimizers(stored, self._parts.module))

    def change(self, change: ChangeSchedule) -> None:
        """Use another schedule."""
        self._check_idle()
        parts = self._parts
        parts.graphs.change(from_wire(change.schedule), parts.options.microbatches, parts.checkpoint)

    def _own_names(self) -> dict[str, NamedState]:
        """Of what this worker's stages own in the unsplit model's state."""
        stages = self._parts.resources.stages
        names = state_names(self._parts.staged)
        return {name: named for name, named in names.items() if not stages[named.stage].device.is_elsewhere}

    def _check_idle(self) -> None:
        if self._steps:
            raise PipelineClosedError("a step is under way in this worker")


def _write(folder: Path, states: dict[str, Any]) -> dict[str, str]:
    """Write the states, each of which is released when it is written."""
    if not folder.is_dir():
        raise OptionError(f"a worker on {socket.gethostname()} has no {folder}; name a folder that all hosts share")
    return {name: write_state(folder / name, states.pop(name)) for name in tuple(states)}


def _model(load: LoadPipeline) -> StagedModel | StageFactory:
    if load.is_factory:
        factory: StageFactory = from_buffers(load.model)
        return factory
    model = receive_model(load.model)
    for parameter, trains in zip(model.module.parameters(), load.trains, strict=True):
        parameter.requires_grad_(trains)
    return model
