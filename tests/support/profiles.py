"""Profiles for tests of predictions."""

from __future__ import annotations

from collections.abc import Mapping

from asyncpipe.core.predict.layer_profile import CALLER, SentTensor

__all__ = ["chain"]


def chain(*sizes: int, saved_by: Mapping[int, tuple[int, ...]] | None = None) -> tuple[SentTensor, ...]:
    """What layers send that pass one tensor from each to the next: the caller's input first, their outputs then."""
    saved = saved_by or {}
    return tuple(
        SentTensor(k - 1, (k if k < len(sizes) - 1 else CALLER,), size, saved.get(k, ()), k)
        for k, size in enumerate(sizes)
        if size
    )
