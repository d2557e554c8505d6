"""The model of the soak's jobs: the character model of the examples, with fault points.

::

    the soak ── FAULTS.arm("stage raises") ──▶ FAULTS ◀── take ── the first fault point that a job reaches:
                                                                    in a stage, a backward, the loader, a snapshot

A fault that happens several times in a row belongs to the job that took the first of them: "stage raises at every
attempt" then fails all attempts of one job's step. The workload is an ordinary registered entry (``ENTRY``); neither
the service nor the run knows about fault points.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from threading import Event, Lock
from typing import Any

import torch
from torch import Generator, Tensor, nn

from asyncpipe.bench.examples import load_example
from asyncpipe.train.workload import Batch, Workload

__all__ = ["ENTRY", "FAULTS", "HANG_SECONDS", "SLOW_SECONDS", "FaultBoard", "InjectedError", "build"]

ENTRY = f"{__name__}:build"
HANG_SECONDS = 8.0
"""How long a hung task hangs; the soak's watchdog gives it up earlier."""
SLOW_SECONDS = 1.5
"""How long a slow loader takes for one batch."""
NOBODY = -1
"""The owner of fault points that take no fault."""
TOO_MUCH = 2**50
"""More elements than any machine's memory holds: torch refuses to allocate them, as in a real out-of-memory error."""


class InjectedError(RuntimeError):
    """An error that the soak raises on purpose."""


class FaultBoard:
    """Armed faults, which fault points take. Thread-safe."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        """How often each fault was taken."""
        self.released = Event()
        """When set, hung tasks return, and no more tasks hang."""
        self._armed: dict[str, tuple[int, int | None]] = {}
        self._lock = Lock()

    def arm(self, kind: str, times: int = 1) -> None:
        """Let the first job that reaches a fault point of this ``kind`` take it there, ``times`` times in a row."""
        with self._lock:
            self._armed[kind] = (times, None)

    def is_armed(self, kind: str) -> bool:
        """Whether a fault of this ``kind`` waits to be taken."""
        return kind in self._armed

    def take(self, kind: str, owner: int) -> bool:
        """Take the fault for the job ``owner`` if it is armed; returns whether it was taken."""
        if kind not in self._armed:  # The common case needs no lock.
            return False
        with self._lock:
            times, taker = self._armed.get(kind, (0, None))
            if not times or owner == NOBODY or taker not in (None, owner):
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

    def restart(self) -> None:
        """Forget everything, for the next soak of this process."""
        self.clear()
        self.taken.clear()
        self.released.clear()


FAULTS = FaultBoard()
"""The board of this process. It is global because an entry receives nothing but its parameters."""

_owners = count()


def build(
    *,
    width: int = 32,
    blocks: int = 2,
    heads: int = 4,
    context: int = 32,
    max_bytes: int = 200_000,
    faults: bool = True,
) -> Workload:
    """The example's workload with fault points before every block, in its loader and in its snapshots.

    Without ``faults`` the fault points do nothing.
    """
    example = load_example("charlm")
    workload: Workload = example.build(
        width=width, blocks=blocks, heads=heads, context=context, max_bytes=max_bytes, sample_length=10
    )
    owner = next(_owners) if faults else NOBODY
    layers: list[nn.Module] = []
    for layer in workload.model.children():
        if isinstance(layer, example.Block):
            layers.append(_FaultPoint(owner))
        layers.append(layer)
    return replace(
        workload,
        model=nn.Sequential(*layers),
        batches=_with_faults(workload.batches, owner),
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
        if FAULTS.is_armed("backward raises") and x.requires_grad:
            failing: Callable[[Tensor, int], Tensor] = _BackwardFaultPoint.apply
            x = failing(x, self.owner)
        return x


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


def _with_faults(
    batches: Callable[[int, Generator], Iterable[Batch]], owner: int
) -> Callable[[int, Generator], Iterable[Batch]]:
    """``batches`` with fault points: a batch may be late or raise, its values are unchanged."""

    def made(batch_size: int, generator: Generator) -> Iterator[Batch]:
        for batch in batches(batch_size, generator):
            if FAULTS.take("slow loader", owner):
                time.sleep(SLOW_SECONDS)
            if FAULTS.take("failing loader", owner):
                raise InjectedError("a fault was injected into a loader")
            yield batch

    return made
