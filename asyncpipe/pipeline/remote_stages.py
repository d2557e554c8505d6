"""One pipeline's stages in workers, as the controller sees them: sent there once, then told what to do."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import ChainMap
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, NamedTuple, TypeVar

from torch import nn

from asyncpipe.core.graph.task_graph import Phase, TaskGraph
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.core.schedules.protocol import Schedule
from asyncpipe.errors import BatchError, EdgeError, OptionError, PipelineClosedError, WorkerLostError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.process_settings import ProcessSettings
from asyncpipe.ops.device.wire import from_buffers, to_buffers, to_wire
from asyncpipe.ops.execute.optimizer_states import with_whole_states
from asyncpipe.ops.execute.stage_files import StoredStages
from asyncpipe.ops.model.sequential import all_to_first
from asyncpipe.ops.model.shipping import NamedState, forget_values, refuse_what_trains, ship_model, state_names
from asyncpipe.pipeline.build import PipelineParts
from asyncpipe.pipeline.edge_paths import EdgePaths
from asyncpipe.pipeline.options import PipelineOptions
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.stages_here import StagesHere, StagesToCome
from asyncpipe.pipeline.step_inputs import CutInputs, StepInputs, StepWork
from asyncpipe.pipeline.wire_messages import (
    Flags,
    LoadPipeline,
    OpenedDoor,
    PartResult,
    PlacedDevice,
    Scalars,
    StagePlace,
)
from asyncpipe.pipeline.workers import check_transport
from asyncpipe.runtime.part_messages import Call
from asyncpipe.runtime.parts_driver import LOSS_SECONDS, PartsDriver
from asyncpipe.runtime.parts_execution import PartsExecution, PlacedPipeline
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.waits import Waiting
from asyncpipe.runtime.workers.connection import WorkerConnection
from asyncpipe.runtime.workers.packed import pack
from asyncpipe.shared_memory import Place
from asyncpipe.whole_folder import FolderError

__all__ = ["PreparedWork", "RemoteStages"]

_T = TypeVar("_T")


class PreparedWork(NamedTuple):
    """What is sent to the workers when a step begins."""

    by_worker: Mapping[str, Sequence[PickleBuffer]]
    flags: Flags
    """Those that the workers have from then on."""


_USUAL_SETTINGS = ProcessSettings()


class RemoteStages(StagesHere):
    """Coroutines are for the pool's loop, everything else for the caller's thread, unless it says otherwise."""

    def __init__(
        self, parts: PipelineParts, ranks: Sequence[Sequence[Device]], tenant: Tenant, pool: DevicePool
    ) -> None:
        """``ranks`` are the devices of the workers, where these are in groups (``stage_groups.py``) of each rank.

        In ``parts`` those of rank 0 are elsewhere.

        Raises ``OptionError`` for functions that would have copies of parameters in workers.
        """
        _refuse_parameters(parts.options)
        super().__init__(parts)
        assert pool.workers is not None
        self._pool, self._workers = pool, (workers := pool.workers)
        self._ranks = ranks
        self._tenant = tenant
        self._number = workers.new_pipeline()
        self._placed: PlacedPipeline | None = None
        """Once it is loaded."""
        self._connections: dict[str, WorkerConnection] = {}
        self._copied: Sequence[str] = ()
        """The workers that have copied states, to write them."""
        devices = list(chain.from_iterable(ranks))
        self._worker_of = workers.worker_of(devices)
        check_transport(workers.transport, devices, self._worker_of)
        self._groups = {
            self._worker_of[first.name]: [self._worker_of[rank[place].name] for rank in ranks]
            for place, first in enumerate(ranks[0])
        }
        """By worker of rank 0: those that have the same stages, by rank."""
        self._group_of = {name: names for names in self._groups.values() for name in names}
        self._placed_on: dict[str, list[tuple[int, Device]]] = {}
        """By worker: (position, device) of its devices."""
        for rank in ranks:
            for place, device in enumerate(rank):
                self._placed_on.setdefault(self._worker_of[device.name], []).append((place, device))
        self._owned: dict[str, list[int]] = {name: [] for name in self._placed_on}
        """By worker: its stages."""
        for stage in parts.resources.stages:
            for name in self._groups[self._worker_of[stage.device.name]]:
                self._owned[name].append(stage.index)
        ends = [each for each in parts.resources.stages if each.position in (0, parts.stages_per_row - 1)]
        fed = (name for stage in ends for name in self._groups[self._worker_of[stage.device.name]])
        self._fed_workers = tuple(dict.fromkeys(fed))
        """Where a feed makes mini-batches."""
        self._fetches: dict[int, asyncio.Task[CutInputs]] = {}
        """A mini-batch that is being made, by its number."""
        self._is_loaded = False
        self._schedule = 0
        """The number of the schedule with which it was loaded."""
        self._names: Mapping[str, NamedState] = {}
        """What the model's state has, once it is loaded."""
        self._epoch = 0
        """One more after each step that was undone. Read by who prepares a step, on any thread."""
        self._settling = threading.Lock()
        """Held by who makes it larger."""
        self._flags: Flags | None = None
        """What the workers have."""
        self._trains = _flags(parts.module).requires_grad

    @property
    def driver(self) -> PartsDriver:
        """What runs the steps."""
        return self._workers.driver

    # Opening and closing

    async def load(self) -> None:
        """Send every worker its stages. From then on the model here has shapes, and no values."""
        names = list(self._owned)
        with ThreadPoolExecutor(1) as thread:
            models = await asyncio.get_running_loop().run_in_executor(thread, self._ship, names)
        graphs = self._parts.graphs
        self._schedule = graphs.number
        options = to_wire(self._parts.options.for_worker(graphs.schedule), "an option (loss_fn or optimizer)")
        self._connections = {name: self._workers.connection(name) for name in names}
        self._is_loaded = True
        asked: list[asyncio.Future[Any]] = []
        try:
            paths = EdgePaths(self._connections, self._workers.numbers, self._pairs(), self._workers.transport)
            doors = dict(zip(names, await self._open_doors(paths), strict=True))
            messages = [self._load_message(*each, options, paths, doors) for each in zip(names, models, strict=True)]
            asked += [
                asyncio.ensure_future(connection.ask(pack(message)))
                for connection, message in zip(self._connections.values(), messages, strict=True)
            ]
            await _all_answer(asked)
        except BaseException:
            # Who builds a model is not waited for.
            self._workers.begin(self._give_up(asked))
            raise
        if graphs.number != self._schedule:
            await self._add_schedule(graphs.number, to_wire(graphs.schedule, "the schedule"))
        self._names = state_names(self._parts.staged)
        forget_values(nn.ModuleList([self._parts.module, *self._parts.staged.stages]))
        self._parts.resources.forget_replicas()
        self._parts.hold_parameters()
        links = {device: self._connections[worker] for device, worker in self._worker_of.items()}
        others = {first: [self._connections[name] for name in names[1:]] for first, names in self._groups.items()}
        self._placed = PlacedPipeline(self._number, self._tenant, links, others)
        self.driver.place(self._placed, self._workers.take_restarted(names))

    async def _open_doors(self, paths: EdgePaths) -> list[OpenedDoor]:
        """Have the workers let in others, before anybody is told to go there."""
        interface = self._workers.interface
        asked = [
            asyncio.ensure_future(connection.ask(paths.open_door(self._number, name, interface)))
            for name, connection in self._connections.items()
        ]
        try:
            await _all_answer(asked)
        finally:
            await asyncio.gather(*asked, return_exceptions=True)
        return [each.result() for each in asked]

    async def _give_up(self, asked: Sequence[asyncio.Future[Any]]) -> None:
        """Leave nothing in workers of a pipeline that could not be loaded in all."""
        for connection in self._connections.values():
            with suppress(WorkerLostError):
                connection.send(Call(self._number, "give_up"), urgent=True)
        await asyncio.gather(*asked, return_exceptions=True)
        await self.unload()

    def _ship(self, names: Sequence[str]) -> list[list[pickle.PickleBuffer]]:
        if (factory := self._parts.factory) is not None:
            return [to_buffers(factory, "the arguments of the stages' factory")] * len(names)
        return [ship_model(self._parts.staged, self._owned[name]) for name in names]

    def _load_message(
        self,
        name: str,
        model: Sequence[pickle.PickleBuffer],
        options: bytes,
        paths: EdgePaths,
        doors: Mapping[str, OpenedDoor],
    ) -> LoadPipeline:
        numbers, peers, members = self._workers.numbers, paths.peers(name), self._group_of[name]
        return LoadPipeline(
            pipeline=self._number,
            model=model,
            is_factory=self._parts.factory is not None,
            trains=() if self._parts.factory is not None else self._trains,
            options=options,
            count=len(self._ranks[0]),
            devices={
                place: PlacedDevice(device.name, self._physical(device), numbers[peer])
                for peer in peers
                for place, device in self._placed_on[peer]
            },
            names={numbers[each]: each for each in peers},
            me=numbers[name],
            pairs=paths.of(name),
            addresses=paths.addresses(name, doors),
            transports=paths.transports(name),
            is_far=paths.is_far,
            settings=ProcessSettings.current(),
            share=self._tenant.share,
            schedule=self._schedule,
            pool=self._workers.pool_options,
            place=StagePlace(members, members.index(name), self._address(members)) if len(members) > 1 else None,
        )

    def _address(self, members: Sequence[str]) -> str | None:
        """Where the worker of a group reaches each other; ``None`` if that is where they reach the controller."""
        is_local = len({self._connections[name].place.machine for name in members}) == 1
        return "127.0.0.1" if is_local else self._workers.interface

    def _physical(self, device: Device) -> str:
        """The device, as its worker calls it."""
        worker = self._worker_of[device.name]
        if device.is_accelerator and self._connections[worker].has_own_accelerators:
            return f"{device.physical.type}:{self._workers.own_number(worker, device)}"
        return str(device.physical)

    def _pairs(self) -> list[tuple[int, int]]:
        """The edges that steps need: both ways between the workers of stages that exchange something."""
        firsts = [self._worker_of[stage.device.name] for stage in self._parts.resources.stages]
        rows = self._parts.rows(self._parts.options.pieces)
        replicas = [(a, b) for stage in self._parts.resources.sums for a, b in combinations(rows.replicas(stage), 2)]
        wiring = self._parts.graphs(self._parts.options.pieces, Phase.STEP, self._parts.checkpoint, True).wiring
        updated = [stage for first in wiring.updates for stage in rows.replicas(first)]
        norms = [(stage, wiring.norm) for stage in updated if wiring.norm is not None]
        ends = (*self._parts.staged.links, *self._parts.resources.ties.links, *replicas, *norms)
        number = self._workers.numbers
        found = {
            (number[sender], number[receiver])
            for a, b in ends
            for sender, receiver in zip(self._groups[firsts[a]], self._groups[firsts[b]], strict=True)
            if sender != receiver
        }
        return list(found | {(b, a) for a, b in found})

    async def unload(self) -> None:
        """Have the workers forget the pipeline."""
        if self._is_loaded:
            self._is_loaded = False
            if self._placed is not None:
                self.driver.forget(self._placed)
            for made in self._fetches.values():
                made.cancel()
            await self._ask_all("unload", raises=False)

    async def _ask_all(self, method: str, *arguments: object, raises: bool = True) -> list[Any]:
        """The answers of all workers, whose ``Resident`` has the method."""
        return await self._ask(self._connections, method, *arguments, raises=raises)

    async def _ask(self, names: Iterable[str], method: str, *arguments: object, raises: bool) -> list[Any]:
        call = Call(self._number, method, arguments)
        asked = (self._connections[name].ask(call) for name in names)
        answers = await asyncio.gather(*asked, return_exceptions=not raises)
        return list(answers)

    # Steps

    def work(self, inputs: StepInputs, *, overlaps: bool) -> PreparedWork:
        """What each worker needs for a step, on the caller's thread. Raises ``OptionError`` for what cannot be sent."""
        settings = ProcessSettings.current()
        others = None if settings == _USUAL_SETTINGS else settings
        is_observed = bool(self._tenant.observers.shown)

        def made(own: CutInputs) -> Sequence[PickleBuffer]:
            part = StepWork(replace(inputs, batch=own), self._epoch, others, overlaps, is_observed)
            return to_buffers(part, "the mini-batch")

        rows = self._parts.rows(len(inputs.batch.sizes))
        work = inputs.batch.spread(self._owned, rows, self._fed_workers, made)
        return PreparedWork(work, _flags(self._parts.module))

    def made(self, number: int) -> Waiting[CutInputs]:
        """Have the workers of the first and the last stage make a mini-batch, and then begin with the next one.

        Raises ``BatchError`` if it is not the same in both, and what the feed raises.
        """
        return self._pool.on_loop(self._fed(number))

    async def _fed(self, number: int) -> CutInputs:
        if number not in self._fetches:
            self._fetch(number)
        made = self._fetches[number]
        try:
            found = await asyncio.shield(made)
        finally:
            if made.done():
                self._fetches.pop(number, None)
        self._fetch(number + 1)
        return found

    def _fetch(self, number: int) -> None:
        """Begin to make a mini-batch; others that nobody has asked for are forgotten."""
        for other in self._fetches.values():
            other.cancel()
        self._fetches = {number: asyncio.get_running_loop().create_task(self._made(number))}
        # Nobody may ever ask for it.
        self._fetches[number].add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _made(self, number: int) -> CutInputs:
        message = Call(self._number, "make_batch", (number,))
        answers = await asyncio.gather(*[self._connections[name].ask(message) for name in self._fed_workers])
        seen = [(tuple(made.sizes), made.has_target) for made in answers]
        if len(set(seen)) > 1:
            listed = " and ".join(
                f"micro-batches of {', '.join(map(str, sizes))} samples, {'with' if has_target else 'without'} a "
                f"target, in worker {name!r}"
                for name, (sizes, has_target) in zip(self._fed_workers, seen, strict=True)
            )
            raise BatchError(
                f"{self._parts.options.feed} makes different mini-batches for step {number}: {listed}; they must "
                "follow from the step's number alone"
            )
        found: CutInputs = answers[-1]
        return found

    def start(self, graph: TaskGraph, work: PreparedWork, after: PartsExecution | None) -> PartsExecution:
        """Begin a step; see ``PartsDriver.start``."""
        assert self._placed is not None
        placed: dict[str, Sequence[PickleBuffer | Place]] = {}
        memories = {name: self._connections[name].batches for name in work.by_worker}
        for name, buffers in work.by_worker.items():
            placed[name] = buffers if (memory := memories[name]) is None else memory.put(buffers)
        try:
            changed = None if work.flags == self._flags else Call(self._number, "set_flags", (work.flags,))
            started = self._workers.driver.start(self._placed, graph, placed, after=after, first=changed)
        except BaseException:
            for name, memory in memories.items():
                if memory is not None:
                    memory.free(each for each in placed[name] if isinstance(each, Place))
            raise
        # Not before: a step that is cancelled in time, or refused, tells the workers nothing.
        self._flags = work.flags
        return started

    def result(self, execution: PartsExecution) -> PartResult:
        """What a step has left for its caller."""
        results: list[PartResult] = [
            from_buffers(result) for name in execution.told() if (result := execution.ended[name].result) is not None
        ]
        if len(ends := [each for each in results if each.losses.keys or each.outputs]) == 1:
            losses, counts, _, outputs, _ = ends[0]
        else:  # Each replica has some of the micro-batches.
            losses = Scalars.of({i: loss for each in ends for i, loss in each.losses.tensors().items()})
            counts = Scalars.of({i: count for each in ends for i, count in each.counts.tensors().items()})
            outputs = {i: output for each in ends for i, output in each.outputs.items()}
        norms = {stage: norm for result in results for stage, norm in result.gradient_norms.tensors().items()}
        rate = next((result.learning_rate for result in results if result.learning_rate is not None), None)
        return PartResult(losses, counts, Scalars.of(self._parts.joined_norms(norms)), outputs, rate)

    def settle(self, execution: PartsExecution, *, keep: bool) -> None:
        """Tell the workers to keep what the step has left, or to undo it. From any thread."""
        if not keep:
            with self._settling:
                self._epoch += 1
        self.driver.settle(execution, keep=keep)

    # Between steps

    @property
    def compilations(self) -> Sequence[Compilation]:
        """What the workers have told of compiling, at the end of each step. From any thread."""
        return [] if self._placed is None else tuple(self._placed.compilations)

    def refuse(self, what: str, instead: str) -> None:
        raise OptionError(
            f"{what} needs the stages in this process, and they live in workers; {instead}, or use workers='threads'"
        )

    def check_feed(self) -> None:
        if self._parts.staged.caller_values is not all_to_first:
            raise OptionError(
                "several stages of a traced model may take something of a mini-batch, which only this process knows; "
                "leave feed out and give mini-batches to step, give a list of stages, or use workers='threads'"
            )

    def check_share(self) -> None:
        raise OptionError("stages in workers keep the share with which the pipeline was loaded")

    @property
    def values(self) -> StagesHere:
        """The workers, once the values have been sent there, or were made there."""
        if self._placed is None and self._parts.factory is not None:
            raise PipelineClosedError(
                f"{self._parts.factory} makes the stages in the workers when the pipeline opens; use 'async with' first"
            )
        if self._placed is not None and not self._is_loaded:
            raise PipelineClosedError(
                "the pipeline is closed, and its stages with all they held have ended in the workers; take its state "
                "before it closes"
            )
        return StagesToCome(self._parts) if self._placed is None else self

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run it on the pool's loop."""
        if not self._pool.is_open:
            coroutine.close()
        self._pool.check()
        return self._pool.call(coroutine)

    def state(self) -> dict[str, Any]:
        found = dict(ChainMap(*self._call(self._gathered("states.model"))))
        state = self._parts.module.state_dict()
        for name, named in self._names.items():
            state[name] = found[named.first]
        return state

    def load_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        self.check_state(state, strict=strict)
        self._call(self._put("states.load_model", state))

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        return with_whole_states(self._call(self._gathered("states.optimizers")), self._shapes())

    def load_optimizer_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._call(self._put("states.load_optimizers", states))

    def schedule_states(self) -> dict[str, Any]:
        return next(filter(None, self._call(self._gathered("states.schedules"))), {})

    def load_schedule_states(self, states: Mapping[str, Any]) -> None:
        self._call(self._ask_all("states.load_schedules", to_buffers(dict(states), "the state of the schedule")))

    async def _put(self, method: str, state: Mapping[str, Any]) -> None:
        """Give each worker what concerns it, also of its stages in later rows."""
        stage_of = {name: named.stage for name, named in self._names.items()}
        messages = {}
        for worker, stages in self._owned.items():
            positions = {self._parts.resources.stages[stage].position for stage in stages}
            own = {name: value for name, value in state.items() if stage_of.get(name) in positions}
            messages[worker] = pack(Call(self._number, method, (to_buffers(own, "the state"),)))
        await asyncio.gather(*[self._connections[worker].ask(message) for worker, message in messages.items()])

    def copied_state(self) -> dict[str, Any]:
        return self.state()

    def copy_stages(self, *, model: bool = True) -> None:
        """Have workers copy the states of all stages. What replicas have alike, the first that is not lost copies.

        Raises ``WorkerLostError`` if nobody has some of it any more.
        """
        self._call(self._copy_stages(model=model))

    def who_has_states(self) -> Mapping[str, tuple[list[int], list[int]]] | None:
        """The workers that are not lost, with the stages that they are to copy, and those whose optimizers they are to.

        ``None`` if that is not everything. From any thread.
        """
        left = {
            stage: name
            for names in self._groups.values()
            for name in names
            if all(self._connections[each].lost is None for each in names)
            for stage in self._owned[name]
        }
        count, every = self._parts.stages_per_row, len(self._parts.resources.stages)
        firsts = [next((v for v in range(j, every, count) if v in left), None) for j in range(count)]
        updated = firsts if not self._parts.options.shard_optimizer else list(range(every))
        if not left.keys() >= {*firsts, *updated} or (self._parts.joins_statistics and firsts != list(range(count))):
            return None
        return {
            name: ([v for v in stages if v in firsts], [v for v in stages if v in updated])
            for name, stages in self._owned.items()
            if not {*firsts, *updated}.isdisjoint(stages)
        }

    async def _copy_stages(self, *, model: bool) -> None:
        if (found := self.who_has_states()) is None:
            raise next(each.lost for each in self._connections.values() if each.lost is not None)
        self._copied = list(found)
        calls = {
            name: Call(self._number, "states.copy", (stages if model else [], updated))
            for name, (stages, updated) in found.items()
        }
        await asyncio.gather(*[self._connections[name].ask(call) for name, call in calls.items()])

    def _written(self, folder: Path, *, dcp: bool) -> list[Any]:
        return self._call(self._write(folder, dcp=dcp))

    async def _write(self, folder: Path, *, dcp: bool) -> list[Any]:
        asked = [
            self._connections[name].ask(Call(self._number, "states.write_copies", (folder, number if dcp else None)))
            for number, name in enumerate(self._copied)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for name, answer in zip(self._copied, answers, strict=True):
            if isinstance(answer, OSError):
                raise FolderError(f"worker {name} cannot write to {folder}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return list(answers)

    def read_stages(self, stored: StoredStages) -> None:
        """Have each worker read what it needs."""
        self._call(self._ask_all("states.read", stored))

    async def _gathered(self, method: str) -> list[dict[str, Any]]:
        """What each of the workers has. One is asked at a time, or one group, whose first member tells it."""
        call, found = Call(self._number, method), []
        for names in self._groups.values():
            answers = await asyncio.gather(*[self._connections[name].ask(call) for name in names])
            found.append(from_buffers(answers[0]))
        return found

    def add_schedule(self, number: int, schedule: Schedule) -> None:
        if self._is_loaded and self._pool.is_open:
            self._call(self._add_schedule(number, to_wire(schedule, "the schedule")))

    async def _add_schedule(self, number: int, schedule: bytes) -> None:
        await self._ask_all("add_schedule", number, schedule)


async def _all_answer(asked: Iterable[asyncio.Future[Any]]) -> None:
    """Raise the first error; what has become of a worker rather than what others say of their edges to it."""
    loop = asyncio.get_running_loop()
    answered, left = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
    errors = _errors(answered)
    until = loop.time() + LOSS_SECONDS
    while left and errors and all(isinstance(error, EdgeError) for error in errors) and loop.time() < until:
        answered, left = await asyncio.wait(left, timeout=until - loop.time(), return_when=asyncio.FIRST_EXCEPTION)
        errors += _errors(answered)
    if errors:
        raise min(errors, key=lambda error: (isinstance(error, EdgeError), not isinstance(error, WorkerLostError)))


def _errors(answered: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    return [error for each in answered if (error := each.exception()) is not None]


def _refuse_parameters(options: PipelineOptions) -> None:
    instead = "have the model's last stage compute with it, freeze it (requires_grad_(False))"
    refuse_what_trains(options.loss_fn, "loss_fn", instead)
    instead = "tell parameters apart by what they are (p.dim() < 2, for instance)"
    for name in ("optimizer", "parameter_groups", "lr_schedule"):
        refuse_what_trains(getattr(options, name), name, instead)


def _flags(module: nn.Module) -> Flags:
    return Flags(
        tuple([each.training for each in module.modules()]), tuple([p.requires_grad for p in module.parameters()])
    )
