"""Waiting that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["wait_uncancelled"]


async def wait_uncancelled(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` is done, even if the caller is cancelled meanwhile. Raises nothing.

    For the end of a step whose tensors are still used by other threads. The caller raises ``CancelledError`` after it.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
