"""Waiting that cancellation cannot cut short."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["outlast"]


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` is done, however often the caller is cancelled meanwhile; raises nothing.

    For the end of a step whose tensors other threads still touch. The caller raises ``CancelledError`` then.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
