"""A program that uses the public names as users do. ``mypy --strict`` and pyright's strict mode must find nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from heapq import heappop, heappush

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import asyncpipe
from asyncpipe.errors import TaskError
from asyncpipe.service.client import AsyncJobClient, JobClient


class OneByOne(asyncpipe.OrderedSchedule):
    """A schedule: each micro-batch forward and at once backward."""

    name = "one by one"

    def order(self, device: int, shape: asyncpipe.Shape) -> Iterator[asyncpipe.Action]:
        for microbatch in range(shape.microbatches):
            yield asyncpipe.F(microbatch, device)
            yield asyncpipe.B(microbatch, device)


class LatestFirst(asyncpipe.Policy):
    """A policy: tasks of the latest step first."""

    def __init__(self, lane: asyncpipe.LaneView) -> None:
        self._lane = lane
        self._ready: list[tuple[int, int, asyncpipe.StepView]] = []

    def ready(self, step: asyncpipe.StepView, task: int, now: float) -> None:
        heappush(self._ready, (-step.number, task, step))

    def choose(self, now: float) -> tuple[asyncpipe.StepView, int] | None:
        if not self._ready or self._lane.in_flight >= 2:
            return None
        _, task, step = heappop(self._ready)
        return step, task

    def drop(self, step: asyncpipe.StepView) -> None:
        self._ready = [entry for entry in self._ready if entry[2] is not step]


class Bubbles:
    """An observer: keeps the idle share of each step."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def step_completed(self, record: asyncpipe.StepRecord) -> None:
        self.shares.append(asyncpipe.report(record).bubble_ratio)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of a stage."""
    return SGD(parameters, lr=0.1)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (output - target).square().mean()


def loss_of(result: asyncpipe.StepResult) -> float:
    """The loss of a step."""
    if result.loss is None:
        raise ValueError("the step has no loss")
    return result.loss.item()


def model() -> nn.Sequential:
    """Three layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def blocking() -> list[float]:
    """Three steps, without a loop."""
    observer: asyncpipe.Observer = Bubbles()
    with asyncpipe.Pipeline(
        model(), ["cpu:0", "cpu:1"], microbatches=2, schedule=OneByOne(), loss_fn=mse, observers=[observer]
    ).sync() as pipe:
        results = [pipe.step(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
        names: list[str] = list(pipe.state_dict())
        return [loss_of(result) for result in results if names]


async def awaiting() -> list[float]:
    """Steps that overlap, on a pool with a policy."""
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
    async with asyncpipe.DevicePool(policy=LatestFirst) as pool:
        pipeline = asyncpipe.Pipeline(
            model(), ["cpu:0", "cpu:1"], microbatches=2, loss_fn=mse, optimizer=sgd, pool=pool,
            share=asyncpipe.Share("mine"),
        )  # fmt: skip
        try:
            async with pipeline as pipe:
                return [loss_of(result) async for result in pipe.steps(batches)]
        except TaskError as error:
            print(error.task_id, error.device)
            raise


def language_model(llama: nn.Module, batch: dict[str, Tensor]) -> asyncpipe.Pipeline:
    """A model of transformers as a pipeline."""
    return asyncpipe.from_transformers(llama, batch, devices=["cpu:0", "cpu:1"], microbatches=4)


def simulated() -> float:
    """A schedule on virtual time."""
    graph = asyncpipe.lower(OneByOne(), asyncpipe.Shape(2, 4, 2))
    return asyncpipe.report(asyncpipe.simulate(graph, asyncpipe.Costs(1, 2))).seconds


def ids(url: str) -> list[str]:
    """The jobs of a service."""
    return [str(job["id"]) for job in JobClient(url).list()]


async def submitted(url: str, job: dict[str, object]) -> str:
    """A job that was submitted to a service."""
    made = await AsyncJobClient(url).submit(job)
    return str(made["id"])


if __name__ == "__main__":
    assert len(blocking()) == len(asyncio.run(awaiting())) == 3
    assert simulated() > 0
