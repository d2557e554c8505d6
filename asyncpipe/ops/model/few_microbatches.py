"""Mini-batches that are too small for as many micro-batches as were asked for: told once, since they train slowly."""

from __future__ import annotations

import logging
from collections.abc import Sequence

__all__ = ["FewMicrobatches"]

_logger = logging.getLogger(__name__)


class FewMicrobatches:
    """Tells once that mini-batches are too small for as many micro-batches as were asked for."""

    def __init__(self) -> None:
        self._has_told = False

    def saw(self, sizes: Sequence[int], wanted: int, *, ready_made: bool) -> None:
        """Look at the micro-batches of one training step."""
        if not (self._has_told or ready_made or len(sizes) >= wanted):
            self._has_told = True
            _logger.warning(
                "a mini-batch of %d samples makes %d micro-batches where microbatches=%d, so devices wait longer for "
                "each other; give larger mini-batches, or fewer microbatches",
                sum(sizes),
                len(sizes),
                wanted,
            )
