"""What the kinds of tasks are called in pictures, and their colours there and in a terminal.

F and B are as far apart as blue and green can be; I is a teal and W a lilac, so that the two halves of a backward
differ at a glance from each other and from a whole one, which a step may hold beside them. The letter stands on
every task that has room for it, since colours alone do not reach everyone.
"""

from __future__ import annotations

from asyncpipe.core.kinds import TaskKind

__all__ = ["ANSI_COLOURS", "COLOURS", "INK", "NAMES", "shade"]

COLOURS = {
    TaskKind.FORWARD: "#7fb3e0",
    TaskKind.RECOMPUTE: "#f7dc6f",
    TaskKind.BACKWARD: "#82c77f",
    TaskKind.INPUT_GRADIENT: "#4fc3b8",
    TaskKind.WEIGHT_GRADIENT: "#c7a6e2",
    TaskKind.COPY: "#9aa5b1",
    TaskKind.UPDATE: "#f0a58f",
    TaskKind.SUM: "#f2b5d0",
}
"""Of a task's background; dark text can be read on each."""
INK = "#16212c"
"""Of the text on it."""
NAMES = {
    TaskKind.FORWARD: "forward",
    TaskKind.RECOMPUTE: "recompute",
    TaskKind.BACKWARD: "backward",
    TaskKind.INPUT_GRADIENT: "input gradient",
    TaskKind.WEIGHT_GRADIENT: "weight gradient",
    TaskKind.COPY: "copy",
    TaskKind.UPDATE: "update",
    TaskKind.SUM: "sum",
}
ANSI_COLOURS = {
    TaskKind.FORWARD: 110,
    TaskKind.RECOMPUTE: 221,
    TaskKind.BACKWARD: 114,
    TaskKind.INPUT_GRADIENT: 79,
    TaskKind.WEIGHT_GRADIENT: 183,
    TaskKind.COPY: 248,
    TaskKind.UPDATE: 216,
    TaskKind.SUM: 218,
}
"""The nearest of a terminal's 256 colours; the first sixteen would be another shade in every theme."""
PALEST = 0.55
"""How much white the last stage of a device has in its colours."""


def shade(kind: TaskKind, virtual: int, stages: int) -> str:
    """The colour of ``kind`` at stage ``virtual`` (from 0) of a device that has ``stages``: later ones are paler."""
    if not virtual:
        return COLOURS[kind]
    white = PALEST * virtual / (stages - 1)
    parts = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
