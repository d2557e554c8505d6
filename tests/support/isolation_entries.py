"""Entries of jobs that run in processes of their own: a good one, and some that do not end or take their process along.

They are given a folder, where each says by a file that it is at it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from resume_helpers import make_workload
from torch import Generator, Tensor, nn

from asyncpipe import pop, skippable, stash
from asyncpipe.train.workload import Batch, Workload

__all__ = [
    "crashes",
    "dies",
    "greedy",
    "has_child",
    "holds_the_gil",
    "never_returns",
    "plain",
    "raises",
    "segfaults",
    "stuck_entry",
    "stuck_loader",
    "ties",
]


def plain() -> Workload:
    """Trains."""
    return make_workload()


@skippable(stash=["kept"])
class Keep(nn.Module):
    """The beginning of a skip."""

    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class Tied(nn.Module):
    """The end of the skip, with weights that are those of an earlier stage."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Iterator[Any]:
        kept = yield pop("kept")
        return nn.functional.linear(x, self.weight.T) + kept


def ties() -> Workload:
    """Weights that both stages have, and a skip from one to the other."""
    first = nn.Linear(3, 8, bias=False)
    layers = [Keep(), first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Tied(first.weight), nn.Linear(3, 3)]
    return replace(make_workload(), model=nn.Sequential(*layers).double())


def segfaults(seconds: float) -> Workload:
    """A stage that ends its process by a wrong address, so long after it began."""
    until = time.monotonic() + seconds
    return _with(_When(lambda: time.monotonic() > until, lambda: ctypes.string_at(0)))


class _When(nn.Module):
    def __init__(self, is_time: Any, deed: Any) -> None:
        super().__init__()
        self.is_time, self.deed = is_time, deed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_time():
            self.deed()
        return x


def stuck_entry(folder: str) -> Workload:
    """Never comes back from its entry."""
    _say(folder, "stuck_entry")
    threading.Event().wait()
    return make_workload()


def stuck_loader(folder: str) -> Workload:
    """Waits for ever for its first batch."""

    def batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
        _say(folder, "stuck_loader")
        threading.Event().wait()
        yield from ()

    return replace(make_workload(), batches=batches, states={})


def holds_the_gil(folder: str) -> Workload:
    """A regular expression that backtracks for ages, during which no other thread of Python runs."""

    def batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
        _say(folder, "holds_the_gil")
        re.match(r"(a+)+$", "a" * 60 + "b")
        yield from ()

    return replace(make_workload(), batches=batches, states={})


def never_returns(folder: str) -> Workload:
    """A stage that waits in C for a signal that does not come."""
    return _with(_In("never_returns", folder, lambda: ctypes.CDLL(None).pause()))


def dies(folder: str) -> Workload:
    """Its process is killed in the third step, as by the OOM killer."""
    return _with(_In("dies", folder, lambda: os.kill(os.getpid(), signal.SIGKILL), after=2 * 4))


def crashes(folder: str) -> Workload:
    """Its process ends by itself in its first step, and leaves a child behind."""

    def crash() -> None:
        _say(folder, "child of crashes", _with_child())
        os.write(1, b"to the descriptor\n")
        faulthandler.dump_traceback(all_threads=False)
        os._exit(3)

    return _with(_In("crashes", folder, crash))


def has_child(folder: str) -> Workload:
    """Waits for ever for its first batch, with a child beside it."""

    def batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
        _say(folder, "child of has_child", _with_child())
        _say(folder, "has_child")
        threading.Event().wait()
        yield from ()

    return replace(make_workload(), batches=batches, states={})


def _with_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def greedy() -> Workload:
    """Keeps 64 MiB more for each batch, for ever."""
    made = make_workload()
    held: list[Tensor] = []

    def batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
        for batch in made.batches(batch_size, generator):
            held.append(torch.ones((64 << 20) // 4))
            yield batch

    return replace(made, batches=batches, states={})


class OwnError(Exception):
    """Of a class that the service does not know."""


def raises(folder: str) -> Workload:
    """A stage that raises an error of its own class."""

    def fail() -> None:
        print("printed before", end="")
        print(" it failed\nand then", file=sys.stdout)
        print("\r 1 of 2\r 2 of 2", file=sys.stderr)
        logging.getLogger("their.own").warning("logged with password=%s", "hunter2")
        raise OwnError("no cable")

    return _with(_In("raises", folder, fail))


class _In(nn.Module):
    def __init__(self, name: str, folder: str, deed: Any, after: int = 0) -> None:
        super().__init__()
        self.name, self.folder, self.deed, self.left = name, folder, deed, after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            _say(self.folder, self.name)
            self.deed()
        return x


def _with(layer: nn.Module) -> Workload:
    made = make_workload()
    return replace(made, model=nn.Sequential(*made.model, layer))  # type: ignore[arg-type]


def _say(folder: str, name: str, pid: int | None = None) -> None:
    Path(folder, name).write_text(str(os.getpid() if pid is None else pid))
