"""What a forward keeps goes to the host and comes back as it was: shared memory, views, what was overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.ops.device.streams import CpuStream
from asyncpipe.ops.execute import offloading
from asyncpipe.ops.execute.offloading import KeptActivations, ghost, storages_of

LANE = CpuStream()


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch):
    monkeypatch.setattr(offloading, "SMALLEST", 8)


def there_and_back(kept: KeptActivations) -> int:
    moved = kept.offload(LANE)
    kept.free()
    kept.load(LANE, LANE)
    return moved


@pytest.mark.promise(
    "Right results", "Offload keeps tensors that share memory shared, and sees that a saved tensor was overwritten."
)
def test_tensors_that_share_memory_share_it_again():
    seen: list[Tensor] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x[1:].t(), x.view(-1)[3:], x.view(torch.int32))
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return gradient.expand(4, 5)

    x = torch.arange(20.0).view(4, 5).requires_grad_()
    inner = x * 1
    kept = KeptActivations(set())
    with kept.saving():
        y = Keep.apply(inner)
    assert there_and_back(kept) == 80, "one block"
    before = inner.untyped_storage().data_ptr()
    y.backward()
    assert len({tensor.untyped_storage().data_ptr() for tensor in seen}) == 1
    assert seen[0].untyped_storage().data_ptr() != before
    wanted = [inner, inner[1:].t(), inner.view(-1)[3:], inner.detach().view(torch.int32)]
    for mine, theirs in zip(seen, wanted, strict=True):
        assert (mine.stride(), mine.storage_offset()) == (theirs.stride(), theirs.storage_offset())
        assert torch.equal(mine, theirs)


def test_parameters_and_small_tensors_stay(monkeypatch):
    monkeypatch.setattr(offloading, "SMALLEST", 1000)
    linear, x = nn.Linear(16, 16), torch.randn(64, 16)
    kept = KeptActivations(storages_of(linear.parameters()))
    with kept.saving():
        y = linear(x).tanh()[:2].exp()
    assert there_and_back(kept) == 2 * 64 * 16 * 4, "the input and what tanh made; neither weight nor two rows"
    y.sum().backward()
    again = nn.Linear(16, 16)
    again.load_state_dict(linear.state_dict())
    again(x).tanh()[:2].exp().sum().backward()
    assert torch.equal(linear.weight.grad, again.weight.grad)


@pytest.mark.promise(
    "Right results", "Offload keeps tensors that share memory shared, and sees that a saved tensor was overwritten."
)
@pytest.mark.parametrize("stays", [False, True])
def test_what_was_overwritten_is_told_as_autograd_does(stays):
    x = torch.ones(4, requires_grad=True)
    inner = x * 1
    kept = KeptActivations(storages_of([inner]) if stays else set())
    with kept.saving():
        y = inner.exp().mul(inner)
    with torch.no_grad():
        inner.add_(1)
    there_and_back(kept)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(4,\)"):
        y.sum().backward()


def test_a_ghost_has_the_graph_of_an_output_and_not_its_memory():
    x = torch.randn(5, 5, requires_grad=True)
    y = x.exp()
    stand_in = ghost(y)
    assert stand_in.untyped_storage().nbytes() == 4
    assert stand_in.shape == y.shape
    stand_in.backward(torch.ones(5, 5))
    assert torch.equal(x.grad, x.detach().exp())
    assert not ghost(x.detach()).requires_grad
