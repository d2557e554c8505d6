"""Looks at each step's loss, for those who do not: one that is not a number makes every weight one as well."""

from __future__ import annotations

import logging

from torch import Tensor

from asyncpipe.errors import LossError
from asyncpipe.ops.device.copies import HostCopy

__all__ = ["LossWatch"]

_logger = logging.getLogger(__name__)
_TEXT = (
    "the loss of a mini-batch is not a number (nan), and so will be every weight that is updated by its gradients; "
    "look at the learning rate and at the mini-batch, or give on_nan='ignore'"
)


class LossWatch:
    """One for a pipeline; used on the caller's thread."""

    def __init__(self, on_nan: str = "warn") -> None:
        self._on_nan = on_nan
        self._coming: HostCopy | None = None
        """An earlier loss on its way to the host: nobody waits for the device only to warn."""

    def saw(self, loss: Tensor | None) -> None:
        """Warn of a loss that is not a number, the first time; or raise ``LossError``."""
        if loss is None or self._on_nan == "ignore":
            return
        if self._on_nan == "raise":
            if loss.isnan():
                raise LossError(_TEXT)
            return
        if self._coming is None:
            self._coming = HostCopy(loss)
        if (found := self._coming.now()) is None:
            return
        self._coming = None
        if found.isnan():
            self._on_nan = "ignore"
            _logger.warning(_TEXT)
