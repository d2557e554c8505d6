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
from math import inf
from operator import or_
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.core.predict.layer_profile import BUCKET_BYTES
from asyncpipe.errors import OptionError, StageError
from asyncpipe.ops.autograd.parameter_hooks import hooked
from asyncpipe.ops.execute.buckets import Section, buckets
from asyncpipe.ops.execute.gradient_guard import GradientGuard
from asyncpipe.ops.execute.optimizer_shards import Shard

__all__ = ["BUCKET_BYTES", "Contribution", "ReplicaSums", "reduce_bandwidth"]


class Contribution(NamedTuple):
    """What one replica has of a part of a bucket, for the replica that adds it up."""

    values: Sequence[Tensor]
    """Its gradients in this part, a vector for each run (``buckets.py``)."""
    present: Tensor
    """For each parameter of the bucket, whether it has a gradient there; on the host."""
    counted: Tensor | None
    """The sum of its losses' counts, if they come with counts."""
    earlier: Sequence[Tensor] | None
    """Of replica 0: the gradients in this part that were there before the step."""


class ReplicaSums:
    """The parameters of one stage in each replica, and their buckets."""

    def __init__(
        self,
        stage: int,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        most_bytes: int,
        *,
        in_bfloat16: bool = False,
    ) -> None:
        """``parameters``: of each replica, the same in the same order; those of replicas elsewhere have no values.

        ``in_bfloat16``: what is added up of larger floats.
        """
        self._stage = stage
        self._in_bfloat16 = in_bfloat16
        self._by_replica = parameters
        self.buckets = buckets(parameters[0], most_bytes)
        self._hooked: set[int] = set()
        """The buckets of which replica 0 adds up all."""
        self._totals: dict[tuple[int, int], Tensor] = {}
        """By replica of this process and bucket: memory for the sum of its part."""
        self._shards: dict[int, Shard] = {}
        """By replica of this process whose optimizer updates its parts alone."""

    def shard(self, replica: int, optimizer: torch.optim.Optimizer, *, hosted: bool) -> None:
        """Have ``optimizer``, which was made of all parameters of ``replica``, update its parts alone."""
        parts = [bucket.part(replica, len(self._by_replica)) for bucket in self.buckets]
        self._shards[replica] = Shard(self._by_replica[replica], self.buckets, parts, optimizer, hosted=hosted)

    def begin(self) -> None:
        """A step begins: look for hooks of parameters. Raises ``OptionError`` where no replica has a whole gradient."""
        if not self._by_replica:
            return  # Workers do it.
        for shard in self._shards.values():
            shard.refresh()
        self._hooked = {bucket for bucket in range(len(self.buckets)) if hooked(self.of(0, bucket))}
        if self._hooked and self._shards:
            raise OptionError(
                f"a parameter of stage {self._stage} has a hook, which sees a whole gradient, and with shard_optimizer "
                "no replica has one; remove the hook, or leave shard_optimizer out"
            )

    def forget(self) -> None:
        """Refer to no parameters any more."""
        self._by_replica = {}

    def begin_update(self, replica: int, reduced: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make what the replica has added up of each bucket the gradients that its optimizer uses."""
        self._shards[replica].take(reduced)

    def updated(self, replica: int, bucket: int) -> list[Tensor]:
        """The parameters that ``replica`` has updated, run by run."""
        return self._values(self.of(replica, bucket), bucket, self.part(replica, bucket), Tensor.detach)

    def put(self, replica: int, other: int, bucket: int, values: Sequence[Tensor]) -> None:
        """Have in ``replica`` the parameters that ``other`` has updated."""
        mine = self.of(replica, bucket)
        for run, came in zip(self.buckets[bucket].runs(self.part(other, bucket)), values, strict=True):
            for (number, elements, _), piece in _cut(came, run.overlaps):
                _elements(mine[number], elements).copy_(piece)

    def drop_gradients(self, replica: int, bucket: int) -> None:
        """Everybody has what they need of the gradients of ``replica``."""
        for parameter in self.of(replica, bucket):
            parameter.grad = None

    def part(self, replica: int, bucket: int) -> range:
        """The elements of a bucket that ``replica`` adds up."""
        replicas = 1 if bucket in self._hooked else len(self._by_replica)
        return self.buckets[bucket].part(replica, replicas)

    def of(self, replica: int, bucket: int) -> Sequence[nn.Parameter]:
        """The parameters of a bucket."""
        first, ends = self.buckets[bucket]
        return self._by_replica[replica][first : first + len(ends)]

    def share(
        self,
        replica: int,
        taker: int,
        bucket: int,
        earlier: Callable[[nn.Parameter], Tensor | None] | None,
    ) -> Contribution:
        """What ``replica`` has for the part that ``taker`` adds up; ``earlier`` has the gradients before the step."""
        mine, part = self.of(replica, bucket), self.part(taker, bucket)
        has_gradient, before = [parameter.grad is not None for parameter in mine], None
        if earlier is not None and bucket not in self._hooked:
            had_gradient = [earlier(parameter) is not None for parameter in mine]
            if any(had_gradient):
                before = self._values(mine, bucket, part, earlier)
                has_gradient = list(map(or_, has_gradient, had_gradient))
        values = self._values(mine, bucket, part, _gradient)
        if self._in_bfloat16 and mine[0].dtype in (torch.float32, torch.float64):
            values = [each.to(torch.bfloat16) for each in values]
        return Contribution(values, torch.tensor(has_gradient), None, before)

    def _values(
        self,
        parameters: Sequence[nn.Parameter],
        bucket: int,
        part: range,
        value: Callable[[nn.Parameter], Tensor | None],
    ) -> list[Tensor]:
        """What ``part`` has of the values of ``parameters``, a vector for each run; no copies of large ones."""
        found = []
        for run in self.buckets[bucket].runs(part):
            pieces = []
            for number, elements, _ in run.overlaps:
                tensor = value(parameters[number])
                if tensor is None:
                    pieces.append(parameters[number].new_zeros(elements.stop - elements.start))
                    continue
                if tensor.layout is not torch.strided:
                    raise StageError(
                        f"a parameter of stage {self._stage} has a sparse gradient, which replicas cannot add up in "
                        "parts; give its embedding sparse=False, or leave the optimizer out of the pipeline"
                    )
                pieces.append(_elements(tensor, elements))
            found.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return found

    def runs(self, replica: int, bucket: int) -> int:
        """How many vectors are what others have for the part of ``replica``."""
        return sum(1 for _ in self.buckets[bucket].runs(self.part(replica, bucket)))

    def add_up(self, replica: int, bucket: int, shares: Sequence[Contribution]) -> tuple[Tensor, Tensor]:
        """The sum of ``shares``, which are in the order of the replicas, and which parameters have a gradient.

        The sum is in memory of the replica's, until its next sum: when all have gathered it.
        """
        part, first = self.part(replica, bucket), shares[0]
        total = self._totals.get((replica, bucket))
        if total is None or len(total) != len(part):
            total = self._totals[replica, bucket] = self.of(replica, bucket)[0].new_empty(len(part))
        present, counts = first.present.clone(), [each.counted for each in shares if each.counted is not None]
        for share in shares[1:]:
            present |= share.present
        factor = sum(counts[1:], counts[0]).reciprocal() if counts else None
        for run, (_, place) in enumerate(self.buckets[bucket].runs(part)):
            out, (values, *rest) = total[place], [share.values[run] for share in shares]
            if rest and values.dtype is out.dtype:
                torch.add(values, rest.pop(0), out=out)
            else:
                out.copy_(values)
            for values in rest:
                out += values
            if factor is not None:
                out *= factor
            if first.earlier is not None:
                out += first.earlier[run]
        return total, present

    def after_hooks(self, bucket: int, total: Tensor, present: Tensor, guard: GradientGuard) -> tuple[Tensor, Tensor]:
        """What replica 0 has added up of a bucket, after the hooks of its parameters if there are any."""
        if bucket not in self._hooked:
            return total, present
        mine = self.of(0, bucket)
        self.spread(0, bucket, [total], present)
        guard.commit_some(mine)  # Adds the earlier gradients, too.
        left = torch.tensor([parameter.grad is not None for parameter in mine])
        return torch.cat(self._values(mine, bucket, self.part(0, bucket), _gradient)), left

    def spread(self, replica: int, bucket: int, parts: Sequence[Tensor], present: Tensor) -> None:
        """Make the ``parts`` of all replicas the gradients of the bucket's parameters in ``replica``.

        They are copied: an optimizer may write to its gradients, while other replicas still read the parts.
        """
        gradients: list[Tensor | None] = []
        for parameter, is_present in zip(self.of(replica, bucket), present.tolist(), strict=True):
            gradient = parameter.grad if is_present else None
            if is_present and (gradient is None or not gradient.is_contiguous()):
                gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            parameter.grad = gradient
            gradients.append(gradient)
        for other, values in enumerate(parts):
            overlaps = list(self.buckets[bucket].overlaps(self.part(other, bucket)))
            for (number, elements, _), piece in _cut(values, overlaps):
                if (gradient := gradients[number]) is not None:
                    _elements(gradient, elements).copy_(piece)


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def _elements(tensor: Tensor, elements: slice) -> Tensor:
    """Some elements of ``tensor``, as a vector; without a copy, if the tensor is contiguous."""
    flat = tensor.reshape(-1)
    return flat if elements.stop - elements.start == len(flat) else flat[elements]


def _cut(values: Tensor, overlaps: Sequence[Section]) -> Iterator[tuple[Section, Tensor]]:
    """Each overlap, and what ``values``, which are of all of them, have of it."""
    lengths = [place.stop - place.start for _, _, place in overlaps]
    return zip(overlaps, values.split_with_sizes(lengths), strict=True)


def reduce_bandwidth(device: torch.device) -> float:
    """Bytes of a bucket per second that two replicas on ``device`` add up, each its part. Blocks for some ms."""
    rows = {row: [nn.Parameter(torch.zeros(BUCKET_BYTES // 4, device=device))] for row in range(2)}
    for parameters in rows.values():
        parameters[0].grad = torch.zeros_like(parameters[0])
    sums, seconds = ReplicaSums(0, rows, BUCKET_BYTES), inf
    for _ in range(3):
        begun = perf_counter()
        with torch.no_grad():
            total, _ = sums.add_up(0, 0, [sums.share(row, 0, 0, None) for row in rows])
        total[-1].item()  # Waits for the device.
        seconds = min(seconds, perf_counter() - begun)
    return BUCKET_BYTES / seconds
