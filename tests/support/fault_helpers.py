"""Faults at chosen places, and what they must leave as it was."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.core.graph.task import Task

__all__ = [
    "Boom",
    "Gradients",
    "OnBackward",
    "collect",
    "fault_at",
    "interrupt_at",
    "live_tensors",
    "nothing",
    "raise_boom",
]


class Boom(Exception):
    """The fault."""


def raise_boom(_: object) -> None:
    raise Boom("in a hook")


def fault_at(task_id: str, error: type[BaseException] = Boom) -> Callable[[Task], None]:
    """A hook for ``before_task`` that raises at one task."""

    def hook(task: Task) -> None:
        if task.id == task_id:
            raise error(f"in {task_id}")

    return hook


def interrupt_at(task_id: str, cancelled: threading.Event) -> Callable[[Task], None]:
    """A hook that sends Ctrl-C to the main thread at one task, and goes on when the step is cancelled."""

    def hook(task: Task) -> None:
        if task.id == task_id:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert cancelled.wait(30)

    return hook


def collect() -> None:
    """Free what nothing refers to.

    Without the interpreter's lock, the last reference to what another thread has made only reaches a list of that
    thread, which the next collection empties; what that frees may refer to more of it.
    """
    for _ in range(1 if getattr(sys, "_is_gil_enabled", lambda: True)() else 4):
        gc.collect()


def live_tensors() -> int:
    """How many tensors there are that something refers to."""
    collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def nothing(task: Task) -> None:
    """A hook for ``before_task`` in place of one that raised."""


class OnBackward(torch.autograd.Function):
    """Passes a tensor on, and calls a function when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient.clone(), None


class Gradients:
    """The gradients of a model as they were, the tensors and their values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]

    def assert_kept(self) -> None:
        for parameter, (grad, value) in zip(self._model.parameters(), self._kept, strict=True):
            assert parameter.grad is grad
            assert grad is None or torch.equal(grad, value)
