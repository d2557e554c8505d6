"""The transport by gloo: a process group of two for each edge, the sender is rank 0. Tensors travel over the host.

Each group has its own connection, over the loopback interface or between hosts. Nobody shows there who they are, so a
network that strangers are in needs a tunnel (``docs/hosts.md``). Tensors are sent one by one, from and into their own
memory. A send ends only when the receiver has asked for it, so nothing waits for one whose header may not have been
sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from asyncpipe.errors import EdgeError
from asyncpipe.ops.edges.channel import EdgeChannel
from asyncpipe.ops.edges.message import MessageLayout
from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut, empty, flat, host_tensor
from asyncpipe.ops.torch_internals import gloo_options

__all__ = ["Gloo", "GlooIn", "GlooOut"]

SENDER, RECEIVER = 0, 1
INLINE_BYTES = 1 << 20
"""The edge's own socket is faster than gloo up to here."""
DIRECT_BYTES = 1 << 19
LOOK_SECONDS = 1.0
"""Between two looks whether the other host is still there."""
FOREVER = timedelta(days=1000)
"""A peer that is alive takes what is sent: its thread waits for nothing. One that is not is noticed, or ended."""
_DATA, _ABORT = 0, 1


class Gloo:
    """The transport. Its groups share one device of gloo's, which is a thread."""

    def __init__(self, device: torch.device, address: str) -> None:
        """``device`` is this worker's; messages arrive on the host. Other workers connect at ``address``."""
        if not distributed.is_gloo_available():
            raise EdgeError("this torch has no gloo; use the transport 'shared_memory'")
        self._gloo: Any = distributed.ProcessGroupGloo
        self._device: Any = self._gloo.create_device(hostname=address)

    def sender(self, store: PairStore) -> PayloadOut:
        return GlooOut(self._group(store, SENDER), store.channel)

    def receiver(self, store: PairStore) -> PayloadIn:
        return GlooIn(self._group(store, RECEIVER), store.channel)

    def close(self) -> None:
        self._device = None

    def _group(self, store: PairStore, rank: int) -> Any:
        options = gloo_options(self._device, store.seconds)
        try:
            return self._gloo(store, rank, 2, options)
        finally:
            del options  # It has sockets, and a traceback would keep it.


class _GlooEnd:
    """One end of a group of two."""

    rank: int

    def __init__(self, group: Any, channel: EdgeChannel) -> None:
        self._group: Any = group
        self._waits = self._is_gone = False
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        if channel.is_far:
            name = f"asyncpipe gloo {channel.descriptor}"
            self._watcher = threading.Thread(target=self._watch, args=(channel,), name=name, daemon=True)
            self._watcher.start()

    def _wait(self, work: Any) -> None:
        self._waits = True
        try:
            work.wait(FOREVER)
        except RuntimeError:
            if self._is_gone:
                raise ConnectionError("the other host does not answer") from None
            raise
        finally:
            self._waits = False
            del work  # A traceback would keep it.

    def _watch(self, channel: EdgeChannel) -> None:
        """Abort what waits for a host that is gone without a word. The edge's socket notices; gloo's do not."""
        while not self._closed.wait(LOOK_SECONDS):
            if self._waits and channel.hung_up():
                self._is_gone = True
                self.abort()
                return

    def abort(self) -> None:
        # A group has no other way to end what blocks: after a timeout of one operation gloo ends all of them.
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self.rank, _ABORT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        self._group = None


class GlooOut(_GlooEnd, PayloadOut):
    """The sender's end."""

    rank = SENDER
    inline_bytes = INLINE_BYTES
    direct_bytes = DIRECT_BYTES

    def __init__(self, group: Any, channel: EdgeChannel) -> None:
        super().__init__(group, channel)
        self._begun: deque[tuple[Any, Tensor]] = deque()
        """With the tensors, which gloo reads until it is done."""

    def follow(self, layout: MessageLayout, tensors: Sequence[Tensor | None]) -> None:
        for each, tensor in zip(layout.tensors, tensors, strict=True):
            if each is not None and tensor is not None and each.size:
                source = flat(host_tensor(each, tensor))
                self._begun.append((self._group.send([source], RECEIVER, _DATA), source))

    def begun(self) -> int:
        return len(self._begun)

    def settle(self, begun: int) -> None:
        for _ in range(begun):
            work, tensor = self._begun.popleft()
            try:
                self._wait(work)
            finally:
                del work, tensor  # A traceback would keep them.

    def close(self) -> None:
        super().close()
        self._begun.clear()


class GlooIn(_GlooEnd, PayloadIn):
    """The receiver's end."""

    rank = RECEIVER

    def take(self, layout: MessageLayout, slot: int) -> tuple[list[Tensor | None], torch.Event | None]:
        tensors = [None if each is None else empty(each) for each in layout.tensors]
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self._wait(self._group.recv([flat(tensor)], SENDER, _DATA))
        return tensors, None
