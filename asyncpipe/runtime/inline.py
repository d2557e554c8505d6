"""What a task calls runs on the task's own thread: if it waited for a lane, it could wait for itself.

A loss that calls a teacher on the same devices would otherwise hang::

    cpu:0   ...
    cpu:1   F(0,1) of the student: its loss calls the teacher, and waits for ──┐
            F(0,1) of the teacher, queued behind it ◀──────────────────────────┘

So the teacher's tasks run inside the student's F(0,1), one by one, on its thread and in no lane. Nothing there waits
for another thread, so nothing waits in a circle, whichever pipelines and pools call each other. They have no journal
and no metrics: their time is that of the task that called.
"""

from __future__ import annotations

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.runtime.execution import Around, Bind, call_inside
from asyncpipe.runtime.step_driver import task_error

__all__ = ["run_inline"]


def run_inline(graph: TaskGraph, bind: Bind, around: Around) -> None:
    """Run ``graph`` on the calling thread, each task when the one before has returned; raises ``TaskError``.

    In the order of their numbers: those are priorities, and a task's is greater than those of its dependencies.
    """
    for task in graph.tasks:
        try:
            call_inside(around(task.lane.device), bind(task))
        except BaseException as error:
            raise task_error(task, error) from error
