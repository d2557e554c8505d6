"""The jobs of the soak: a small model with fault points in its stages, backward, loader and snapshots.

A fault that happens several times in a row belongs to the job that took the first of them: ``stage raises at every
attempt`` then fails all attempts of one job's step. The workload is an ordinary registered entry; neither the service
nor the run knows about fault points.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from threading import Event, Lock
from typing import Any

import torch
from torch import Generator, Tensor, nn

from asyncpipe.train.workload import Batch, Workload

__all__ = ["ENTRY", "FAULTS", "KINDS", "FaultBoard", "build"]

ENTRY = f"{__name__}:build"
WIDTH = 32
HANG_SECONDS = 8.0
"""How long a hung task hangs; the soak's watchdog gives it up earlier."""
SLOW_SECONDS = 1.5
"""How long a slow loader takes for one batch."""
TOO_MUCH = 2**50
"""More elements than any machine's memory holds: torch refuses to allocate them, as in a real out-of-memory error."""
KINDS = {
    "stage raises": 1,
    "stage raises at every attempt": 2,
    "backward raises": 1,
    "out of memory": 1,
    "loss is NaN": 1,
    "slow loader": 1,
    "failing loader": 1,
    "hung task": 1,
    "state cannot be copied": 1,
}
"""Every fault, and how often in a row a job takes it."""


class InjectedError(RuntimeError):
    """An error that the soak raises on purpose."""


class FaultBoard:
    """Armed faults; the first fault point that a job reaches takes one. Thread-safe."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.released = Event()
        """When set, hung tasks return."""
        self._armed: dict[str, tuple[int, int | None]] = {}
        self._lock = Lock()

    def arm(self, kind: str) -> None:
        """Let the next job that reaches a fault point of this ``kind`` take it there, as often as ``KINDS`` says."""
        with self._lock:
            self._armed[kind] = (KINDS[kind], None)

    def take(self, kind: str, owner: int) -> bool:
        """Whether the fault was armed, and is now taken by the job ``owner``."""
        if kind not in self._armed:  # The common case needs no lock.
            return False
        with self._lock:
            times, taker = self._armed.get(kind, (0, None))
            if not times or taker not in (None, owner):
                return False
            if times > 1:
                self._armed[kind] = (times - 1, owner)
            else:
                del self._armed[kind]
            self.taken[kind] += 1
            return True

    def clear(self) -> None:
        """Disarm all faults and release hung tasks."""
        with self._lock:
            self._armed.clear()
        self.released.set()


FAULTS = FaultBoard()
"""The board of this process. It is global because an entry receives nothing but its parameters."""

_owners = count()


def build() -> Workload:
    """A regression whose model has two layers, with fault points."""
    owner = next(_owners)
    layers = (_FaultPoint(owner), nn.Linear(WIDTH, WIDTH), nn.Tanh(), _FaultPoint(owner), nn.Linear(WIDTH, WIDTH))

    def batches(batch_size: int, generator: Generator) -> Iterator[Batch]:
        while True:
            if FAULTS.take("slow loader", owner):
                time.sleep(SLOW_SECONDS)
            if FAULTS.take("failing loader", owner):
                raise InjectedError("a fault was injected into a loader")
            x = torch.randn(batch_size, WIDTH, generator=generator)
            yield x, x.flip(1)

    return Workload(
        model=nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        batches=batches,
        memoryless=True,
        states={"soak": _SnapshotFaultPoint(owner)},
    )


class _FaultPoint(nn.Module):
    """The identity, unless a fault is armed."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        if FAULTS.take("stage raises", self.owner) or FAULTS.take("stage raises at every attempt", self.owner):
            raise InjectedError("a fault was injected into a stage")
        if FAULTS.take("out of memory", self.owner):
            torch.empty(TOO_MUCH)
        if FAULTS.take("hung task", self.owner):
            FAULTS.released.wait(HANG_SECONDS)
        if FAULTS.take("loss is NaN", self.owner):
            x = x * float("nan")
        made: Tensor = _BackwardFaultPoint.apply(x, self.owner)
        return made


class _BackwardFaultPoint(torch.autograd.Function):
    """The identity, with a fault point in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: int) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if FAULTS.take("backward raises", ctx.owner):
            raise InjectedError("a fault was injected into a backward")
        return gradient, None


class _SnapshotFaultPoint:
    """A state that is part of snapshots, with a fault point where it is copied."""

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        if FAULTS.take("state cannot be copied", self._owner):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return {"soak": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"soak": 1}
