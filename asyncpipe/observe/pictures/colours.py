"""The colours of tasks in pictures: those of ``core/kinds.py``, paler for the later stages of a device."""

from __future__ import annotations

from asyncpipe.core.kinds import TaskKind

__all__ = ["INK", "shade"]

INK = "#16212c"
"""The colour of text on a task."""
PALEST = 0.55
"""The share of white in the colours of a device's last stage."""


def shade(kind: TaskKind, virtual: int, stages: int) -> str:
    """The colour of ``kind`` at stage ``virtual`` (from 0) of a device that has ``stages``: later ones are paler."""
    if not virtual:
        return kind.colour
    white = PALEST * virtual / (stages - 1)
    parts = (int(kind.colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
