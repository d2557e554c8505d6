"""Gradients that replicas of a stage add up, bucket by bucket: what A and G compute (``core/graph/lower.py``).

The parameters of a stage are spread over buckets. Each replica adds up a part of each bucket, in the order of the
replicas, whoever adds and wherever they are: so the sum has the same bits on threads, in processes and on hosts::

    bucket      parameter 0 │ parameter 1         │ parameter 2
    parts       replica 0         │ replica 1         │ replica 2
    A(·,k)      0 + 1 + 2         │ 0 + 1 + 2         │ 0 + 1 + 2          of the part's gradients
    G(·,k)      all parts, in every replica

A parameter without a gradient in some replica counts as zero there; one without any has none afterwards. The sum is
what the optimizer uses: divided by the losses' counts, with the gradients that were there before the step. A hook of a
parameter sees its whole gradient once, so replica 0 adds up all of a bucket that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError, StageError
from asyncpipe.ops.execute.buckets import buckets
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.optimizer_shards import Shard
from asyncpipe.ops.execute.parameter_hooks import hooked

__all__ = ["BUCKET_BYTES", "ReplicaSums", "Share", "added_up"]

BUCKET_BYTES = 25 << 20


class Share(NamedTuple):
    """What one replica has of a part of a bucket, for the replica that adds it up."""

    values: Tensor
    """Its gradients in this part, as a vector."""
    present: Tensor
    """For each parameter of the bucket, whether it has a gradient there; on the host."""
    counted: Tensor | None
    """The sum of its losses' counts, if they come with counts."""
    earlier: Tensor | None
    """Of replica 0: the gradients in this part that were there before the step."""


class ReplicaSums:
    """The parameters of one stage in each replica, and their buckets."""

    def __init__(self, stage: int, parameters: Mapping[int, Sequence[nn.Parameter]], most_bytes: int) -> None:
        """``parameters``: of each replica, the same in the same order; those of replicas elsewhere have no values."""
        self._stage = stage
        self._parameters = parameters
        self.buckets = buckets(parameters[0], most_bytes)
        self._hooked: set[int] = set()
        """The buckets of which replica 0 adds up all."""
        self._shards: dict[int, Shard] = {}
        """By replica of this process whose optimizer updates its parts alone."""

    def shard(self, replica: int, optimizer: torch.optim.Optimizer, *, hosted: bool) -> None:
        """Have ``optimizer``, which was made of all parameters of ``replica``, update its parts alone."""
        parts = [bucket.part(replica, len(self._parameters)) for bucket in self.buckets]
        self._shards[replica] = Shard(self._parameters[replica], self.buckets, parts, optimizer, hosted=hosted)

    def begin(self) -> None:
        """A step begins: look for hooks of parameters. Raises ``OptionError`` where no replica has a whole gradient."""
        self._hooked = {bucket for bucket in range(len(self.buckets)) if hooked(self.of(0, bucket))}
        if self._hooked and self._shards:
            raise OptionError(
                f"a parameter of stage {self._stage} has a hook, which sees a whole gradient, and with shard_optimizer "
                "no replica has one; remove the hook, or leave shard_optimizer out"
            )

    def begin_update(self, replica: int, reduced: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make what the replica has added up of each bucket the gradients that its optimizer uses."""
        self._shards[replica].take(reduced)

    def updated(self, replica: int, bucket: int) -> Tensor:
        """The parameters that ``replica`` has updated, as a vector."""
        return self._vector(self.of(replica, bucket), bucket, self.part(replica, bucket), torch.Tensor.detach)

    def put(self, replica: int, other: int, bucket: int, values: Tensor) -> None:
        """Have in ``replica`` the parameters that ``other`` has updated."""
        mine = self.of(replica, bucket)
        for number, elements, place in self.buckets[bucket].overlaps(self.part(other, bucket)):
            mine[number].view(-1)[elements].copy_(values[place])

    def drop_gradients(self, replica: int, bucket: int) -> None:
        """Everybody has what they need of the gradients of ``replica``."""
        for parameter in self.of(replica, bucket):
            parameter.grad = None

    def part(self, replica: int, bucket: int) -> range:
        """The elements of a bucket that ``replica`` adds up."""
        replicas = 1 if bucket in self._hooked else len(self._parameters)
        return self.buckets[bucket].part(replica, replicas)

    def of(self, replica: int, bucket: int) -> Sequence[nn.Parameter]:
        """The parameters of a bucket."""
        first, ends = self.buckets[bucket]
        return self._parameters[replica][first : first + len(ends)]

    def share(
        self,
        replica: int,
        taker: int,
        bucket: int,
        count: Tensor | None,
        earlier: Callable[[nn.Parameter], Tensor | None] | None,
    ) -> Share:
        """What ``replica`` has for the part that ``taker`` adds up; ``earlier`` has the gradients before the step."""
        mine, part = self.of(replica, bucket), self.part(taker, bucket)
        has_gradient, before = [parameter.grad is not None for parameter in mine], None
        if earlier is not None and bucket not in self._hooked:
            had_gradient = [earlier(parameter) is not None for parameter in mine]
            if any(had_gradient):
                before = self._vector(mine, bucket, part, earlier)
                has_gradient = list(map(or_, has_gradient, had_gradient))
        return Share(self._vector(mine, bucket, part, _gradient), torch.tensor(has_gradient), count, before)

    def _vector(
        self,
        parameters: Sequence[nn.Parameter],
        bucket: int,
        part: range,
        value: Callable[[nn.Parameter], Tensor | None],
    ) -> Tensor:
        pieces = []
        for number, elements, _ in self.buckets[bucket].overlaps(part):
            found = value(parameters[number])
            if found is not None and found.layout is not torch.strided:
                raise StageError(
                    f"a parameter of stage {self._stage} has a sparse gradient, which replicas cannot add up in "
                    "parts; give its embedding sparse=False, or leave the optimizer out of the pipeline"
                )
            length = elements.stop - elements.start
            pieces.append(parameters[number].new_zeros(length) if found is None else found.reshape(-1)[elements])
        return torch.cat(pieces) if pieces else parameters[0].new_zeros(0)

    def after_hooks(self, bucket: int, total: Tensor, present: Tensor, guard: GradientGuard) -> tuple[Tensor, Tensor]:
        """What replica 0 has added up of a bucket, after the hooks of its parameters if there are any."""
        if bucket not in self._hooked:
            return total, present
        mine = self.of(0, bucket)
        self.spread(0, bucket, total, present)
        guard.commit_some(mine)  # Adds the earlier gradients, too.
        left = torch.tensor([parameter.grad is not None for parameter in mine])
        return self._vector(mine, bucket, self.part(0, bucket), _gradient), left

    def spread(self, replica: int, bucket: int, whole: Tensor, present: Tensor) -> None:
        """Make the vector ``whole`` the gradients of the bucket's parameters in ``replica``."""
        start = 0
        ends = self.buckets[bucket].ends
        for parameter, end, is_present in zip(self.of(replica, bucket), ends, present.tolist(), strict=True):
            parameter.grad = whole[start:end].view(parameter.shape) if is_present else None
            start = end


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def added_up(shares: Iterator[Share]) -> tuple[Tensor, Tensor]:
    """The sum of ``shares``, which are in the order of the replicas, and which parameters have a gradient."""
    first = next(shares)
    total, present, count, earlier = first.values.clone(), first.present.clone(), first.counted, first.earlier
    for share in shares:
        total += share.values
        present |= share.present
        if share.counted is not None:
            count = share.counted if count is None else count + share.counted
    if count is not None:
        total *= count.reciprocal().to(total.device)
    if earlier is not None:
        total += earlier
    return total, present
