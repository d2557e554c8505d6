"""Hooks of parameters see the whole gradient of a step once, as on the unsplit model.

Every micro-batch adds to the gradient, so the stages' backwards run without these hooks. They are called afterwards:
in ``pipe(x)`` by the caller's autograd engine, in a step by the gradient guard. Hooks of an autograd node, which
``get_gradient_edge(parameter).node`` has, cannot be seen from Python, so they run in every backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from asyncpipe.ops.torch_internals import accumulated_hooks, gradient_hooks

__all__ = ["call_accumulated_hooks", "call_gradient_hooks", "hooked", "without_hooks"]


def hooked(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of ``parameters`` that have hooks. Costs 0.1 µs each."""
    return [each for each in parameters if gradient_hooks(each) or accumulated_hooks(each)]


@contextmanager
def without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Disable the hooks of ``parameters`` inside."""
    aside = [
        (hooks, dict(hooks))
        for parameter in parameters
        for hooks in (gradient_hooks(parameter), accumulated_hooks(parameter))
        if hooks
    ]
    try:
        for hooks, _ in aside:
            hooks.clear()
        yield
    finally:
        for hooks, kept in aside:
            hooks.update(kept)


def call_gradient_hooks(parameter: nn.Parameter) -> None:
    """Replace the new gradient of ``parameter`` by what its ``register_hook`` hooks return."""
    if gradient_hooks(parameter):
        # By the engine, which checks what they return.
        (parameter.grad,) = torch.autograd.grad(parameter, parameter, parameter.grad)


def call_accumulated_hooks(parameter: nn.Parameter) -> None:
    """Call the ``register_post_accumulate_grad_hook`` hooks of ``parameter``, whose ``grad`` is complete."""
    for hook in list((accumulated_hooks(parameter) or {}).values()):
        hook(parameter)
