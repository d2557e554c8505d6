"""What A and G do in one step: take what replicas have, add it up, and spread it (``replica_sums.py``).

Replicas in this process read each other's gradients. What those of other workers have comes with messages
(``crossings.py``), and is put into the step's tables at the place where A and G look for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncpipe.core.graph.task import Task
from asyncpipe.core.graph.task_graph import TaskGraph
from asyncpipe.core.kinds import TaskKind
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.replica_sums import Contribution, ReplicaSums
from asyncpipe.ops.execute.step_tensors import StepTensors

__all__ = ["Reductions"]


class Reductions:
    """Used on the threads of the stages' devices; the graph orders the tasks."""

    def __init__(
        self, graph: TaskGraph, tensors: StepTensors, sums: Mapping[int, ReplicaSums], guard: GradientGuard
    ) -> None:
        """``sums``: by position of a stage in its row."""
        self._rows = graph.rows
        self._shards = graph.updates and graph.wiring.shards
        self._is_final = graph.updates
        """Whether optimizers use the sums. Otherwise they are the caller's: they are divided, and added to the earlier
        gradients, when the step is over."""
        self._tensors = tensors
        self._sums = sums
        self._guard = guard

    def has(self, stage: int) -> bool:
        """Whether the gradients of ``stage`` are added up here."""
        return stage % self._rows.stages in self._sums

    def reduce(self, task: Task, here: Sequence[bool]) -> None:
        """Add up a part of a bucket over the replicas, in their order; ``here`` says which stages this process has."""
        bucket, shares = _bucket(task), []
        for stage in self._rows.replicas(task.stage):
            share = self._tensors.shares.pop((task.stage, bucket, stage), None)
            if share is None and here[stage]:
                share = self._share(stage, task)
            if share is not None:  # Otherwise the replica has no micro-batch.
                shares.append(share)
        sums, row = self._of(task.stage), self._rows.stage_row(task.stage)
        with torch.no_grad():
            total, present = sums.add_up(row, bucket, shares)
            if self._is_final and not row:
                total, present = sums.after_hooks(bucket, total, present, self._guard)
        self._tensors.reduced[task.stage, bucket] = total, present

    def gather(self, task: Task) -> None:
        """Make the parts of all replicas the gradients of the bucket's parameters."""
        if self._shards:
            self._gather_updated(task)
            return
        bucket = _bucket(task)
        parts = [self._tensors.reduced[stage, bucket] for stage in self._rows.replicas(task.stage)]
        with torch.no_grad():
            values = [values for values, _ in parts]
            self._of(task.stage).spread(self._rows.stage_row(task.stage), bucket, values, parts[0][1])
        if not self._is_final:
            # Another backward of the same pass would add its own to them, and they would be added up twice.
            for stage in self._rows.replicas(task.stage)[1:]:
                self._of(stage).drop_gradients(self._rows.stage_row(stage), bucket)

    def begin_update(self, stage: int) -> None:
        """Make what was added up the gradients that the optimizer of ``stage`` uses."""
        sums, row = self._of(stage), self._rows.stage_row(stage)
        if self._shards:
            sums.begin_update(row, [self._tensors.reduced[stage, bucket] for bucket in range(len(sums.buckets))])
        else:
            for bucket in range(len(sums.buckets)):
                self._guard.forget(sums.of(row, bucket))  # Earlier gradients are in the sums.

    def _gather_updated(self, task: Task) -> None:
        """Take the parts of the bucket's parameters that the other replicas have updated."""
        bucket, sums, row = _bucket(task), self._of(task.stage), self._rows.stage_row(task.stage)
        with torch.no_grad():
            for other, stage in enumerate(self._rows.replicas(task.stage)):
                if other == row:
                    continue
                came = self._tensors.updated.pop((task.stage, bucket, stage), None)
                sums.put(row, other, bucket, sums.updated(other, bucket) if came is None else came)
        # Not before: others have read both.
        self._guard.forget(sums.of(row, bucket))
        sums.drop_gradients(row, bucket)

    def taken(self, stage: int, waiting: Task) -> list[Tensor | None]:
        """What ``stage`` has for a task of a replica in another worker."""
        if waiting.kind is TaskKind.REDUCE:
            values, present, counted, earlier = self._share(stage, waiting)
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
        row = self._rows.stage_row(stage)
        count = self._tensors.count_of(self._rows.microbatches_of(row)) if self._is_final else None
        earlier = self._guard.earlier if self._is_final and not row else None
        taker = self._rows.stage_row(task.stage)
        with torch.no_grad():
            return self._of(stage).share(row, taker, _bucket(task), count, earlier)

    def _of(self, stage: int) -> ReplicaSums:
        return self._sums[stage % self._rows.stages]


def _bucket(task: Task) -> int:
    assert task.bucket is not None
    return task.bucket


def _there(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
