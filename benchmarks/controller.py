"""What a controller with workers costs: CPU time, messages and memory, by the number of workers and of tasks.

Three kinds of workers, all of which compute nothing::

    workers      worker processes as in training, each with one stage of one number. Their CPU time is what a task costs
                 beside its computing
    light        worker processes without torch, which answer a step at once (``light_worker.py``): what the controller
                 does for processes, of which a machine has room for more
    stand-ins    objects in the controller's process that answer at once: what the controller does without sockets, at
                 numbers of workers for which no machine is large enough

The journals of light workers and of stand-ins are as long as real ones. Beside that: the bytes that each worker is sent
when a pipeline opens, and what it costs a worker to lower its own part. Every case has a fresh process. Memory and CPU
time are what the kernel says (``/proc``, so this needs Linux).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import table
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.part import part
from asyncpipe.core.graph.rows import Rows
from asyncpipe.core.graph.task_graph import TaskGraph, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import WorkerLostError
from asyncpipe.ops.autograd.caller_context import CallerContext
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.device.wire import to_buffers
from asyncpipe.ops.execute.step_tensors import StepPlan
from asyncpipe.ops.model.stage_factory import StageFactory
from asyncpipe.pipeline.build import build
from asyncpipe.pipeline.options import PipelineOptions
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.pool import DevicePool
from asyncpipe.pipeline.remote_stages import RemoteStages
from asyncpipe.pipeline.step_inputs import CutInputs, StepInputs, StepOptions, StepWork
from asyncpipe.pipeline.wire_messages import LoadPipeline, OpenedDoor
from asyncpipe.runtime.observers import Observers
from asyncpipe.runtime.part_messages import PartEnded, StartPart
from asyncpipe.runtime.parts_driver import PartsDriver
from asyncpipe.runtime.parts_execution import PlacedPipeline, WorkerLink
from asyncpipe.runtime.step_driver import Tenant
from asyncpipe.runtime.task_board import ShownTask
from asyncpipe.runtime.workers.group import WorkerGroup
from asyncpipe.runtime.workers.packed import Packed, pack, unpack
from asyncpipe.runtime.workers.place import WorkerPlace
from asyncpipe.runtime.workers.process_launcher import ProcessLauncher
from benchmarks.light_worker import OwnTasks, answer

__all__ = [
    "ControllerCase",
    "ControllerSize",
    "make_stage",
    "measure",
    "measure_opening",
    "measure_part",
    "run",
    "show",
]

SCHEDULE = "1f1b"
_TICK = os.sysconf("SC_CLK_TCK")


class ControllerCase(NamedTuple):
    """What is measured together."""

    kind: str
    """``workers``, ``light`` or ``stand-ins``."""
    workers: int
    microbatches: int
    tasks: int
    """Of all measured steps, about; three steps at least."""


@dataclass(frozen=True, slots=True)
class ControllerSize:
    """How many workers and tasks."""

    workers: tuple[int, ...] = (2, 8)
    light: tuple[int, ...] = (2, 8, 64)
    stand_ins: tuple[int, ...] = (2, 8, 64, 512, 4096)
    microbatches: int = 32
    grown: tuple[int, ...] = (2, 4)
    """The second number of workers of each kind runs steps with so many times the micro-batches as well."""
    tasks: int = 40_000
    opening: tuple[int, ...] = (64, 512, 4096)
    """Numbers of workers of pipelines that are opened, with stand-ins."""
    parts: tuple[tuple[str, int, int], ...] = (
        *(("1f1b", workers, 1024) for workers in (64, 512, 4096)),
        *((name, 512, 1024) for name in ("zb-h1", "interleaved")),
    )
    """(schedule, workers, micro-batches) of parts that a worker lowers alone."""
    whole_parts: tuple[int, ...] = (64,)
    """Numbers of workers for which a part is made of the whole graph as well."""
    fresh: bool = True
    """Whether each case has a process of its own."""

    def cases(self) -> list[ControllerCase]:
        """All of them."""
        found = []
        for kind, counts in (("workers", self.workers), ("light", self.light), ("stand-ins", self.stand_ins)):
            found += [(kind, count, self.microbatches) for count in counts]
            found += [(kind, count, self.microbatches * factor) for count in counts[1:2] for factor in self.grown]
        return [ControllerCase(*case, self.tasks) for case in found]


def run(progress: Progress, *, size: ControllerSize | None = None) -> Figures:
    """A row for each case. CPU times are of steps one after the other, behind two that warm up."""
    size = size or ControllerSize()

    def measured(what: str, function: Callable[..., Figures], *arguments: object) -> Figures:
        progress(what)
        if not size.fresh:
            return function(*arguments)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(function, *arguments).result()

    return {
        "schedule": SCHEDULE,
        "rows": [
            measured(f"{case.workers} {case.kind}, {case.microbatches} micro-batches", measure, case)
            for case in size.cases()
        ],
        "opening": [measured(f"a pipeline of {count} workers opens", measure_opening, count) for count in size.opening],
        "parts": [
            measured(f"a part of {name}, {count} workers, {m} micro-batches", measure_part, name, count, m, whole)
            for name, count, m in size.parts
            for whole in (False, True)[: 1 + (count in size.whole_parts)]
        ],
    }


def measure(case: ControllerCase) -> Figures:
    """One case, in this process: with no observer, and with one that gets the record of every step."""
    how: dict[str, Callable[[ControllerCase], Awaitable[Figures]]]
    how = {"workers": _in_workers, "light": _in_light_workers, "stand-ins": _in_stand_ins}

    async def measured() -> Figures:
        return await how[case.kind](case)

    start, began = _status_bytes(os.getpid(), "VmRSS"), process_time()
    graph = _graph(case)
    lowered = {
        "tasks_a_step": len(graph.tasks),
        "lower_seconds": process_time() - began,
        "graph_bytes": _status_bytes(os.getpid(), "VmRSS") - start,
    }
    return {**case._asdict(), **lowered, **asyncio.run(measured())}


def show(figures: Figures) -> str:
    """A table of the controller, and one of the workers."""
    lines = [f"the controller, {figures['schedule']} (CPU time and bytes a task; memory that the steps have added)", ""]
    head = ["kind", "workers", "m", "tasks a step", "CPU", "tasks/s of CPU", "observed", "sent", "journal", "memory"]
    head += ["graph", "its memory"]
    of_workers = [["each worker", "m", "tasks a step", "CPU a task", "step", "first step", "memory", "PSS"]]
    rows = [head]
    for row in figures["rows"]:
        count, us = row["tasks_a_step"], row["controller_us"]
        cells = [str(row["workers"]), str(row["microbatches"]), f"{count:,}"]
        sent, journal = (
            "" if row.get(name) is None else f"{row[name] / count:.1f} B" for name in ("sent_bytes", "journal_bytes")
        )
        costs = [f"{us:.1f} µs", f"{1e6 / us:,.0f}", f"{row['observed_us']:.1f} µs"]
        graph = f"{row['lower_seconds'] * 1e3:.0f} ms", f"{row['graph_bytes'] / 1e6:.0f} MB"
        rows.append([row["kind"], *cells, *costs, sent, journal, f"{row['memory'] / 1e6:.0f} MB", *graph])
        if row["kind"] == "workers":
            mb = (f"{row[name] / 1e6:.0f} MB" for name in ("worker_rss", "worker_pss"))
            times = f"{row['step_seconds'] * 1e3:.0f} ms", f"{row['first_cpu_seconds'] * 1e3:.0f} ms of CPU"
            of_workers.append([*cells, f"{row['worker_us']:.0f} µs", *times, *mb])
    workers = ["", *table(of_workers)] if of_workers[1:] else []
    steps = [["kind", "workers", "m", "the controller, CPU a step", "a worker", "observed, CPU a step", "a task"]]
    for row in figures["rows"]:
        plain, observed = (row[name] * row["tasks_a_step"] for name in ("controller_us", "observed_us"))
        costs = [f"{us / 1e3:.2f} ms" for us in (plain, observed)]
        each = f"{plain / row['workers']:.0f} µs", f"{row['observed_us']:.1f} µs"
        steps.append([row["kind"], str(row["workers"]), str(row["microbatches"]), costs[0], each[0], costs[1], each[1]])
    opening = [["workers", "sent to each at opening", "of that its devices, names and edges", "in all"]]
    for row in figures["opening"]:
        sent, edges = row["sent_bytes"] / row["workers"], row["edge_bytes"] / row["workers"]
        in_all = f"{row['sent_bytes'] / 1e6:.1f} MB"
        opening.append([f"{row['workers']:,}", f"{sent:,.0f} B", f"{edges:,.0f} B", in_all])
    parts = [["a part", "workers", "m", "lowered", "tasks of the part", "CPU", "memory"]]
    for row in figures["parts"]:
        what = [
            row["schedule"],
            f"{row['workers']:,}",
            f"{row['microbatches']:,}",
            "whole" if row["whole"] else "alone",
        ]
        parts.append([*what, f"{row['tasks']:,}", f"{row['seconds']:.2f} s", f"{row['memory'] / 1e6:.0f} MB"])
    return "\n".join([*lines, *table(rows), *workers, "", *table(steps), "", *table(opening), "", *table(parts)])


def measure_opening(workers: int) -> Figures:
    """What a pipeline of so many workers, with a stage each, sends when it opens."""
    devices = [Device(f"cpu:{k}", torch.device("cpu")) for k in range(workers)]
    factory = StageFactory(make_stage, stages=workers).seeded(lambda: 0)
    loss = nn.functional.mse_loss
    options = PipelineOptions(microbatches=4, schedule=SCHEDULE, loss_fn=loss, optimizer=_sgd)
    there: Any = _StandInWorkers()
    pool: Any = SimpleNamespace(workers=there)
    parts = build(factory, [device.elsewhere() for device in devices], options)
    asyncio.run(RemoteStages(parts, [devices], Tenant(), pool).load())
    return {"workers": workers, "sent_bytes": there.sent_bytes, "edge_bytes": there.edge_bytes}


def measure_part(schedule: str, workers: int, microbatches: int, whole: bool) -> Figures:
    """What a worker in the middle needs for its part of a step, alone or from the whole graph."""
    stages = workers * (found := find_schedule(schedule)).virtual
    names = [f"cpu:{worker}" for worker in range(workers)]
    own = [names[workers // 2]]
    wiring = Wiring(Wiring.chain(stages).links, updates=tuple(range(stages)))
    start, began = _status_bytes(os.getpid(), "VmRSS"), process_time()
    shape = Shape(stages, microbatches, workers)
    graph = lower(found, shape, devices=names, wiring=wiring, around=() if whole else own)
    made = part(graph, own)
    seconds, memory = process_time() - began, _status_bytes(os.getpid(), "VmHWM") - start
    case = {"schedule": schedule, "workers": workers, "microbatches": microbatches, "whole": whole}
    return {**case, "tasks": len(made.whole), "seconds": seconds, "memory": memory}


class _Watcher:
    """Asks for the record of every step."""

    def step_completed(self, record: StepRecord) -> None:
        """It is made before this is called."""


def _graph(case: ControllerCase) -> TaskGraph:
    """A step with a stage on each worker, and its updates."""
    names = [f"cpu:{worker}" for worker in range(case.workers)]
    wiring = Wiring(Wiring.chain(case.workers).links, updates=tuple(range(case.workers)))
    shape = Shape(case.workers, case.microbatches, case.workers)
    return lower(find_schedule(SCHEDULE), shape, devices=names, wiring=wiring)


# Workers as in training


def make_stage(stage: int) -> nn.Module:
    """One number, for a factory."""
    return nn.Linear(1, 1, bias=False)


async def _in_workers(case: ControllerCase) -> Figures:
    here, x = os.getpid(), torch.ones(case.microbatches, 1)
    in_step = len(_graph(case).tasks)
    steps = max(3, case.tasks // in_step)
    found: Figures = {}
    async with DevicePool(workers="processes") as pool:
        for observers in ([], [_Watcher()]):
            pipe = Pipeline(
                StageFactory(make_stage, stages=case.workers),
                [f"cpu:{stage}" for stage in range(case.workers)],
                microbatches=case.microbatches,
                schedule=SCHEDULE,
                loss_fn=nn.functional.mse_loss,
                optimizer=_sgd,
                pool=pool,
                observers=observers,
            )
            async with pipe:
                start, pids = _status_bytes(here, "VmRSS"), _worker_pids(here)
                before = sum(map(_cpu_seconds, pids))
                await pipe.step(x, x, return_outputs=False)
                first = (sum(map(_cpu_seconds, pids)) - before) / case.workers
                await pipe.step(x, x, return_outputs=False)
                began, cpu, of_workers = perf_counter(), process_time(), sum(map(_cpu_seconds, pids))
                for _ in range(steps):
                    await pipe.step(x, x, return_outputs=False)
                us = 1e6 / steps / in_step
                cpu, of_workers = process_time() - cpu, sum(map(_cpu_seconds, pids)) - of_workers
                if observers:
                    found["observed_us"] = cpu * us
                    continue
                found |= {
                    "controller_us": cpu * us,
                    "worker_us": of_workers * us,
                    "step_seconds": (perf_counter() - began) / steps,
                    "first_cpu_seconds": first,
                    "memory": _status_bytes(here, "VmRSS") - start,
                    "worker_rss": median(_rollup_bytes(pid, "Rss") for pid in pids),
                    "worker_pss": median(_rollup_bytes(pid, "Pss") for pid in pids),
                }
    return found


def _status_bytes(pid: int, key: str) -> int:
    """A line of what the kernel says about a process (``VmRSS``, ``VmHWM``), in bytes. Linux only."""
    return _kernel_bytes(Path(f"/proc/{pid}/status"), key)


def _rollup_bytes(pid: int, key: str) -> int:
    """A sum over the mappings of a process (``Rss``; ``Pss``: shared memory counts in parts), in bytes. Linux only."""
    return _kernel_bytes(Path(f"/proc/{pid}/smaps_rollup"), key)


def _kernel_bytes(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise LookupError(key)


def _worker_pids(pid: int) -> list[int]:
    """Its workers, which may be children of the process that they are forked from."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            listed = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"asyncpipe/worker" in listed:
                found += _worker_pids(child) if b"fork server" in listed else [child]
    return found


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


# Light workers and stand-ins


async def _in_light_workers(case: ControllerCase) -> Figures:
    driver, graph = PartsDriver(), _graph(case)
    own = _own_tasks(graph)

    def received(worker: WorkerLink, message: Any) -> None:
        driver.part_ended(worker.name, message)

    group = WorkerGroup(ProcessLauncher(), "benchmarks.light_worker:serve", received=received)
    async with group:
        links = dict(zip(own, await group.start(*own), strict=True))
        for name, link in links.items():
            link.send(own[name])
        return await _driven(case, graph, driver, links)


async def _in_stand_ins(case: ControllerCase) -> Figures:
    driver, graph = PartsDriver(), _graph(case)
    links = {name: _InstantWorker(name, driver, own) for name, own in _own_tasks(graph).items()}
    found = await _driven(case, graph, driver, links, lambda: sum(link.answering_seconds for link in links.values()))
    steps = sum(link.steps for link in links.values()) / case.workers
    totals = {name: sum(getattr(link, name) for link in links.values()) for name in ("sent_bytes", "journal_bytes")}
    return found | {name: total / steps for name, total in totals.items()}


async def _driven(
    case: ControllerCase,
    graph: TaskGraph,
    driver: PartsDriver,
    links: Mapping[str, WorkerLink],
    answering: Callable[[], float] = lambda: 0.0,
) -> Figures:
    """What steps cost that ``links`` answer; ``answering`` are the seconds that they have spent on that here."""
    in_step = len(graph.tasks)
    steps = max(3, case.tasks // in_step)
    found: Figures = {}
    for name, observers in (("controller_us", []), ("observed_us", [_Watcher()])):
        placed = PlacedPipeline(0, Tenant(observers=Observers(observers)), links)
        driver.place(placed, ())
        start, cpu = _status_bytes(os.getpid(), "VmRSS"), 0.0
        for step in range(steps + 2):
            if step == 2:
                cpu = process_time() - answering()
            execution = driver.start(placed, graph, _work(graph.devices, case.microbatches, bool(observers)))
            await driver.issued(execution)
            driver.settle(execution, keep=True)
        found[name] = (process_time() - answering() - cpu) / steps / in_step * 1e6
        found["memory"] = _status_bytes(os.getpid(), "VmRSS") - start
        driver.forget(placed)
    return found


class _InstantWorker:
    """In the place of a worker: takes messages, and answers a step at once."""

    def __init__(self, name: str, driver: PartsDriver, own: OwnTasks) -> None:
        self.name = name
        self.lost: WorkerLostError | None = None
        self.pid = os.getpid()
        self.silent_seconds = self.round_trip = self.clock_offset = self.clock_error = 0.0
        self.steps = self.sent_bytes = self.journal_bytes = 0
        self.answering_seconds = 0.0
        """What a worker would have spent on its answers, and not the controller."""
        self._driver = driver
        self._own = own

    def send(self, message: object) -> None:
        packed = pack(message)
        self.sent_bytes += _size(packed)
        if isinstance(message, StartPart):
            self.steps += 1
            began = process_time()
            answered = pack(answer(message.step, self._own))
            self.answering_seconds += process_time() - began
            self.journal_bytes += _size(answered)
            asyncio.get_running_loop().call_soon(self._received, answered)

    def _received(self, packed: Packed) -> None:
        message: PartEnded = unpack(packed, _no_class)
        self._driver.part_ended(self.name, message)

    def running(self) -> Sequence[ShownTask]:
        return ()

    async def query(self, question: Any) -> Any:
        """Nobody looks for hangs here."""
        raise NotImplementedError

    def kill(self, why: str, *, stacks: bool = False) -> None:
        raise AssertionError(why)


def _no_class(name: str) -> Any:
    raise LookupError(name)


def _size(packed: Packed) -> int:
    return sum(part.nbytes for part in packed.parts)


def _own_tasks(graph: TaskGraph) -> dict[str, OwnTasks]:
    """By worker, whose names are those of devices."""
    own: dict[str, list[int]] = {device: [] for device in graph.devices}
    for task in graph.tasks:
        own[task.lane.device].append(task.number)
    return {
        device: OwnTasks(numbers, [k for k, number in enumerate(numbers) if graph.tasks[number].kind is TaskKind.COPY])
        for device, numbers in own.items()
    }


class _StandInWorkers:
    """In the place of a pool's workers while a pipeline opens: answer all messages, whose bytes are counted."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.transport, self.interface, self.pool_options = "shared_memory", None, b""
        self.driver = PartsDriver()
        self.sent_bytes = self.edge_bytes = 0
        self.place = WorkerPlace("here", "here", "127.0.0.1")
        self.has_own_accelerators = False

    def new_pipeline(self) -> int:
        return 0

    def worker_of(self, devices: Sequence[Device]) -> dict[str, str]:
        self.numbers = {device.name: number for number, device in enumerate(devices)}
        return {device.name: device.name for device in devices}

    def connection(self, name: str) -> _StandInWorkers:
        return self

    async def ask(self, message: object) -> OpenedDoor | None:
        packed = pack(message)
        self.sent_bytes += _size(packed)
        if not isinstance(message, Packed):
            return OpenedDoor("/run/user/1000/asyncpipe-edges-0123abcd/door", None)
        load: LoadPipeline = unpack(packed, _no_class)
        self.edge_bytes += _size(pack((load.devices, load.names, load.pairs, load.addresses, load.transports)))
        return None

    def shapes_to(self, worker: str) -> None:
        return None

    def take_restarted(self, names: Sequence[str]) -> Sequence[str]:
        return ()

    # What ``PartsDriver`` tells observers of a worker.
    name, lost, pid = "", None, 0


def _work(names: Sequence[str], microbatches: int, observed: bool) -> dict[str, Any]:
    """What a step sends to each worker, as ``RemoteStages`` makes it: the first gets mini-batches, the last targets."""
    weights = [1.0 / microbatches] * microbatches
    plan = StepPlan(None, weights, None, 1, CheckpointMode.NEVER, False, True, True)
    pieces = torch.ones(microbatches, 1).unbind()
    takes = [{0: piece} for piece in pieces]
    batch = CutInputs([1] * microbatches, True, takes, pieces, has_target=True, is_padded_unevenly=False)
    inputs = StepInputs(StepOptions(), plan, True, CallerContext.capture(), batch, 0)
    rows = Rows(len(names), len(names), (microbatches,))

    def made(own: CutInputs) -> Any:
        return to_buffers(StepWork(replace(inputs, batch=own), 0, None, False, observed), "the mini-batch")

    return batch.spread({name: [stage] for stage, name in enumerate(names)}, rows, (), made)
