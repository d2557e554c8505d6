"""The names for skip connections of torch's former ``Pipe``, which ``asyncpipe.ops.model.skip`` has too."""

from __future__ import annotations

from asyncpipe.ops.model.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
