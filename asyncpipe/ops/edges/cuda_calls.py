"""The few calls of CUDA by which two processes share memory, and nothing else. Tests replace these functions.

Handles of memory and events are bytes and numbers. They travel in messages of fixed form, and a receiver opens them: it
unpickles nothing.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from asyncpipe.ops.torch_internals import forget_storage, open_storage, share_storage

__all__ = ["Handles", "PinnedMap", "forget", "open_shared", "pin", "share", "shareable_event", "unpin"]

Handles = tuple[tuple[Any, ...], bytes]
"""Of memory, as torch gives them, and of the event that goes with it."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: for all devices of the process."""


def pin(address: int, size: int) -> bool:
    """Let devices read and write memory of the host by themselves; false if CUDA does not."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE)):  # type: ignore[no-untyped-call]
        # CUDA keeps the error for who asks next, which would be the launch of some task's kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False
    return True


def unpin(address: int) -> None:
    """Undo ``pin``. No copy may be under way there."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class PinnedMap(mmap.mmap):
    """A mapping that is pinned as long as it is there."""

    def __init__(self, *_: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        self._pinned = address if pin(address, len(self)) else None

    def __del__(self) -> None:
        # Before it is unmapped. A subclass is: what a weak reference calls would come after that.
        if self._pinned is not None:
            unpin(self._pinned)


def shareable_event() -> torch.Event:
    """An event that other processes can wait for."""
    event: torch.Event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
    return event


def share(memory: Tensor, event: Any) -> Handles:
    """The handles of ``memory``, a whole allocation of a device, and of an ``event`` that was recorded.

    Raises ``RuntimeError`` for memory that cannot be shared, such as an allocator's of the user's own.
    """
    return share_storage(memory.untyped_storage()), event.ipc_handle()


def open_shared(handles: Handles, device: torch.device) -> tuple[Tensor, torch.Event]:
    """The memory (bytes) and the event of another process, for use on ``device``, this worker's own.

    The memory may be on another device, which this process need not see: it is mapped into the own one's addresses.
    Raises ``RuntimeError`` where the two devices do not reach each other.
    """
    memory, event = handles
    opened: torch.Event = torch.cuda.Event.from_ipc_handle(device, event)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device=device).set_(open_storage(device.index, *memory[1:])), opened


def forget(handles: Handles) -> None:
    """The other process uses the memory no more, also if it has ended without having said so."""
    forget_storage(*handles[0][4:6])
