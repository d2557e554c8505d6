"""Deferred batch norm: its running statistics against those of the ordinary layer on the whole mini-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asyncpipe.ops.autograd.checkpoint import checkpoint
from asyncpipe.ops.model.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    DeferredBatchNorm3d,
    convert_deferred_batch_norm,
)

KINDS: list[tuple[type[nn.Module], type[DeferredBatchNorm], tuple[int, ...]]] = [
    (nn.BatchNorm1d, DeferredBatchNorm1d, ()),
    (nn.BatchNorm1d, DeferredBatchNorm1d, (5,)),
    (nn.BatchNorm2d, DeferredBatchNorm2d, (2, 3)),
    (nn.BatchNorm3d, DeferredBatchNorm3d, (2, 1, 3)),
]


def twins(layer: nn.Module) -> tuple[nn.Module, DeferredBatchNorm]:
    """``layer`` and a deferred copy of it."""
    deferred = convert_deferred_batch_norm(copy.deepcopy(layer))
    assert isinstance(deferred, DeferredBatchNorm)
    return layer, deferred


def assert_same_statistics(deferred: nn.Module, bare: nn.Module, tolerance: float = 1e-12) -> None:
    assert list(deferred.state_dict()) == list(bare.state_dict())
    for name, buffer in bare.named_buffers():
        torch.testing.assert_close(deferred.get_buffer(name), buffer, rtol=tolerance, atol=tolerance)


# One update a mini-batch


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize(("kind", "expected", "shape"), KINDS)
def test_statistics_are_those_of_the_whole_mini_batch(
    kind: type[nn.Module], expected: type[DeferredBatchNorm], shape: tuple[int, ...], momentum: float | None
) -> None:
    torch.manual_seed(1)
    bare, deferred = twins(kind(4, momentum=momentum, dtype=torch.float64))
    assert type(deferred) is expected
    for sizes in ([4, 3, 2], [2], [5, 2]):
        batch = 3 + 2 * torch.randn(sum(sizes), 4, *shape, dtype=torch.float64)
        bare(batch)
        before = [buffer.clone() for buffer in deferred.buffers()]
        for microbatch in batch.split(sizes):
            deferred(microbatch)
        assert all(map(torch.equal, deferred.buffers(), before))
        deferred.commit()
        assert_same_statistics(deferred, bare)
    x = torch.randn(3, 4, *shape, dtype=torch.float64)
    torch.testing.assert_close(deferred.eval()(x), bare.eval()(x), rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.floats(-1e6, 1e6), st.integers(0, 1000))
def test_any_micro_batches_with_any_offset(sizes: list[int], offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = offset + torch.randn(sum(sizes), 2, 3, dtype=torch.float64, generator=generator)
    bare, deferred = twins(nn.BatchNorm1d(2, momentum=None, dtype=torch.float64))
    bare(batch)
    for microbatch in batch.split(sizes):
        deferred(microbatch)
    deferred.commit()
    # The variance of numbers near 1e6 loses digits, in the ordinary layer as well.
    assert_same_statistics(deferred, bare, tolerance=1e-12 * max(1.0, abs(offset)))


def test_one_value_a_channel_is_refused_as_by_the_bare_layer_and_notgathered() -> None:
    bare, deferred = twins(nn.BatchNorm1d(2, dtype=torch.float64))
    batch = torch.randn(4, 2, dtype=torch.float64)
    bare(batch)
    deferred(batch)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        deferred(batch[:1])
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        deferred(batch.reshape(1, 2, 2, 2))
    deferred.commit()
    assert_same_statistics(deferred, bare)


def test_each_micro_batch_is_normalised_with_its_own_statistics() -> None:
    torch.manual_seed(1)
    bare, deferred = twins(nn.BatchNorm1d(3, dtype=torch.float64))
    assert isinstance(bare.weight, nn.Parameter)
    with torch.no_grad():
        bare.weight.uniform_()
        deferred.weight.copy_(bare.weight)
    for microbatch in torch.randn(6, 3, dtype=torch.float64).split([4, 2]):
        x, y = microbatch.clone().requires_grad_(), microbatch.clone().requires_grad_()
        expected, got = bare(x), deferred(y)
        assert torch.equal(got, expected)
        expected.square().sum().backward()
        got.square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(y.grad, x.grad)
    assert deferred.weight.grad is not None
    assert bare.weight.grad is not None
    assert torch.equal(deferred.weight.grad, bare.weight.grad)


# When to count


def test_a_recomputation_is_not_counted_again() -> None:
    bare, deferred = twins(nn.BatchNorm1d(2, dtype=torch.float64))
    batch = torch.randn(6, 2, dtype=torch.float64)
    bare(batch)
    handles = []
    for microbatch in batch.split([4, 2]):
        outputs, recomputation = checkpoint(
            lambda tensors: [deferred(tensors[0])], [microbatch.clone().requires_grad_()]
        )
        handles.append((outputs, recomputation))
    (early, recomputation), (late, _) = handles
    recomputation.run()
    early[0].square().sum().backward()
    late[0].square().sum().backward()
    deferred.commit()
    assert_same_statistics(deferred, bare)
    deferred.commit()
    assert_same_statistics(deferred, bare)
