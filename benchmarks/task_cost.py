"""What a task costs on the host: processor time of F, B and C beyond what torch takes for the same calls.

Three equal stages on one device, whose thread nothing disturbs; the tasks of the middle one are measured, so that no
loss and no batch of the caller's is among them. With *three lanes* each stage is on a logical device of its own, and
their threads share the interpreter's lock. A *task* is the processor time of the device's thread, from before the task
is bound to after its function has returned. *torch* is what of it the stage's module takes in a forward, and
autograd's engine in a backward. *beyond* is the difference: Python around them. Of a copy all is beyond.

Figures are lowest deciles: what others compute on the same cores makes single tasks slower, and none faster.

Around that, *the runtime* is the rest of the processor time of the devices' threads, and *completions* that of the
threads which wait for what a device has done, both by task.

The *parts* are measured one by one, in a loop: what a task does once or several times. They need not add up.

*streams* are three accelerators whose tensors are those of the CPU, and whose streams, events and generators are the
emulated ones of ``tests/emulated``: the host does what it does for GPUs, and kernels cost what they cost on a CPU. With
*shared* they are logical devices of one accelerator, whose tasks take turns at its generator. Both are measured in
processes of their own. Emulated streams are written in Python, and cost something else than CUDA's.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown, one_intra_op_thread

__all__ = ["as_json", "emulate", "run", "show"]

WIDTH, ROWS = 64, 4
MICROBATCHES = 16
CASES: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU()],
    "dropout": lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)],
    "autocast": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU()],
    "batch norm": lambda: [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)],
}
"""The layers of a stage. With *autocast*, the step is called inside it."""


def run(progress: Progress, *, device: str | None = None, steps: int = 40) -> Figures:
    """Figures of the tasks of ``steps``, on a CPU and on emulated streams, or on ``device`` alone (``cuda:0``)."""
    found = {}
    for where in ["cpu", "streams", "shared"] if device is None else [device]:
        progress(f"tasks on {where}")
        found[where] = _in_a_process(where, steps) if where in ("streams", "shared") else measure(where, steps)
    tasks = [{"task": f"{where}, {row.pop('task')}", **row} for where, (rows, _) in found.items() for row in rows]
    parts = [{"part": f"{where}, {name}", "us_a_call": us} for where, (_, each) in found.items() for name, us in each]
    return {"steps": steps, "tasks": tasks, "parts": parts}


show = markdown(
    tasks="Processor time of a task, lowest deciles over {steps} steps; the runtime and completions are means:",
    parts="Parts of it, each alone:",
)


def measure(device: str, steps: int) -> tuple[list[dict[str, Any]], list[tuple[str, float]]]:
    """Rows of tasks, and pairs of a part's name and its µs."""
    with one_intra_op_thread():
        rows = [*_case(device, "plain", steps, lanes=3)]
        if device == "shared":
            return rows, []
        return [*(row for case in CASES for row in _case(device, case, steps)), *rows], [*_parts(device)]


def _in_a_process(device: str, steps: int) -> Any:
    code = f"from benchmarks.task_cost import *; emulate({device == 'shared'}); print(as_json({device!r}, {steps}))"
    done = subprocess.run(  # noqa: S603 - its own code
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def as_json(device: str, steps: int) -> str:
    """What ``measure`` returns."""
    return json.dumps(measure(device, steps))


class _LockOfThread(threading.local):
    """A lock for each thread."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release = lock.acquire, lock.release


def emulate(shared: bool) -> None:
    """From now on the CPU is an accelerator: its tensors are made on emulated streams."""
    from asyncpipe.ops.device import devices

    # Before any other module takes the names from there.
    devices.ACCELERATORS = (*devices.ACCELERATORS, "cpu")  # type: ignore[assignment]
    importlib.import_module("tests.emulated.device")

    real = torch.get_device_module
    module = SimpleNamespace(**vars(real("emu")))
    module.default_generators = {None: module.default_generators[0]}

    def chosen(device: Any) -> Any:
        return module if torch.device(device).type == "cpu" else real(device)

    torch.get_device_module = chosen  # type: ignore[assignment]
    if not shared:
        turns: Any = importlib.import_module("asyncpipe.ops.device.generator_turns")
        turns.threading = SimpleNamespace(Lock=_LockOfThread)


def _names(device: str) -> list[str]:
    return [device] * 3 if device.startswith("cuda") else [f"cpu:{k}" for k in range(3)]


def _physical(device: str) -> torch.device:
    return torch.device(device if device.startswith("cuda") else "cpu")


def _autocast(device: str, case: str) -> Any:
    return torch.autocast(_physical(device).type, torch.bfloat16) if case == "autocast" else nullcontext()


class _Stage(nn.Sequential):
    """Notes its nanoseconds."""

    def __init__(self, case: str, inner: list[int]) -> None:
        super().__init__(*CASES[case]())
        self.inner = inner

    def forward(self, x: Any) -> Any:
        begun = time.thread_time_ns()
        output: Any = super().forward(x)  # type: ignore[no-untyped-call]
        self.inner[0] = time.thread_time_ns() - begun
        return output


def _case(device: str, case: str, steps: int, lanes: int = 1) -> Iterator[dict[str, Any]]:
    from asyncpipe.pipeline.pipeline import Pipeline

    torch.manual_seed(0)
    names, x = _names(device)[:lanes], torch.randn(ROWS * MICROBATCHES, WIDTH)
    inner, spent = [0], defaultdict[str, list[tuple[int, int]]](list)
    model = nn.Sequential(_Stage(case, [0]), _Stage(case, inner), _Stage(case, [0]))
    options: Any = {"microbatches": MICROBATCHES, "checkpoint": "never", "balance": [1] * 3}
    options["schedule"] = "interleaved" if lanes == 1 else "1f1b"
    with Pipeline(model, names, loss_fn=_loss, **options).sync() as pipe:

        def step() -> int:
            with _autocast(device, case):
                done = pipe.step(x).wait()
            model.zero_grad()
            return len(done.record.graph.tasks)

        for _ in range(5):
            step()
        with _timed(spent, inner):
            before = _clocks()
            tasks = sum(step() for _ in range(steps))
            after = _clocks()
    threads = defaultdict[bool, float](float)
    for (thread, name), us in after.items():
        if name.startswith(("asyncpipe cpu", "asyncpipe cuda")):
            threads["completions" in name] += us - before.get((thread, name), 0.0)
    inside = sum(took for each in spent.values() for took, _ in each) / 1e3
    around = {"us_of_the_runtime": (threads[False] - inside) / tasks, "us_of_completions": threads[True] / tasks}
    for kind in "FBC" if lanes == 3 else "FB":
        task, torchs = (quantiles(each, n=10)[0] / 1e3 for each in zip(*spent[kind], strict=True))
        about = {"task": f"{case if lanes == 1 else 'three lanes'}: {kind}"}
        yield about | {"us_a_task": task, "us_of_torch": torchs, "us_beyond": task - torchs} | around


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _clocks() -> dict[tuple[int, str], float]:
    """The processor time of every thread, in µs."""
    keys = [(each.ident or 0, each.name) for each in threading.enumerate()]
    return {key: 1e6 * time.clock_gettime(time.pthread_getcpuclockid(key[0])) for key in keys}


@contextmanager
def _timed(spent: dict[str, list[tuple[int, int]]], inner: list[int]) -> Iterator[None]:
    """Note the nanoseconds of each task, and of torch in it. ``inner`` has those of the middle stage's last forward."""
    from asyncpipe.ops.execute.binder import Binder

    compute: Any = importlib.import_module("asyncpipe.ops.execute.compute")

    bind, backward, now = Binder.bind, compute.run_backward, time.thread_time_ns
    clock = int(median(-now() + now() for _ in range(1000)))
    kinds = {"forward": "F", "backward": "B", "copy": "C"}
    here = threading.local()

    def timed_bind(self: Binder, task: Any) -> Callable[[], Any]:
        begun = now()
        function = bind(self, task)
        kind = kinds[task.kind.name.lower()]

        def timed() -> Any:
            try:
                return function()
            finally:
                took = now() - begun - 2 * clock
                torchs = {"F": inner[0] - clock, "B": getattr(here, "backward", 0) - clock, "C": -clock}[kind] + clock
                spent[kind if task.stage == 1 or kind == "C" else "others"].append((took, torchs))

        return timed

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        begun = now()
        backward(*args, **kwargs)
        here.backward = now() - begun

    Binder.bind, compute.run_backward = timed_bind, timed_backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Binder.bind, compute.run_backward = bind, backward  # type: ignore[method-assign]


def _parts(device: str) -> Iterator[tuple[str, float]]:
    from asyncpipe.ops.autograd.random_streams import random_stream
    from asyncpipe.ops.device.generator_turns import turn_of
    from asyncpipe.ops.device.streams import AcceleratorStream

    physical = _physical(device)
    x = torch.ones(ROWS, WIDTH, device=physical)
    draws = {"bernoulli_": lambda: x.bernoulli_(0.5), "native_dropout": lambda: torch.native_dropout(x, 0.1, True)}
    for name, draw in draws.items():
        yield f"{name}, by torch", _us(draw)
        with random_stream(1, 1, 0, physical):
            yield f"{name}, inside a task", _us(draw)

    def streamed() -> None:
        with random_stream(1, 1, 0, physical):
            pass

    yield "what one task draws from, entered and left", _us(streamed)
    turn = turn_of(physical)
    if turn is None:
        return
    stream = AcceleratorStream(physical)

    def taken() -> None:
        turn.acquire(1)
        turn.release()

    def used() -> None:
        with stream.use():
            pass

    timing = stream.begin()
    event = timing.end()
    timing.wait()
    yield "a turn at the generator", _us(taken)
    yield "the time of a task: begun, ended", _us(lambda: stream.begin().end())
    yield "the time of a task: waited for", _us(timing.wait)
    yield "a stream, entered and left", _us(used)
    yield "a wait of a stream for an event", _us(lambda: stream.wait(event))


def _us(call: Callable[[], object], calls: int = 300) -> float:
    """The processor time of ``call``, in µs: the least of rounds."""
    took = []
    for _ in range(9):
        begun = time.thread_time_ns()
        for _ in range(calls):
            call()
        took.append((time.thread_time_ns() - begun) / calls / 1e3)
    return min(took)
