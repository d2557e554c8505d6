"""How the caller's tensors get to an accelerator: by a stream of their own, ahead of the forwards that read them.

::

    caller    begins ──▶ ready        (behind what the caller has queued)
    thread      pin 0 ── pin 1 ────────── pin 2        (of what is large and not pinned)
    stream         copy 0 ── copy 1 ───────── copy 2
    compute          wait ▶ F(0) ──── wait ▶ F(1) ──── wait ▶ F(2)

Not by the stream of a copy lane: a copy would wait there for what the activation or gradient before it waits for.

What the caller has pinned is copied from where it is, and is read when that copy is over (``Inflow.is_read``). All else
is copied to pinned memory before, and is read when its forward is issued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from asyncpipe.ops.device.copies import Brought, Copier
from asyncpipe.ops.device.devices import await_event, make_current

__all__ = ["Inflow", "Key"]

AHEAD = 2
"""How many micro-batches are pinned before the forward that is issued."""
LARGE = 1 << 18
"""Bytes. To pin less takes no longer than to wake a thread."""

Key = tuple[int, int, int] | int
"""As in ``StepTensors``: of activations, those of the caller's; or of targets."""


class Inflow:
    """What the caller gives to the accelerators in one step. ``take`` is for the threads of the copiers' devices."""

    def __init__(
        self, given: Mapping[Copier, dict[Key, Sequence[Tensor]]], ready: Mapping[torch.device, torch.Event]
    ) -> None:
        """Begins to pin, if something in ``given`` is large, on a thread that ends when all was taken, or ``close``."""
        self._unread: list[torch.Event] = []
        """Events behind copies that read pinned memory of the caller's."""
        self._ready = ready
        self._left = dict(given)
        self._coming: dict[Key, Future[Brought]] = {}
        self._thread: ThreadPoolExecutor | None = None
        if any(_is_large(tensor) for each in given.values() for tensors in each.values() for tensor in tensors):
            device = next(iter(given)).lane.device
            self._thread = ThreadPoolExecutor(1, "asyncpipe inputs", make_current, (device,))
            for copier in [*given] * AHEAD:
                self._begin_next(copier)

    def take(self, copier: Copier, key: Key, tensors: Sequence[Tensor]) -> list[Tensor]:
        """These ``tensors``, for what is queued on the compute stream of ``copier`` from now on."""
        self._begin_next(copier)
        if (coming := self._coming.pop(key, None)) is not None:
            moved, there, is_pinned = coming.result()
        else:  # Not in the order of the micro-batches, or nothing is large.
            self._left.get(copier, {}).pop(key, None)
            if not copier.needs(tensors):
                # Hazard: the compute stream reads memory allocated on the caller's stream. If the caller frees it
                # meanwhile, it must not be reused before that read is done.
                copier.compute.keep(tensors)
                return list(tensors)
            moved, there, is_pinned = copier.bring(tensors, self._ready)
        # Hazard: the compute stream reads what the copies have not brought yet.
        copier.compute.wait(there)
        if is_pinned:
            self._unread.append(there)
        return moved

    @property
    def is_read(self) -> bool:
        """Whether the caller may overwrite what was taken."""
        return all(event.query() for event in self._unread)

    def wait(self) -> None:
        """Block until it is read. On any thread."""
        for event in self._unread:
            await_event(event)

    def close(self) -> None:
        """End the thread. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _begin_next(self, copier: Copier) -> None:
        """Have the thread bring one more. By one thread at a time for each copier."""
        if self._thread is not None and (left := self._left.get(copier)):
            key = next(iter(left))
            self._coming[key] = self._thread.submit(copier.bring, left.pop(key), self._ready)
        elif self._left.pop(copier, None) is not None and not self._left:
            self.close()


def _is_large(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.nbytes >= LARGE and not tensor.is_pinned()
