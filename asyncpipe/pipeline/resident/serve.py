"""The entry of a worker process: what the controller says, and to whom it goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from asyncpipe.core.hangs.reports import AskedFor, WorkerReport
from asyncpipe.ops.device.wire import from_wire
from asyncpipe.ops.edges.stage_group import Exchange, StageGroup
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.resident.part_step import PartStep
from asyncpipe.pipeline.resident.resident import Resident
from asyncpipe.pipeline.resident.self_report import running_reports, stacks
from asyncpipe.pipeline.wire_messages import GroupValue, LoadPipeline, OpenedDoor
from asyncpipe.runtime.part_messages import Call, PartEnded, StartPart, portable
from asyncpipe.runtime.workers.control_client import ControlClient
from asyncpipe.runtime.workers.door import Door
from asyncpipe.runtime.workers.held_folder import HeldFolder
from asyncpipe.runtime.workers.place import address_of_interface, interface_of, is_loopback

__all__ = ["serve"]

IMPORTED_LATER = ("torch.distributed", "torch._dynamo")
"""What a worker imports for its edges, and what torch imports when it makes an optimizer; see ``serve_forks``."""


async def serve(control: ControlClient) -> None:
    """Serve the controller until it says to stop."""
    await _ResidentStages(control).run()


class _ResidentStages:
    """All pipelines that have stages in this worker. Their devices are those of one pool, as on threads."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._pool: DevicePool | None = None
        self._residents: dict[int, Resident] = {}
        self._doors: dict[int, Door] = {}
        """Of pipelines that are not loaded yet."""
        self._ending: set[asyncio.Task[None]] = set()
        self._group_turn = asyncio.Lock()
        """Held while a group is made: one that could not be made ends before the next one begins."""
        self._exchanges: dict[int, Exchange] = {}
        """Of pipelines whose stages are spread over groups of workers; another one of a group may be earlier."""

    async def run(self) -> None:
        self._control.answer_queries(self._report)
        try:
            await self._control.serve(self._handle)
        finally:
            for number in tuple(self._doors):
                self._close_door(number)
            for resident in self._residents.values():
                await resident.close()
            if self._pool is not None:
                await self._pool.aclose()

    def _handle(self, message: Any) -> Any:
        """Do what the controller says; its messages are handled in their order. Returns an answer, or awaits it."""
        match message:
            case StartPart():
                self._start(message)
            case LoadPipeline():
                return self._load(message)
            case Call(pipeline=int(number), method="open_door"):
                return self._open_door(number, *message.arguments)
            case Call(pipeline=int(number), method="put"):
                self._exchange(number).put(*message.arguments)
            case Call(pipeline=int(number), method="give_up"):
                self._give_up(number)
            case Call(pipeline=int(number), method="unload"):
                # It may not have been loaded here, since another worker could not load.
                self._close_door(number)
                self._exchanges.pop(number, None)
                return None if (resident := self._residents.pop(number, None)) is None else resident.close()
            case Call(pipeline=int(number)) if (resident := self._residents.get(number)) is not None:
                return attrgetter(message.method)(resident)(*message.arguments)
            case Call(pipeline=None):
                for resident in self._residents.values():
                    attrgetter(message.method)(resident)(*message.arguments)
        return None

    def _report(self, question: tuple[int, AskedFor]) -> WorkerReport:
        """What this worker is at in a step, and if that is asked, why. On the thread that answers pings."""
        number, asked = question
        residents = {step: each for each in list(self._residents.values()) for step in list(each.links.steps)}
        running = () if self._pool is None else running_reports(self._pool.threads, residents, number)
        if (resident := residents.get(number)) is None:
            return WorkerReport(0, running, stacks=stacks())
        if asked is AskedFor.PROBES:
            resident.links.probe()
        report = resident.report(number)
        if asked is AskedFor.MOVED:
            return WorkerReport(report.moved, running)
        return replace(report, running=running, stacks=stacks())

    async def _load(self, load: LoadPipeline) -> None:
        if self._pool is None:
            self._pool = DevicePool(**from_wire(load.pool))
            self._pool.open_here(self._control.board)
        door = self._doors.get(load.pipeline)
        try:
            async with nullcontext() if load.place is None else self._group_turn:
                resident = await self._resident(load, self._pool)
                try:
                    await resident.open(door)
                except BaseException:
                    await resident.close()
                    raise
        finally:
            self._close_door(load.pipeline)
        self._residents[load.pipeline] = resident

    async def _resident(self, load: LoadPipeline, pool: DevicePool) -> Resident:
        if (place := load.place) is None:
            return Resident(load, pool, self._control)
        address = place.address or self._control.place.address
        exchange = self._exchange(load.pipeline)
        exchange.name(partial(self._tell_group, load.pipeline, place.members))
        group = StageGroup(self._control.name, place.rank, len(place.members), address, exchange)
        try:
            # To build stages takes collectives, and messages come on this loop.
            return await asyncio.to_thread(Resident, load, pool, self._control, group)
        except BaseException:
            await asyncio.to_thread(group.close)
            raise

    def _exchange(self, pipeline: int) -> Exchange:
        return self._exchanges.setdefault(pipeline, Exchange())

    def _tell_group(self, pipeline: int, members: Sequence[str], key: str, value: bytes) -> None:
        self._control.send(GroupValue(pipeline, members, key, value), urgent=True)

    def _open_door(self, pipeline: int, me: int, is_local: bool, is_remote: bool, interface: str | None) -> OpenedDoor:
        """Let in other workers of the same machine, and those of others, at ``interface`` or where the controller does.

        For the edges of a pipeline that is about to be loaded, in which this worker is number ``me``.
        """
        folder = HeldFolder("asyncpipe-edges-") if is_local else None
        address = None
        if is_remote:
            address = self._control.place.address if interface is None else address_of_interface(interface)
            if not is_loopback(address) and (name := interface_of(address)):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL would choose one itself.
        door = self._doors[pipeline] = Door(me, folder=folder, host=address)
        return OpenedDoor(door.local, door.remote)

    def _close_door(self, pipeline: int) -> None:
        if (door := self._doors.pop(pipeline, None)) is not None:
            door.close()

    def _give_up(self, pipeline: int) -> None:
        if (door := self._doors.get(pipeline)) is not None:
            door.give_up()
        if (exchange := self._exchanges.get(pipeline)) is not None:
            exchange.fail()

    def _start(self, start: StartPart) -> None:
        resident = self._residents[start.pipeline]
        try:
            if (batches := self._control.batches) is not None:
                start = replace(start, work=batches.views(start.work))
            step = resident.start(start)
        except Exception as error:  # noqa: BLE001 - the controller raises it
            if resident.group is not None:
                resident.group.drop()
            self._tell(PartEnded(start.step, error=error))
            return
        ending = asyncio.create_task(self._end(resident, step))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, resident: Resident, step: PartStep) -> None:
        ended = await step.ended()
        if resident.group is not None and not step.is_whole:
            await asyncio.to_thread(resident.group.drop)
        self._send(ended)

    def _tell(self, ended: PartEnded) -> None:
        self._send(portable(self._control.name, ended))

    def _send(self, ended: PartEnded) -> None:
        batches = self._control.batches
        self._control.send(ended if batches is None else replace(ended, freed=batches.freed()))
