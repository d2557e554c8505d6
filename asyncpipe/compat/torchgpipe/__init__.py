"""The names of torchgpipe 0.0.7: ``from asyncpipe.compat.torchgpipe import GPipe``."""

from __future__ import annotations

from asyncpipe.compat.torchgpipe.gpipe import GPipe
from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing

__all__ = ["GPipe", "__version__", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"
"""The version of torchgpipe whose names these are."""
