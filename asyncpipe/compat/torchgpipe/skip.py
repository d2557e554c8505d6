"""The names of torchgpipe's module for skip connections. They are those of ``asyncpipe.ops.model.skips``."""

from __future__ import annotations

from asyncpipe.ops.model.skip_layout import verify_skippables
from asyncpipe.ops.model.skips import Namespace, pop, skippable, stash

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
