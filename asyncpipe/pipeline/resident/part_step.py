"""One worker's part of a step: as a whole step on threads, but its caller is the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from asyncpipe.core.engine.events import Outcome, TaskCompleted, TaskFailed, TaskIssued
from asyncpipe.core.graph.part import Part
from asyncpipe.core.hangs.reports import PartReport
from asyncpipe.core.hosts import DeviceName
from asyncpipe.core.policies.jobs import JobAccount
from asyncpipe.core.records.step_notes import StepNotes
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.records.worker_notes import WorkerUse
from asyncpipe.errors import PipelineClosedError, TaskError
from asyncpipe.ops.device.copies import HostCopy
from asyncpipe.ops.device.wire import to_buffers
from asyncpipe.ops.edges.message import ReceivedMessage
from asyncpipe.ops.execute.crossings import Crossings
from asyncpipe.ops.execute.step_tensors import StepTensors
from asyncpipe.ops.model.microbatch import Packet
from asyncpipe.ops.model.nested import tensors_of
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.device_notes import note_devices
from asyncpipe.pipeline.pool import Tenancy
from asyncpipe.pipeline.step import PreparedStep
from asyncpipe.pipeline.step_inputs import StepInputs
from asyncpipe.pipeline.wire_messages import PartResult, Scalars
from asyncpipe.runtime.execution import Execution, Gates
from asyncpipe.runtime.part_messages import PartEnded, PartJournal, portable

__all__ = ["PartStep"]


class PartStep(PreparedStep):
    """Used on the worker's loop; ``arrived`` on any thread."""

    def __init__(
        self,
        worker: str,
        number: int,
        parts: PipelineParts,
        inputs: StepInputs,
        tenancy: Tenancy,
        part: Part,
        times: JobAccount,
        tensors: StepTensors,
        crossings: Crossings,
        *,
        overlaps: bool,
        use: Callable[[], WorkerUse] | None,
        left: Mapping[tuple[int, int], float] | None,
    ) -> None:
        """``number`` is the step's in the controller. ``overlaps``: its gradients are set aside by its run of steps.
        ``times`` is told how long tasks take.

        ``use`` is given where somebody gets its record, who wants to know that of the worker, and what the physical
        devices hold. In ``left`` is noted when messages leave, if they go to other machines.
        """
        super().__init__(parts, inputs, tenancy, part.graph, tensors, crossings)
        self.number = number
        self._worker = worker
        self.part = part
        self._around = inputs.graph(parts)
        """What the part was cut from."""
        self._times = times
        self._crossings = crossings
        self._overlaps = overlaps
        self._use = use
        self._left = left
        self._gates = Gates()
        self._came: dict[tuple[int, int], float] = {}
        """By the names of a task and its dependency, when the message came."""
        self.execution: Execution | None = None
        self.is_whole = False
        """Whether all its tasks have run, once it has ended."""

    def begin(self, after: Execution | None) -> None:
        """Begin it behind ``after``, which may be under way."""
        with self._abandoned_on_error():
            self._begin(in_line=self._overlaps)
            self.execution = self.tenancy.pool.threads.start(
                self.graph,
                self._binder.bind,
                self._binder.notes,
                around=self._binder.around,
                gates=self._gates,
                tenant=self.tenancy.tenant,
                after=after,
                number=self.number,
            )
            self._crossings.begin()

    def arrived(self, message: ReceivedMessage) -> None:
        """What a task waits for has come from another worker. Its credit goes back when the task has run."""
        names, header = self.part.names, message.header
        task, dependency = names.number(header.task), names.number(header.source)
        self._came[header.task, header.source] = message.at
        hold = message.release, message.ready
        self._crossings.arrived(task, dependency, message.meta, list(message.tensors), hold)
        self._gates.open([self.part.arrivals[task, dependency]])

    def device_of(self, name: int) -> str:
        """The device of a task of this part, by its name."""
        return self._around.tasks[self.part.names.number(name)].lane.device

    def stop(self) -> None:
        """Begin no more tasks of it."""
        assert self.execution is not None
        self.tenancy.pool.threads.cancel(self.execution)

    async def ended(self) -> PartEnded:
        """Wait until nothing of it runs any more; what to tell the controller."""
        execution = self.execution
        assert execution is not None
        result, error = None, None
        try:
            await self.tenancy.pool.threads.issued(execution)
            left = self._left_for_the_caller()
            await execution.done
            if execution.record().outcome is Outcome.OK and left is not None:
                brought = left if isinstance(left, PartResult) else await asyncio.to_thread(left)
                result = to_buffers(brought, "the output of the last stage")
        except (TaskError, PipelineClosedError):
            pass  # The events tell it, or the controller has stopped it.
        except Exception as caught:  # noqa: BLE001 - the controller raises it
            error = caught
        await execution.done
        record = execution.record()
        self.is_whole = record.outcome is Outcome.OK
        journal, failed = self._journal(record)
        use = None if self._use is None else self._use()
        found = record.notes.compilations
        ended = PartEnded(
            self.number,
            completed=len(journal.completed),
            journal=journal.packed(),
            times=self._times.means,
            compilations=found,
            failed=failed,
            error=error,
            result=result,
            use=use,
        )
        return portable(self._worker, ended)

    def report(self) -> PartReport | None:
        """How far it is; ``None`` before it begins. From any thread, whatever the others do."""
        if (execution := self.execution) is None:
            return None
        ended, heads = self.tenancy.pool.threads.progress(execution)
        name = self.part.name
        return PartReport(
            frozenset(map(name, ended)),
            {device: name(task) for device, task in heads.items()},
            frozenset(tuple(self._came)),
        )

    def settle(self, *, keep: bool) -> None:
        """The whole step is over: keep what it has left in gradients and buffers, or undo it."""
        if not keep:
            self.abandon()
            return
        with self._abandoned_on_error():
            self._commit()

    def _left_for_the_caller(self) -> PartResult | Callable[[], PartResult] | None:
        """What the part has left for the caller; from an accelerator, what waits until copies have brought that::

        lanes    [ F … B ]e [ next step ···
        loop               wait e ▶ copies ▶ event              (queued; nothing blocks)
        thread                                  wait ▶ bytes     (no task of the next step is waited for)
        """
        tensors = self._tensors
        outputs = {i: packet.rebuild(packet.tensors) for i, packet in sorted(tensors.outputs.items())}
        # Of other replicas this worker may know the sum of their counts.
        counted = {i: count for i, count in tensors.counts.items() if i in tensors.losses}
        tables = (tensors.losses, counted, tensors.gradient_norms)
        left = tensors_of([*(list(table.values()) for table in tables), list(outputs.values())])
        self._fence.end(left, self._binder.last.values())
        if not (any(tables) or outputs or tensors.rates):
            return None
        losses, counts, norms = map(Scalars.of, tables)
        found = PartResult(losses, counts, norms, outputs, next(iter(tensors.rates), None))
        if all(tensor.is_cpu for tensor in left):
            return found
        packet = Packet(found)
        copies = [HostCopy(tensor) for tensor in packet.tensors]
        return lambda: cast(PartResult, packet.rebuild(copy.wait() for copy in copies))

    def _journal(self, record: StepRecord) -> tuple[PartJournal, list[tuple[float, TaskFailed]]]:
        """What became of the tasks, in numbers of the part and of the controller's step."""
        journal = PartJournal([], [], self._notes(record.notes))
        failed: list[tuple[float, TaskFailed]] = []
        for at, event in record.journal:
            if isinstance(event, TaskCompleted):
                _, task, started, ended = event
                journal.completed.append((at, task, started, ended))
                self._times.measured(self.graph.tasks[task], ended - started)
            elif isinstance(event, TaskIssued):
                journal.issued.append((at, event.task, event.seconds))
            elif isinstance(event, TaskFailed):
                failed.append((at, TaskFailed(self.number, event.task, event.error)))
        return journal, failed

    def _notes(self, notes: StepNotes) -> StepNotes:
        part, arrived = self.part, dict[int, float]()
        for (task, dependency), at in list(self._came.items()):
            gate = part.arrivals[part.names.number(task), part.names.number(dependency)]
            number = part.graph.gates[gate]
            arrived[number] = max(at, arrived.get(number, at))
        found = replace(notes, arrived=arrived, left=dict(self._left or {}))
        if self._use is not None:
            # The number of an accelerator is another one here than elsewhere.
            streams = self.parts.resources.streams.items()
            names = {stream.device: DeviceName.parse(lane.device).physical for lane, stream in streams}
            note_devices({"cpu" if each.type == "cpu" else name: each for each, name in names.items()}, found)
        return found
