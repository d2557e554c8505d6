"""Checks of messages between worker processes: what one costs by its size, on one GPU and on two."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import DevicePool
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import piped
from benchmarks.gpu.outcome import Outcome, at_most, check

__all__: list[str] = []

SMALL, LARGE = 1 << 10, 8 << 20
"""Numbers of float32: 4 KiB and 32 MiB."""


class Widen(nn.Module):
    """Makes a message of its parameter's size from a number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Narrow(nn.Module):
    """Reads the whole message."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) * self.weight


def message_seconds(machine: Machine, devices: list[str], size: int, pool: DevicePool) -> float:
    """Median seconds from the beginning of the forward at the first stage to that at the second."""
    between = []
    with piped(nn.Sequential(Widen(size), Narrow()), devices, microbatches=1, balance=[1, 1], pool=pool) as pipe:
        pipe.eval()
        x = torch.ones(1, 1)
        for _ in range(25 if machine.cuda else 8):
            report = pipe.step(x, return_outputs=False).wait().report
            first, last = (each for each in report.tasks if each.task.kind.value == "F")
            between.append(last.start - first.start)
    return median(between[5:])


def _outcome(machine: Machine, devices: list[str], ways: Mapping[str, tuple[dict[str, Any], float, float]]) -> Outcome:
    """``ways``: the options of a pipeline, the most µs of a small message, and the most ms that a large one is more."""
    figures = []
    told = []
    for name, (options, most_small, most_large) in ways.items():
        try:
            with DevicePool(**options) as pool:
                small, large = (message_seconds(machine, devices, size, pool) for size in (SMALL, LARGE))
        except Exception as error:  # noqa: BLE001 - the other ways go on
            traceback.print_exc()
            told.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            figures.append(at_most(f"{name}: fails", 1, 0, promised=True))
            continue
        figures.append(at_most(f"{name}: a message of 4 KiB", small * 1e6, most_small, "µs"))
        figures.append(at_most(f"{name}: 32 MiB more", (large - small) * 1e3, most_large, "ms"))
    return Outcome(figures, "; ".join(told))


@check("What does a message between two worker processes on one GPU cost?", 3, limit=120)
def edges_on_one_gpu(machine: Machine) -> Outcome:
    """From the beginning of F at the sender, whose kernel is short, to that of F at the receiver; and so by threads.

    Two processes take turns at one GPU, some 0.1 ms each. 32 MiB are copied in its memory in 25 µs, and through pinned
    memory of the host in twice 0.7 ms.
    """
    names = ["cuda:0", "cuda:0#1"] if machine.cuda else machine.two
    workers = dict(zip(names, "ab", strict=True))
    ways: dict[str, tuple[dict[str, Any], float, float]] = {
        "by default": ({"workers": workers}, 500, 0.5),
        "threads": ({}, 100, 0.1),
    }
    if machine.cuda:
        ways["memory of the host"] = {"workers": workers, "transport": "host_memory"}, 500, 2.0
    return _outcome(machine, machine.two, ways)


@check(
    "What does a message between two GPUs cost, by CUDA IPC and by NCCL?",
    3,
    7,
    limit=120,
    gpus=2,
    needs_gpu="CPUs have neither",
)
def edges_of_two_gpus(machine: Machine) -> Outcome:
    """NVLink moves 32 MiB in 0.1 ms, PCIe in 0.7. NCCL's own message takes 20 µs; ours was expected at 300 to 600."""
    ways: dict[str, tuple[dict[str, Any], float, float]] = {
        "threads": ({}, 60, 0.8),
        "by default": ({"workers": "processes"}, 150, 0.8),
        "NCCL": ({"workers": "processes", "transport": "nccl"}, 100, 0.8),
        "memory of the host": ({"workers": "processes", "transport": "host_memory"}, 300, 2.0),
    }
    return _outcome(machine, ["cuda:0", "cuda:1"], ways)
