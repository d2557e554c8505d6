"""Checks of the host's part: what it spends on a task, where it waits, and what a thread or a process more brings."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import StepRecord, SyncPipeline, TaskKind
from asyncpipe.bench.cases import plain_step
from asyncpipe.core.engine.events import TaskCompleted, TaskIssued
from benchmarks import task_cost as measured_tasks
from benchmarks.cases import CASES as STEPS
from benchmarks.gpu.machine import Machine, Stopwatch
from benchmarks.gpu.models import batch, busy_stages, by_parts, mean_square, mse, piped, tanh_layers
from benchmarks.gpu.outcome import Outcome, at_most, check, seen

__all__ = ["host_seconds", "task_spans"]


def task_spans(record: StepRecord) -> dict[int, tuple[float, float]]:
    """When each task began and ended on its device, by number."""
    return {each.task: (each.started, each.ended) for _, each in record.journal if isinstance(each, TaskCompleted)}


def host_seconds(record: StepRecord) -> dict[int, float]:
    """How long the host was at each task; on a CPU, its whole time."""
    issued = {each.task: each.seconds for _, each in record.journal if isinstance(each, TaskIssued)}
    return issued or {task: end - begin for task, (begin, end) in task_spans(record).items()}


BEYOND = {"plain": (25.0, 25.0), "dropout": (25.0, 25.0), "autocast": (30.0, 25.0), "batch norm": (45.0, 25.0)}
BEYOND["three lanes"] = (45.0, 45.0)
"""By case of ``benchmarks/task_cost.py``: the most µs of F and of B beyond torch. Three lanes are on one GPU here, and
their threads take turns at its generator and share the interpreter's lock."""


@check("What does the host spend on a task beyond what torch itself takes for its kernels?", 2)
def task_cost(machine: Machine) -> Outcome:
    """``python -m benchmarks task_cost``: processor time of the tasks of a small stage, without those of torch.

    The aim is 25 µs around F and B and 8 µs around a copy on a CPU core of this project. On a GPU's host the core is
    faster, and each call of CUDA takes 1 to 4 µs of it: an event and a wait for F and B, a copy and two waits for C.
    """
    where = "cuda:0" if machine.cuda else "cpu"
    rows, parts = measured_tasks.measure(where, 40 if machine.cuda else 5)
    figures = []
    for row in rows:
        case, kind = row["task"].split(": ")
        most = dict(zip("FBC", (*BEYOND[case], 12.0), strict=True))[kind]
        figures.append(at_most(f"{row['task']}, beyond torch", row["us_beyond"], most, "µs"))
        if kind == "C":
            figures.append(at_most(f"{case}: the runtime around a task", row["us_of_the_runtime"], 15.0, "µs"))
            figures.append(at_most(f"{case}: completion of a task", row["us_of_completions"], 10.0, "µs"))
    return Outcome(figures, "parts, µs: " + "; ".join(f"{name} {us:.1f}" for name, us in parts))


@check("How much longer does a step take whose kernels are so short that the host decides?", 2)
def host_bound_step(machine: Machine) -> Outcome:
    """Two stages of 8 layers in 32 micro-batches against a plain loop, which launches the same kernels.

    Two threads launch, and take turns at the interpreter's lock. Torch takes some 0.5 ms for F and B of a stage, and a
    task 40 µs more.
    """
    microbatches = 32 if machine.cuda else 8
    torch.manual_seed(0)
    model = nn.Sequential(*(tanh_layers(256, 8) for _ in range(2))).to(machine.device)
    x = torch.randn(8 * microbatches, 256, device=machine.device)
    plain = machine.median_seconds(lambda: by_parts(model, x, microbatches), 10)
    with piped(model, machine.two, microbatches=microbatches) as pipe:
        seconds = machine.median_seconds(lambda: pipe.step(x, return_outputs=False).wait(), 10)
    return Outcome([seen("plain loop", plain * 1e3, "ms"), at_most("step over plain loop", seconds / plain, 1.2, "×")])


def _step(pipe: SyncPipeline, x: Tensor) -> None:
    pipe.step(x, return_outputs=False).wait()


def _host_medians(pipe: SyncPipeline, x: Tensor, steps: int = 5) -> dict[TaskKind, float]:
    """Median seconds of the host by kind of task."""
    found: dict[TaskKind, list[float]] = {}
    for step in range(3 + steps):
        record = pipe.step(x, return_outputs=False).wait().record
        seconds = host_seconds(record)
        for task in record.graph.tasks if step >= 3 else ():
            found.setdefault(task.kind, []).append(seconds[task.number])
    return {kind: median(values) for kind, values in found.items()}


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """How often each thread, by its name, calls CUDA to wait for the device. For a GPU."""
    found: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> Callable[[], None]:
        original = getattr(owner, name)

        def wait(*arguments: Any, **options: Any) -> Any:
            found[threading.current_thread().name] += 1
            return original(*arguments, **options)

        setattr(owner, name, wait)
        return lambda: setattr(owner, name, original)

    restore = [
        counting(owner, "synchronize")
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
        if hasattr(owner, "synchronize")
    ]
    try:
        yield found
    finally:
        for each in restore:
            each()


class _TiedHead(nn.Module):
    """Its weight is that of the embedding."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@check(
    "Does a thread that issues tasks wait for the device: for tied values, norms, the clock?",
    4,
    9,
    11,
    needs_gpu="on a CPU nothing is waited for",
)
def host_waits(machine: Machine) -> Outcome:
    """Steps for two seconds, with tied parameters, gradient norms and an optimizer inside; waits by thread."""
    first = nn.Linear(64, 64)
    model = nn.Sequential(nn.Sequential(first, nn.Tanh()), nn.Sequential(nn.Linear(64, 64), _TiedHead(first)))
    options = {"balance": [1, 1], "gradient_norms": True, "optimizer": partial(torch.optim.AdamW, lr=1e-4)}
    x = torch.randn(64, 64, device=machine.device)
    with piped(model, machine.two, **options) as pipe:
        for _ in range(5):
            pipe.step(x).wait()
        names = {each.name for each in threading.enumerate() if each.name.startswith("asyncpipe ")}
        issuing = {name for name in names if not name.endswith("completions")}
        with counted_waits() as found:
            steps, began = 0, time.perf_counter()
            while time.perf_counter() - began < 2:
                pipe.step(x).wait()
                steps += 1
    waits = sum(count for name, count in found.items() if name in issuing)
    return Outcome(
        [
            at_most("waits of issuing threads", waits / steps, 0, "a step"),
            seen("waits of all threads", sum(found.values()) / steps, "a step"),
        ],
        f"{steps} steps; by thread: {dict(found)}; issuing: {', '.join(sorted(issuing))}",
    )


@check("What does an update of many parameters cost the host, and adding up their gradients?", 9)
def many_parameters(machine: Machine) -> Outcome:
    """A stage of 100 small parameters, AdamW; against torch's own backward, which adds up one by one."""
    model = nn.Sequential(tanh_layers(16, 50)).to(machine.device)
    plain = tanh_layers(16, 50).to(machine.device)
    x, watch = torch.randn(64, 16, device=machine.device), Stopwatch()
    for part in [each for _ in range(5) for each in x.chunk(8)]:
        loss = mean_square(plain(part))
        watch.time("B", partial(torch.autograd.backward, loss))
    ours = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    for _ in range(4):
        watch.time("U", ours.step)
    machine.synchronize()
    options = {"microbatches": 8, "optimizer": partial(torch.optim.AdamW, lr=1e-4)}
    with piped(model, machine.one, **options) as pipe:
        kinds = _host_medians(pipe, x)
    more = (kinds[TaskKind.BACKWARD] - watch.median("B", 16)) * 1e6
    return Outcome(
        [
            at_most("B beyond torch's own", more, 100, "µs"),
            seen("B by torch", watch.median("B", 16) * 1e6, "µs"),
            at_most(
                "U beyond the bare optimizer's step", (kinds[TaskKind.UPDATE] - watch.median("U", 3)) * 1e6, 300, "µs"
            ),
            seen("U by torch", watch.median("U", 3) * 1e6, "µs"),
        ]
    )


@check("How much of a core is busy while the device works and nobody has anything to issue?", 6)
def completion(machine: Machine) -> Outcome:
    """Tasks of 30 ms: what waits for them must sleep. A thread that spins takes a whole core, and the lock."""
    model, x = busy_stages(machine, 0.03), batch(8).to(machine.device)
    with piped(model, machine.two, microbatches=4) as pipe:
        pipe.step(x).wait()
        shares = []
        for _ in range(2):
            machine.sleep_until_done()
            began, processor = time.perf_counter(), time.process_time()
            pipe.step(x).wait()
            shares.append((time.process_time() - processor) / (time.perf_counter() - began))
    return Outcome([at_most("processor time over time", min(shares) * 100, 10, "%")])


@check("Does a pipeline on the second GPU leave the first one alone?", 6, gpus=2, needs_gpu="a CPU has no contexts")
def other_gpu(machine: Machine) -> Outcome:
    """The memory of GPU 0 before and after steps on GPU 1; a context takes some 500 MB.

    The driver's program is asked: torch would make a context to ask in.
    """

    def used() -> float:
        command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)  # noqa: S603

    figures = []
    options: dict[str, dict[str, Any]] = {"threads": {}, "processes": {"workers": "processes"}}
    for way, option in options.items():
        before = used()
        with piped(tanh_layers(8, 2), ["cuda:1", "cuda:1"], **option) as pipe:
            for _ in range(3):
                pipe.step(torch.randn(8, 8)).wait()
            figures.append(at_most(f"{way}: taken on GPU 0", used() - before, 1, "MiB"))
    return Outcome(figures)


@check("What do tiny tasks cost beside a plain loop and beside an empty pipeline of one device?", 14)
def tiny_tasks(machine: Machine) -> Outcome:
    """The case *tiny* of ``python -m benchmarks peers`` on the device: 4 stages of one small layer, 32 micro-batches.

    A plain loop launches the same kernels from one thread. Its kernels are so short that the host decides.
    """
    case = STEPS["tiny"]
    model = case.model().to(machine.device)
    x, target = (each.to(machine.device) for each in case.batch())
    plain = machine.median_seconds(lambda: plain_step([*model], x, target, case.microbatches))
    seconds = {}
    for count in (1, case.stages):
        options = {"microbatches": case.microbatches, "loss_fn": mse, "balance": [case.stages // count] * count}
        with piped(model, machine.many(count), **options) as pipe:
            seconds[count] = machine.median_seconds(lambda: pipe.step(x, target, return_outputs=False).wait())
    return Outcome(
        [
            seen("plain loop", plain * 1e3, "ms"),
            at_most("one device, over the plain loop", seconds[1] / plain, 1.4, "×"),
            at_most(f"{case.stages} devices, over the plain loop", seconds[case.stages] / plain, 2.0, "×"),
        ]
    )


class _GilBusy:
    """How much of the time this process uses of one core: about how long its interpreter's lock is held."""

    def __enter__(self) -> _GilBusy:
        self._began, self._processor = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.share = (time.process_time() - self._processor) / (time.perf_counter() - self._began)


@check("When are worker processes faster than threads?", 12, limit=90)
def threads_or_processes(machine: Machine) -> Outcome:
    """Four devices of small eager kernels: four threads, which share the lock, against two worker processes.

    On one GPU two processes take turns at it, so that processes win less than on several.
    """
    torch.manual_seed(0)
    layers, microbatches = (16, 16) if machine.cuda else (4, 4)
    x, devices = torch.randn(8 * microbatches, 256), machine.many(4)
    names = [name + (f"#{index}" if index and machine.cuda else "") for index, name in enumerate(devices)]
    seconds, busy = {}, math.nan
    sgd: Callable[..., Any] = partial(torch.optim.SGD, lr=1e-4)
    for way in ("threads", "processes"):
        workers: Any = "threads" if way == "threads" else dict(zip(names, "aabb", strict=True))
        model = nn.Sequential(*(tanh_layers(256, layers) for _ in range(4)))
        options = {"microbatches": microbatches, "balance": [1] * 4, "optimizer": sgd, "workers": workers}
        with piped(model, devices, **options) as pipe:
            with _GilBusy() as gil:
                seconds[way] = machine.median_seconds(lambda: pipe.step(x, return_outputs=False).wait(), 10)
            busy = gil.share if way == "threads" else busy
    return Outcome(
        [
            seen("threads", seconds["threads"] * 1e3, "ms"),
            seen("processes", seconds["processes"] * 1e3, "ms"),
            at_most("threads over processes", seconds["threads"] / seconds["processes"], 1.5, "×"),
            seen("processor time over time, on threads", busy * 100, "%"),
        ],
        f"the interpreter {'has its lock' if getattr(sys, '_is_gil_enabled', lambda: True)() else 'has no lock'}",
    )


@check(
    'Is what workers="auto" chooses on two GPUs the faster of threads and processes?',
    12,
    limit=120,
    gpus=2,
    needs_gpu="on CPUs it is threads",
)
def auto_workers(machine: Machine) -> Outcome:
    """Short kernels, which keep the lock busy, and long ones. It chooses processes from 60 % of the time on."""
    figures, told = [], []
    sgd: Callable[..., Any] = partial(torch.optim.SGD, lr=1e-4)
    for name, width, rows in (("short kernels", 64, 8), ("long kernels", 2048, 4096)):
        x, seconds = torch.randn(16 * rows, width), {}
        for workers in ("threads", "processes", "auto"):
            torch.manual_seed(0)
            model = nn.Sequential(*(tanh_layers(width, 8) for _ in range(2)))
            options: dict[str, Any] = {"microbatches": 16, "balance": [1, 1], "optimizer": sgd, "workers": workers}
            if workers == "auto":
                options["sample"] = (x,)
            with piped(model, ["cuda:0", "cuda:1"], **options) as pipe:
                seconds[workers] = machine.median_seconds(partial(_step, pipe, x), 10)
                if workers == "auto":
                    told.append(f"{name}: {pipe.step(x).wait().record.notes.why_workers}")
        figures.append(seen(f"{name}: threads over processes", seconds["threads"] / seconds["processes"], "×"))
        best = min(seconds["threads"], seconds["processes"])
        figures.append(at_most(f"{name}: auto over the faster one", seconds["auto"] / best, 1.15, "×"))
    return Outcome(figures, "; ".join(told))
