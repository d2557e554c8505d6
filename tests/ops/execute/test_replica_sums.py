"""Buckets of gradients, and what replicas add up and gather of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from asyncpipe.ops.execute.buckets import ALIGNED, LARGE, buckets
from asyncpipe.ops.execute.replica_sums import ReplicaSums

SHAPES = [(3,), (LARGE, 3), (5, 2), (), (LARGE + 7,), (0,), (4,)]


def parameters_of(replicas):
    return {row: [nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for row in range(replicas)}


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_parts_are_the_whole_bucket_and_large_tensors_are_cut_where_memory_is_aligned(replicas):
    (bucket,) = buckets(parameters_of(1)[0], 1 << 30)
    parts = [bucket.part(replica, replicas) for replica in range(replicas)]
    assert [element for part in parts for element in part] == list(range(bucket.size))
    assert max(map(len, parts)) - min(map(len, parts)) < 0.05 * bucket.size
    for part in parts:
        overlaps = list(bucket.overlaps(part))
        assert all(elements.start % ALIGNED == 0 for number, elements, _ in overlaps if bucket.ends[number] > LARGE)
        runs = list(bucket.runs(part))
        assert [overlap for run in runs for overlap in run.overlaps] == overlaps
        assert all(len(run.overlaps) == 1 or len(range(len(part))[run.place]) <= LARGE for run in runs)


@pytest.mark.promise("Right results", "An optimizer may write to its gradients: other replicas do not read them.")
def test_gradients_are_sums_that_an_optimizer_may_write_to():
    parameters = parameters_of(3)
    sums = ReplicaSums(0, parameters, 1 << 30)
    for row, mine in parameters.items():
        for number, parameter in enumerate(mine):
            parameter.grad = None if row == 1 and number == 2 else torch.full_like(parameter, 10.0**row)
    with torch.no_grad():
        shares = [[sums.share(row, taker, 0, None) for row in parameters] for taker in parameters]
        parts = [sums.add_up(taker, 0, of_taker) for taker, of_taker in enumerate(shares)]
        for row, mine in parameters.items():
            sums.spread(row, 0, [values for values, _ in parts], parts[0][1])
            for number, parameter in enumerate(mine):
                assert torch.equal(parameter.grad, torch.full_like(parameter, 101.0 if number == 2 else 111.0))
                parameter.grad.fill_(0.0)


@pytest.mark.promise(
    "Right results",
    'With `gradient_dtype="bfloat16"`, gradients of replicas are rounded once and added in the parameter type.',
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
def test_shares_are_rounded_and_added_up_in_the_type_of_the_parameter(dtype):
    """Those of larger floats alone."""
    parameters = {row: [nn.Parameter(torch.zeros(1000, dtype=dtype))] for row in range(3)}
    sums = ReplicaSums(0, parameters, 1 << 30, in_bfloat16=True)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1000, generator=generator, dtype=dtype) for _ in parameters]
    for row, gradient in enumerate(gradients):
        parameters[row][0].grad = gradient
    shares = [sums.share(row, 1, 0, None) for row in parameters]
    with torch.no_grad():
        found, _ = sums.add_up(1, 0, shares)
    is_rounded = dtype in (torch.float32, torch.float64)
    one, two, three = (each.bfloat16().to(dtype) if is_rounded else each for each in gradients)
    part = sums.part(1, 0)
    assert torch.equal(found, (one + two + three)[part.start : part.stop])
    assert {share.values[0].dtype for share in shares} == {torch.bfloat16 if is_rounded else dtype}
