"""One pipeline's stages in this worker: loaded once, then run by parts of steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch

from asyncpipe.core.graph.part import Part, part
from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.hangs.reports import WorkerReport
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.errors import PipelineClosedError
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.ops.device.process_settings import ProcessSettings
from asyncpipe.ops.device.wire import from_buffers, from_wire
from asyncpipe.ops.edges.stage_group import StageGroup
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.reductions import Reductions
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.ops.model.sharded import refuse_split_backwards
from asyncpipe.ops.model.shipping import receive_model
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.build import PipelineParts, build
from asyncpipe.pipeline.pool import DevicePool, Tenancy
from asyncpipe.pipeline.resident.links import Links
from asyncpipe.pipeline.resident.part_step import PartStep
from asyncpipe.pipeline.stage_states import StageStates
from asyncpipe.pipeline.step_inputs import CutInputs, StepWork
from asyncpipe.pipeline.wire_messages import Flags, LoadPipeline
from asyncpipe.runtime.part_messages import StartPart
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.waits import drive
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.door import Door

__all__ = ["Resident"]

MOST_BATCHES = 3
"""Of those that a feed has made: one is for the next step, one is being made, another may be left of a failed step."""


class Resident:
    """Used on the worker's loop. ``Call`` names methods of this object, and of its ``states`` and ``links``."""

    def __init__(
        self, load: LoadPipeline, pool: DevicePool, control: ControlClient, group: StageGroup | None = None
    ) -> None:
        """Raises what ``build`` raises. ``group``: of the workers that have the stages together; this then blocks."""
        self.group = group
        own = {place: each for place, each in load.devices.items() if each.worker == load.me}
        resolve_devices([each.physical for each in own.values()])  # The controller may be on another host.
        names = [load.devices[k].name if k in load.devices else f"device {k}" for k in range(load.count)]
        devices = [
            Device(name, torch.device(own[k].physical))
            if k in own
            else Device(name, torch.device("meta"), is_elsewhere=True)
            for k, name in enumerate(names)
        ]
        self._load = replace(load, model=())  # The tensors are those of the stages now, or copied to their devices.
        self._own = [device for device in devices if not device.is_elsewhere]
        for device in self._own[:1]:
            if device.is_accelerator:  # Otherwise this thread would make a context on number 0.
                torch.get_device_module(device.physical).set_device(device.physical)
        self._worker = control.name
        load.settings.apply()
        self._parts: PipelineParts = build(
            _model(load), devices, from_wire(load.options), None if group is None else group.mesh
        )
        self._parts.graphs.renumber(load.schedule)
        self._tenancy = Tenancy(pool, self._own, Tenant(load.share), own=False)
        self._times = JobAccount("", True, load.share)
        """How long tasks take here."""
        self._parts_of: WeakKeyDictionary[TaskGraph, Part] = WeakKeyDictionary()
        self.links = Links(self._load, control)
        self.states = StageStates(self._parts, self._check_idle, None if load.place is None else load.place.rank)
        self._made: dict[int, CutInputs] = {}
        """Mini-batches of the feed that wait for their steps, by number."""
        self._line: object = None
        """Whose turn the gradients are, while steps overlap."""

    async def open(self, door: Door | None) -> None:
        """Connect to the other workers, which come through ``door``, and start the devices' threads."""
        await drive(self._tenancy.opened())
        if self._load.pairs:
            assert door is not None
            # Where a worker has one device, it is this device that waits for messages. Where jobs share it, it may be
            # busy with others all the time.
            is_alone = len(self._own) == 1 and not (self._load.share.job or self._load.share.background)
            listener = self._tenancy.pool.threads.listener(self._own[0].name) if is_alone else None
            await asyncio.to_thread(self.links.open, door, self._own, listener)

    async def close(self) -> None:
        """Wait for steps under way, and end what belongs to the pipeline."""
        await drive(self._tenancy.closed())
        await asyncio.to_thread(self.links.close)
        if self.group is not None:
            await asyncio.to_thread(self.group.close)

    # Steps

    def start(self, start: StartPart) -> PartStep:
        """Begin a part of a step."""
        try:
            step = self._start(start, from_buffers(start.work))
        except BaseException:
            self.links.begun(start.step, None)
            raise
        self.links.begun(start.step, step)
        return step

    def _start(self, start: StartPart, work: StepWork) -> PartStep:
        self.links.advance(work.epoch)
        if self.group is not None:
            self.group.advance(work.epoch)
        (work.settings or ProcessSettings()).apply()
        inputs = work.inputs
        if (number := inputs.batch.number) is not None:
            inputs = replace(inputs, batch=self._made.pop(number))
        tensors = StepTensors.of(inputs.batch.takes, inputs.batch.targets)
        graph = inputs.graph(self._parts)
        own = self._part(graph)
        left: dict[tuple[int, int], float] | None = {} if self._load.is_far else None
        send = partial(self.links.send, start.step, work.epoch, own.names, left)
        resources = self._parts.resources
        reductions = Reductions(graph, tensors, resources.sums, resources.guard)
        step = PartStep(
            self._worker,
            start.step,
            self._parts,
            inputs,
            self._tenancy,
            own,
            self._times,
            tensors,
            Crossings(graph, own, tensors, resources.ties, reductions, send),
            overlaps=work.overlaps,
            use=self.links.use if work.is_observed else None,
            left=left,
        )
        self.links.widen(own)
        before = self.links.steps.get(-1 if start.after is None else start.after)
        if work.overlaps and not self.links.steps:
            resources.begin_replicas()
        if work.overlaps and inputs.training and self._line is None:
            guard = resources.guard
            self._line = object()
            guard.enter(self._line, self._line)
            guard.begin(self._parts.module.parameters(), repeats=True)
        step.begin(None if before is None else before.execution)
        return step

    async def make_batch(self, number: int) -> CutInputs:
        """Have the feed make the mini-batch of step ``number``, and keep what the own stages take; what it is like."""
        made = await asyncio.to_thread(self._cut, number)
        while len(self._made) >= MOST_BATCHES:
            del self._made[next(iter(self._made))]
        self._made[number] = made
        return made.only((), self._parts.rows(len(made.sizes)), number)

    def _cut(self, number: int) -> CutInputs:
        made = CutInputs.from_feed(self._parts, number)
        own = [stage.index for stage in self._parts.resources.stages if not stage.device.is_elsewhere]
        return made.only(own, self._parts.rows(len(made.sizes)))

    def stop(self, number: int) -> None:
        """Begin no more tasks of a step, and of those that follow it."""
        if (step := self.links.steps.get(number)) is not None:
            step.stop()

    def member_lost(self, worker: str) -> None:
        """A worker is lost, which may be of the group of this one."""
        if self.group is not None and self._load.place is not None and worker in self._load.place.members:
            self.group.exchange.fail()

    def settle(self, number: int, keep: bool) -> None:
        """A step is over in all workers: keep what it has left in gradients and buffers, or undo it."""
        if (step := self.links.settled(number)) is not None:
            step.settle(keep=keep)
        if not self.links.steps:
            resources, line = self._parts.resources, self._line
            if line is None:
                resources.undo.close()
            else:
                resources.guard.end_repeats(line, resources.undo)
                self._line = None

    def set_flags(self, flags: Flags) -> None:
        """Take over what the caller has changed in the model between two steps, besides its values."""
        module = self._parts.module
        for each, training in zip(module.modules(), flags.training, strict=True):
            each.training = training
        for parameter, requires_grad in zip(module.parameters(), flags.requires_grad, strict=True):
            parameter.requires_grad_(requires_grad)

    def add_schedule(self, number: int, schedule: bytes) -> None:
        """Know another schedule, which later steps may follow."""
        parts = self._parts
        parts.graphs.add(number, from_wire(schedule), parts.options.pieces, parts.checkpoint)
        if self.group is not None:
            graph = parts.graphs(parts.options.pieces, Phase.STEP, parts.checkpoint, True, number)
            refuse_split_backwards(parts.module, graph)

    def _part(self, graph: TaskGraph) -> Part:
        if graph not in self._parts_of:
            self._parts_of[graph] = part(graph, [device.name for device in self._own])
        return self._parts_of[graph]

    def _check_idle(self) -> None:
        if self.links.steps:
            raise PipelineClosedError("a step is under way in this worker")

    def report(self, number: int) -> WorkerReport:
        """What is known here of a step, and of the edges, for who looks for the root of a hang.

        On the thread that answers pings: nothing here may wait for another thread.
        """
        parts = {step: step.report() for step in list(self.links.steps.values())}
        mine = next((report for step, report in parts.items() if step.number == number), None)
        sends, receives = self.links.reports(number, parts)
        moved = sum(each.sent for each in sends.values()) + sum(each.came for each in receives.values())
        if mine is not None:
            moved += len(mine.ended) + len(mine.came)
        return WorkerReport(moved, part=mine, sends=sends, receives=receives)


def _model(load: LoadPipeline) -> StagedModel | StageFactory:
    if load.is_factory:
        factory: StageFactory = from_buffers(load.model)
        return factory
    model = receive_model(load.model)
    for parameter, trains in zip(model.module.parameters(), load.trains, strict=True):
        parameter.requires_grad_(trains)
    return model
