"""Forward-mode derivatives and transforms of ``torch.func`` do not reach a pipeline's threads: they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from asyncpipe import Pipeline
from asyncpipe.errors import BackwardError

# Forward mode compiles some formulas by TorchScript, which torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

X = torch.ones(4, 3)

FORWARD_MODE = (
    "a pipeline does not pass forward-mode derivatives on (torch.autograd.forward_ad, torch.func.jvp and jacfwd), "
    "which would vanish; use the bare model, or backward derivatives"
)
TRANSFORM = (
    "a pipeline runs on threads that transforms of torch.func (grad, vjp, vmap, …) do not reach; transform the bare "
    "model, or call backward"
)
BATCHED = (
    "a pipeline's backward takes one gradient at a time, and not a batch of them (is_grads_batched=True, "
    "vectorize=True); call it once for each, with retain_graph=True"
)


@pytest.fixture(params=["never", "always"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    options: Any = {"checkpoint": request.param, "microbatches": 2, "loss_fn": torch.sum}
    with Pipeline(model, ["cpu:0", "cpu:1"], balance=[2, 1], **options).sync() as opened:
        yield opened
        assert opened(X).shape == (4, 3), "it goes on"
        opened.step(X)


def called(pipe: Any, x: Tensor) -> Tensor:
    return pipe(x).sum()


def stepped(pipe: Any, x: Tensor) -> Tensor:
    return pipe.step(x).loss


@pytest.mark.promise(
    "Refused, not wrong",
    "A step inside forward-mode derivatives or a transform of `torch.func` is refused; so are batches of gradients.",
)
@pytest.mark.parametrize("run", [called, stepped])
def test_tangents(pipe: Any, run: Callable[[Any, Tensor], Tensor]) -> None:
    with forward_ad.dual_level(), pytest.raises(BackwardError) as raised:
        run(pipe, forward_ad.make_dual(X, X))
    assert str(raised.value) == FORWARD_MODE


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(f)(X),
    "vjp": lambda f: torch.func.vjp(f, X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "jacfwd": lambda f: torch.func.jacfwd(f, randomness="different")(X),
    "vmap": lambda f: torch.func.vmap(f, randomness="different")(X[None]),
    "functional jacobian": lambda f: torch.autograd.functional.jacobian(f, X, vectorize=True, strategy="forward-mode"),
}


@pytest.mark.promise(
    "Refused, not wrong",
    "A step inside forward-mode derivatives or a transform of `torch.func` is refused; so are batches of gradients.",
)
@pytest.mark.parametrize("run", [called, stepped])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms(pipe: Any, run: Callable[[Any, Tensor], Tensor], transform: Any) -> None:
    with pytest.raises(BackwardError) as raised:
        transform(lambda x: run(pipe, x))
    assert str(raised.value) in (TRANSFORM, FORWARD_MODE)


@pytest.mark.promise(
    "Refused, not wrong",
    "A step inside forward-mode derivatives or a transform of `torch.func` is refused; so are batches of gradients.",
)
def test_batched_gradients(pipe: Any) -> None:
    x = X.clone().requires_grad_()
    y = pipe(x)
    with pytest.raises(BackwardError) as raised:
        torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)
    assert str(raised.value) == BATCHED
    with pytest.raises(BackwardError) as raised:
        torch.func.vmap(lambda v: torch.autograd.grad(y, x, v))(torch.ones(2, 4, 3))
    assert str(raised.value) == BATCHED
    with pytest.raises(BackwardError) as raised:
        torch.autograd.functional.jacobian(pipe, X, vectorize=True)
    assert str(raised.value) == BATCHED


def test_a_jacobian_row_by_row(pipe: Any) -> None:
    assert torch.autograd.functional.jacobian(pipe, X).shape == (4, 3, 4, 3)
