"""The soak's jobs: the example's character model with places where something goes wrong when it was asked for.

::

    the soak ── FAULTS.arm("stage raises") ──▶ FAULTS ◀── take ── the first fault point of a job that passes by
                                                                    in a stage, a backward, the loader, a snapshot

A fault belongs to the job that takes the first of it, so that one which shall fail a step at every attempt fails that
of one job. The workload is registered like anybody's, as ``asyncpipe.bench.soak_entry:build``; service and run know
nothing of this.
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

from asyncpipe.bench.example import load_example
from asyncpipe.train.workload import Batch, Workload

__all__ = ["ENTRY", "FAULTS", "HANG_SECONDS", "SLOW_SECONDS", "FaultBoard", "InjectedError", "build"]

ENTRY = f"{__name__}:build"
HANG_SECONDS = 8.0
"""How long a hung task hangs; the soak's watchdog gives it up before."""
SLOW_SECONDS = 1.5
"""How long a slow loader is at one batch."""
NOBODY = -1
"""Takes no fault."""
TOO_MUCH = 2**50
"""Numbers that no machine's memory holds: allocating them is refused as in earnest."""


class InjectedError(RuntimeError):
    """Something that goes wrong because the soak wants it to."""


class FaultBoard:
    """The faults that are asked for and not taken yet. Any thread may use it."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        """How often each was."""
        self.released = Event()
        """Ends what hangs, now and from now on."""
        self._armed: dict[str, tuple[int, int | None]] = {}
        self._lock = Lock()

    def arm(self, kind: str, times: int = 1) -> None:
        """Let the first job that comes past such a place take ``kind`` there, ``times`` times in a row."""
        with self._lock:
            self._armed[kind] = (times, None)

    def is_armed(self, kind: str) -> bool:
        """Whether somebody may take it."""
        return kind in self._armed

    def take(self, kind: str, owner: int) -> bool:
        """Whether it happens here and now to the job that ``owner`` stands for."""
        if kind not in self._armed:  # As nearly always; without the lock.
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
        """Nothing is asked for any more, and nothing hangs."""
        with self._lock:
            self._armed.clear()
        self.released.set()

    def restart(self) -> None:
        """As new: for the next soak of this process."""
        self.clear()
        self.taken.clear()
        self.released.clear()


FAULTS = FaultBoard()
"""Of this process: an entry is given nothing but its parameters."""

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
    """The example's workload, with fault points before every block, in its batches and in its snapshots.

    Without ``faults`` it takes none. Raises ``OptionError`` where there is no checkout with the example.
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
        states={"soak": _Reluctant(owner)},
    )


class _FaultPoint(nn.Module):
    """Hands on what it gets, unless a fault was asked for."""

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        if FAULTS.take("stage raises", self.owner) or FAULTS.take("stage raises at every attempt", self.owner):
            raise InjectedError("a stage failed, as it was asked to")
        if FAULTS.take("out of memory", self.owner):
            torch.empty(TOO_MUCH)
        if FAULTS.take("hung task", self.owner):
            FAULTS.released.wait(HANG_SECONDS)
        if FAULTS.take("loss is NaN", self.owner):
            x = x * float("nan")
        if FAULTS.is_armed("backward raises") and x.requires_grad:
            failing: Callable[[Tensor, int], Tensor] = _FailsBackward.apply
            x = failing(x, self.owner)
        return x


class _FailsBackward(torch.autograd.Function):
    """The identity, whose backward may be the place of a fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: int) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if FAULTS.take("backward raises", ctx.owner):
            raise InjectedError("a backward failed, as it was asked to")
        return gradient, None


class _Reluctant:
    """A state that joins in snapshots, and may fail them."""

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
    """``batches`` that may be late, or fail; what they yield is the same."""

    def made(batch_size: int, generator: Generator) -> Iterator[Batch]:
        for batch in batches(batch_size, generator):
            if FAULTS.take("slow loader", owner):
                time.sleep(SLOW_SECONDS)
            if FAULTS.take("failing loader", owner):
                raise InjectedError("a loader failed, as it was asked to")
            yield batch

    return made
