"""A small model with the gradients of the unsplit model, and hooks before every task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import DevicePool
from asyncpipe.core.engine.events import Command, Event, StepCancelled
from asyncpipe.core.engine.scheduler import SchedulerState
from asyncpipe.core.graph.task import Task
from asyncpipe.ops.execute.binder import Binder


@pytest.fixture(scope="module")
def pool() -> Iterator[DevicePool]:
    """Worker processes that the tests of a module share; they start as tests need them."""
    pool = DevicePool(workers="processes")
    asyncio.run(pool.__aenter__())
    yield pool
    asyncio.run(pool.aclose())


@dataclass(frozen=True)
class Workload:
    """One batch for a model of eight layers in float64, and the unsplit model's results."""

    x: Tensor
    target: Tensor
    loss: Tensor
    outputs: Tensor
    gradients: list[Tensor]

    @staticmethod
    def model(dropout: float = 0.0) -> nn.Sequential:
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        for width in (6, 8, 8, 8):
            layers += [nn.Linear(width, 8), nn.Sequential(nn.Tanh(), nn.Dropout(dropout))]
        return nn.Sequential(*layers).double()

    def worst(self, model: nn.Module) -> float:
        """The largest distance of the model's gradients from those of the unsplit model."""
        pairs = zip(model.parameters(), self.gradients, strict=True)
        return max(float((parameter.grad - wanted).abs().max()) for parameter, wanted in pairs)


def make_workload(samples: int) -> Workload:
    torch.manual_seed(11)
    x, target = torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 8, dtype=torch.float64)
    model = Workload.model()
    outputs = model(x)
    loss = nn.functional.mse_loss(outputs, target)
    loss.backward()
    return Workload(x, target, loss.detach(), outputs.detach(), [p.grad for p in model.parameters()])


@pytest.fixture(scope="session")
def workload() -> Workload:
    return make_workload(12)


@pytest.fixture(scope="session")
def workloads() -> Callable[[int], Workload]:
    return make_workload


@pytest.fixture
def before_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Task], None]], None]]:
    """Call a function with each task on its device's thread, before the task runs; it may raise."""
    hooks: list[Callable[[Task], None]] = []
    real = Binder.bind

    def bind(self: Binder, task: Task) -> Callable[[], object]:
        work = real(self, task)

        def hooked() -> object:
            for hook in hooks:
                hook(task)
            return work()

        return hooked

    monkeypatch.setattr(Binder, "bind", bind)
    yield lambda hook: hooks.__setitem__(slice(None), [hook])
    hooks.clear()


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a driver cancels a step."""
    event = threading.Event()
    handle = SchedulerState.handle

    def noting(self: SchedulerState, happened: Event, now: float) -> list[Command]:
        if isinstance(happened, StepCancelled):
            event.set()
        return handle(self, happened, now)

    monkeypatch.setattr(SchedulerState, "handle", noting)
    return event
