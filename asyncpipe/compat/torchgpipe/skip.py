"""torchgpipe's names for skip connections, which ``asyncpipe.ops.model.skips`` has too."""

from __future__ import annotations

from asyncpipe.ops.model.skip_layout import verify_skippables
from asyncpipe.ops.model.skips import Namespace, pop, skippable, stash

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
