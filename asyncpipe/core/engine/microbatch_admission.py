"""Which micro-batches each device holds in one step of a ruled schedule, and which wait to be admitted.

Micro-batches come to a device in the order of their indices, each when the rule admits it. From then on all its tasks
may run there; with its last task it leaves::

    F(i) is ready ──▶ waiting ──▶ held ──▶ gone
                       i is next and      its last task on
                       admit(F(i), live)  this device is done

This order makes rules free of deadlock. Take the unfinished micro-batch with the lowest index, and a device that it
still has to enter. Every micro-batch with a lower index is done, and those with a higher one must wait until it has
entered. So the device holds nothing, and an empty device admits a micro-batch: ``lower`` checks that, and a rule that
answers otherwise later fails its step. On the devices that it has entered, its tasks may run. So it always gets on.
"""

from __future__ import annotations

from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.schedules.protocol import Action

__all__ = ["StepAdmissions"]


class StepAdmissions:
    """The state of one step's admissions. Mutated by the scheduler alone."""

    def __init__(self, graph: TaskGraph) -> None:
        """``graph`` must have a rule."""
        assert graph.rule is not None
        self._rule = graph.rule
        self._graph = graph
        self._left = [list(loads) for loads in self._rule.loads]
        self._next = [next((i for i, load in enumerate(loads) if load), 0) for loads in self._left]
        """The next micro-batch of each device, whose row may begin with a later one."""
        self._waiting: list[dict[int, list[int]]] = [{} for _ in graph.devices]
        self.live = [0] * len(graph.devices)
        """How many micro-batches each device holds."""

    def device(self, task: int) -> int:
        """The index of the device that ``task`` runs on."""
        return self._graph.placement[self._graph.tasks[task].stage]

    def enter(self, task: int) -> list[int] | None:
        """Let a compute task run; the tasks that waited for it and may try again, or ``None`` if it has to wait
        itself."""
        _, kind, microbatch, stage, *_ = self._graph.tasks[task]
        device = self.device(task)
        following = self._next[device]
        if microbatch < following:
            return []
        if microbatch > following or not self._rule.admit(Action(kind, microbatch, stage), self.live[device]):
            self._waiting[device].setdefault(microbatch, []).append(task)
            return None
        self._next[device] += 1
        self.live[device] += 1
        waiting = self._waiting[device]
        return waiting.pop(microbatch, []) + waiting.pop(microbatch + 1, [])

    def leave(self, task: int) -> list[int]:
        """A compute task is done; the waiting tasks that may try again, because its micro-batch has left the device."""
        device, microbatch = self.device(task), self._graph.tasks[task].microbatch
        self._left[device][microbatch] -= 1
        if self._left[device][microbatch]:
            return []
        self.live[device] -= 1
        return self._waiting[device].pop(self._next[device], [])

    def is_stuck(self, task: int) -> bool:
        """Whether the rule refused ``task``, which has to wait, although the device holds nothing: it always will."""
        device = self.device(task)
        return not self.live[device] and self._graph.tasks[task].microbatch == self._next[device]
