"""Entries of jobs that an operator does not want to meet; copied beside the example as the module ``odd``."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from charlm import build  # type: ignore[import-not-found]
from torch import Generator, Tensor, nn

from asyncpipe.train.workload import Workload

__all__ = ["greedy", "holds_the_gil", "never_returns", "stuck_loader"]

SHAPE = {"width": 16, "blocks": 4, "heads": 2, "context": 16, "dropout": 0.1, "sample_length": 2, "max_bytes": 50_000}
PIECE = 64 << 20


def greedy() -> Workload:
    """Keeps 64 MiB more for each batch, for ever."""
    held: list[Tensor] = []
    made: Workload = build(**SHAPE)
    return replace(made, batches=_before_each(made, lambda: held.append(torch.ones(PIECE // 4))), states={})


def stuck_loader() -> Workload:
    """Waits for ever for its first batch."""
    made: Workload = build(**SHAPE)
    return replace(made, batches=_before_each(made, lambda: (_say(), threading.Event().wait())), states={})


def holds_the_gil() -> Workload:
    """A regular expression that backtracks for ages, during which no other thread of Python runs."""
    made: Workload = build(**SHAPE)
    return replace(made, batches=_before_each(made, lambda: (_say(), re.match(r"(a+)+$", "a" * 60 + "b"))), states={})


def never_returns() -> Workload:
    """A stage that waits in C for a signal that does not come."""
    made: Workload = build(**SHAPE)
    return replace(made, model=nn.Sequential(_Pauses(), *made.model))


class _Pauses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _say()
        ctypes.CDLL(None).pause()
        return x


def _say() -> None:
    """That this process is stuck from now on, for who looks into the service's folder."""
    Path("stuck", str(os.getpid())).touch()


def _before_each(made: Workload, deed: Callable[[], object]) -> Any:
    def batches(batch_size: int, generator: Generator) -> Iterator[Any]:
        for batch in made.batches(batch_size, generator):
            deed()
            yield batch

    return batches
