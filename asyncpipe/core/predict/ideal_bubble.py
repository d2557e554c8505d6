"""The bubble that a schedule has by itself: with even stages and free copies."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.errors import AsyncpipeError

__all__ = ["IdealBubbles"]

MOST_SIMULATED = 50_000
"""The ideal bubble of graphs with more tasks than this is not computed."""


class IdealBubbles:
    """The ideal bubble of each graph, kept as long as the graph lives. Any thread may call it."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[TaskGraph, float] = WeakKeyDictionary()

    def of(self, graph: TaskGraph) -> float | None:
        """The ideal bubble of ``graph``, by a simulation (15 µs a task, the first time); ``None`` if it is unknown."""
        found = self._found.get(graph)
        if found is None and len(graph.tasks) <= MOST_SIMULATED:
            try:
                found = self._found[graph] = report(simulate(graph)).bubble_ratio
            except AsyncpipeError:
                # A user's faulty rule fails the steps that use it; it must not fail a scrape as well.
                return None
        return found
