"""Shapes for tests of closed forms and gradients: a selection; all of a range with ``ASYNCPIPE_SHAPES=all``."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["ALL", "DEVICES", "MICROBATCHES"]

ALL = os.environ.get("ASYNCPIPE_SHAPES") == "all"
DEVICES: Sequence[int] = range(1, 9) if ALL else (1, 2, 3, 4, 5, 8)
MICROBATCHES: Sequence[int] = range(1, 17) if ALL else (1, 2, 3, 4, 5, 6, 8, 9, 13, 16)
"""Multiples of the devices, their neighbours, fewer than the devices, primes."""
