"""What A and G do in one step: take what replicas have, add it up, and spread it (``replica_sums.py``).

Replicas in this process read each other's gradients. What those of other workers have comes with messages
(``crossings.py``), and is put into the step's tables at the place where A and G look for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.replica_sums import Contribution, ReplicaSums
from asyncpipe.ops.execute.step_tensors import StepTensors

__all__ = ["Reductions"]

Beside = Callable[[Tensor], AbstractContextManager[Callable[[Sequence[Tensor]], Sequence[Tensor]]]]
"""A context in which what is on the device of a tensor can be read, and what brings it to the device of the task."""


class Reductions:
    """Used on the threads of the stages' devices; the graph orders the tasks."""

    def __init__(
        self, graph: TaskGraph, tensors: StepTensors, sums: Mapping[int, ReplicaSums], guard: GradientGuard
    ) -> None:
        """``sums``: by position of a stage in its row."""
        self._rows = graph.rows
        self._shards = graph.updates and graph.wiring.shards
        self._is_final = graph.updates
        """Whether optimizers use the sums. Otherwise they are the caller's, and added to the earlier gradients when the
        step is over."""
        self._tensors = tensors
        self._sums = sums
        self._guard = guard

    @property
    def shards(self) -> bool:
        """Whether each replica updates a part of what is added up."""
        return self._shards

    def has(self, stage: int) -> bool:
        """Whether the gradients of ``stage`` are added up here."""
        return stage % self._rows.stages in self._sums

    def reduce(self, task: Task, here: Sequence[bool], beside: Beside) -> Sequence[Tensor]:
        """Add up a part of a bucket over the replicas, in their order; ``here`` says which stages this process has.

        Returns the gradients that hooks have seen.
        """
        bucket, shares = _bucket(task), []
        sums, row = self._of(task.stage), self._rows.stage_row(task.stage)
        for other, stage in enumerate(self._rows.replicas(task.stage)):
            share = self._tensors.shares.pop((task.stage, bucket, stage), None)
            is_here = share is None and here[stage]
            with beside(sums.of(other if is_here else row, bucket)[0]) as bring:
                if is_here:
                    share = self._share(stage, task)
                if share is not None:
                    earlier = share.earlier and bring(share.earlier)
                    share = share._replace(values=bring(share.values), earlier=earlier)
            if is_here and share is not None:
                share = share._replace(counted=self._count(other, task.stage, bucket))
            if share is not None:  # Otherwise the replica has no micro-batch.
                shares.append(share)
        with torch.no_grad():
            total, present = sums.add_up(row, bucket, shares)
            if self._is_final and not row:
                total, present = sums.after_hooks(bucket, total, present, self._guard)
        self._tensors.reduced[task.stage, bucket] = total, present
        return [gradient for each in sums.of(row, bucket) if not row and (gradient := each.grad) is not None]

    def gather(self, task: Task, beside: Beside) -> None:
        """Make the parts of all replicas the gradients of the bucket's parameters."""
        bucket, sums, row = _bucket(task), self._of(task.stage), self._rows.stage_row(task.stage)
        if self._shards:
            self._gather_updated(task, beside)
            return
        parts = [self._tensors.reduced[stage, bucket] for stage in self._rows.replicas(task.stage)]
        values: list[Tensor] = []
        for part, _ in parts:
            with beside(part) as bring:
                values += bring([part])
        with torch.no_grad():
            sums.spread(row, bucket, values, parts[0][1])
        if not self._is_final:
            # Another backward of the same pass would add its own to them, and they would be added up twice.
            for other in range(1, len(self._rows)):
                sums.drop_gradients(other, bucket)

    def begin_update(self, stage: int) -> Sequence[Tensor]:
        """Make what was added up the gradients that the optimizer of ``stage`` uses; returns those that A has made."""
        sums, row = self._of(stage), self._rows.stage_row(stage)
        if not self._shards:
            for bucket in range(len(sums.buckets)):
                self._guard.forget(sums.of(row, bucket))  # Earlier gradients are in the sums.
            return ()
        reduced = [self._tensors.reduced[stage, bucket] for bucket in range(len(sums.buckets))]
        sums.begin_update(row, reduced)
        return [values for values, _ in reduced]

    def _gather_updated(self, task: Task, beside: Beside) -> None:
        """Take the parts of the bucket's parameters that the other replicas have updated."""
        bucket, sums, row = _bucket(task), self._of(task.stage), self._rows.stage_row(task.stage)
        for other, stage in enumerate(self._rows.replicas(task.stage)):
            if other == row:
                continue
            came = self._tensors.updated.pop((task.stage, bucket, stage), None)
            with torch.no_grad():
                with beside(sums.of(row if came else other, bucket)[0]) as bring:
                    values = bring(came or sums.updated(other, bucket))
                sums.put(row, other, bucket, values)
        # Not before: others have read both.
        self._guard.forget(sums.of(row, bucket))
        sums.drop_gradients(row, bucket)

    def taken(self, stage: int, waiting: Task) -> list[Tensor | None]:
        """What ``stage`` has for a task of a replica in another worker."""
        if waiting.kind is TaskKind.REDUCE:
            values, present, _, earlier = self._share(stage, waiting)
            counted = self._count(self._rows.stage_row(stage), stage, _bucket(waiting))
            return [*values, present, counted, *(earlier or ())]
        if self._shards:
            with torch.no_grad():
                return [*self._of(stage).updated(self._rows.stage_row(stage), _bucket(waiting))]
        return list(self._tensors.reduced[stage, _bucket(waiting)])

    def arrived(self, stage: int, waiting: Task, tensors: Sequence[Tensor | None]) -> None:
        """Put what ``taken`` has returned in the worker of ``stage`` where ``waiting`` finds it."""
        bucket, key = _bucket(waiting), (waiting.stage, _bucket(waiting), stage)
        if waiting.kind is TaskKind.REDUCE:
            count = self._of(waiting.stage).runs(self._rows.stage_row(waiting.stage), bucket)
            counted, present = tensors[count + 1], *_there(tensors[count : count + 1])
            earlier = _there(tensors[count + 2 :]) or None
            self._tensors.shares[key] = Contribution(_there(tensors[:count]), present, counted, earlier)
        elif self._shards:
            self._tensors.updated[key] = _there(tensors)
        else:
            values, present = _there(tensors)
            self._tensors.reduced[stage, bucket] = values, present

    def _share(self, stage: int, task: Task) -> Contribution:
        """What ``stage`` has for A, without its count."""
        row = self._rows.stage_row(stage)
        earlier = self._guard.earlier if self._is_final and not row else None
        with torch.no_grad():
            return self._of(stage).share(row, self._rows.stage_row(task.stage), _bucket(task), earlier)

    def _count(self, row: int, reader: int, bucket: int) -> Tensor | None:
        """The sum of the counts of a row, for the device of the stage ``reader``."""
        device = self._of(reader).of(self._rows.stage_row(reader), bucket)[0].device
        return self._tensors.count_of(self._rows.microbatches_of(row), device)

    def _of(self, stage: int) -> ReplicaSums:
        return self._sums[stage % self._rows.stages]


def _bucket(task: Task) -> int:
    assert task.bucket is not None
    return task.bucket


def _there(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
