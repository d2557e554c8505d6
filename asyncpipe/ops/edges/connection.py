"""The transport between two hosts: tensors go with their headers on the edge's own connection, whatever their size.

So they are as safe there as headers are: the other end has shown that it knows the secret. They are sent from, and
received into, their own memory.
"""

from __future__ import annotations

import torch

from asyncpipe.ops.edges.pair_store import PairStore
from asyncpipe.ops.edges.payload import PayloadIn, PayloadOut

__all__ = ["EdgeConnection", "EdgeConnectionOut"]

DIRECT_BYTES = 1 << 19
"""To send more takes longer than to hand over to another thread."""


class EdgeConnectionOut(PayloadOut):
    """The sender's side."""

    inline_bytes = 1 << 62
    direct_bytes = DIRECT_BYTES


class EdgeConnection:
    """The transport."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is this worker's; messages arrive on the host."""

    def sender(self, store: PairStore) -> PayloadOut:
        return EdgeConnectionOut()

    def receiver(self, store: PairStore) -> PayloadIn:
        return PayloadIn()
