"""The gradient guard: a step adds to the earlier gradient tensors, or does not change them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from asyncpipe.ops.execute.gradient_guard import GradientGuard


def parameters(*grads: float | None) -> list[nn.Parameter]:
    """Parameters with these earlier gradients."""
    made = [nn.Parameter(torch.zeros(2)) for _ in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = None if grad is None else torch.full((2,), grad)
    return made


def guarded(owned: list[nn.Parameter]) -> GradientGuard:
    guard = GradientGuard()
    guard.begin(iter(owned))
    return guard


def values(owned: list[nn.Parameter]) -> list[float | None]:
    return [None if parameter.grad is None else parameter.grad[0].item() for parameter in owned]


def identities(owned: list[nn.Parameter]) -> list[int]:
    return [id(parameter.grad) for parameter in owned]


def step(owned: list[nn.Parameter]) -> list[Tensor]:
    """A step that reaches all parameters but the last."""
    made = [torch.full((2,), 10.0) for _ in owned[:-1]]
    for parameter, grad in zip(owned, made, strict=False):
        parameter.grad = grad
    return made


def test_roll_back_puts_the_earlier_tensors_back_unchanged() -> None:
    owned = parameters(1.0, None, 3.0)
    before = identities(owned)
    guard = guarded(owned)
    step(owned)
    guard.roll_back()
    assert values(owned) == [1.0, None, 3.0]
    assert identities(owned) == before


def test_accumulation_is_that_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    for _ in range(2):
        model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        guard = guarded(list(model.parameters()))
        model(x).sum().backward()
        with torch.no_grad():
            guard.commit()
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(expected, model.parameters(), strict=True))


def test_of_overlapping_backwards_the_last_takes_the_sum() -> None:
    owned = parameters(1.0, None)
    guard = guarded(owned)
    guard.begin(owned)
    made = step(owned)
    assert guard.pop_gradients() == {}
    assert values(owned) == [10.0, None]
    assert guard.pop_gradients()[id(owned[0])] is made[0]
    assert values(owned) == [1.0, None]


def test_of_overlapping_backwards_one_failure_restores_what_was_there() -> None:
    owned = parameters(1.0, None)
    before = identities(owned)
    guard = guarded(owned)
    guard.begin(owned)
    step(owned)
    assert guard.pop_gradients() == {}
    guard.roll_back()
    assert identities(owned) == before


def test_what_was_given_up_is_waited_for() -> None:
    owned = parameters(1.0)
    guard = guarded(owned)
    guard.abandon()
    settled = threading.Event()
    waiting = threading.Thread(target=lambda: (guard.wait_for_abandoned(), settled.set()))
    waiting.start()
    assert not settled.is_set()
    guard.end_abandoned()
    waiting.join(10)
    assert settled.is_set()
    assert values(owned) == [1.0]
