"""Tells in the log how a trace gets on, if it takes long."""

from __future__ import annotations

import logging
from time import monotonic

__all__ = ["TraceProgress"]

_logger = logging.getLogger(__name__)

_LONG = 10.0
"""Seconds after which something is told, and again."""


class TraceProgress:
    """The time that a trace takes. Warns once if it is long, and tells what is traced then."""

    def __init__(self, model: str, dynamic: str) -> None:
        self._model = model
        self._faster = "" if dynamic == "batch" else f" (dynamic={dynamic!r}; 'batch' may be faster)"
        self._began = monotonic()
        self._next = self._began + _LONG
        self._has_warned = False
        self.mode = "train"

    @property
    def is_due(self) -> bool:
        """Whether ``tell`` has something to say."""
        return monotonic() >= self._next

    def tell(self, where: str) -> None:
        """Log that ``where``, the name of a submodule, is traced at this moment."""
        self._next = monotonic() + _LONG
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        seconds = monotonic() - self._began
        _logger.log(
            level,
            "tracing %s has taken %.0f s; at %s in %s mode%s",
            self._model,
            seconds,
            where or "its top",
            self.mode,
            self._faster,
        )

    def done(self) -> None:
        """Log how long it has taken."""
        seconds = monotonic() - self._began
        level = logging.WARNING if seconds > _LONG and not self._has_warned else logging.INFO
        _logger.log(level, "traced %s in %.1f s%s", self._model, seconds, self._faster if seconds > _LONG else "")
