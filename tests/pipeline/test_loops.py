"""One pipeline, several event loops: it has a loop of its own, so callers of any loop and thread wait in one line."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline

pytestmark = pytest.mark.timeout(60)

mse = nn.functional.mse_loss
X = torch.randn(8, 4, dtype=torch.float64)


def pipeline() -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    return Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse, optimizer=lambda p: torch.optim.SGD(p, 0.1))


async def steps(pipe: Pipeline, count: int) -> list[float]:
    return [float((await pipe.step(X, X)).loss) for _ in range(count)]


@pytest.mark.promise(
    "Your own program", "Coroutines of several event loops and blocking callers step the same pipeline."
)
def test_a_pipeline_steps_in_one_loop_after_the_other():
    async def alone() -> list[float]:
        async with pipeline() as pipe:
            return await steps(pipe, 4)

    wanted, pipe = asyncio.run(alone()), pipeline()
    asyncio.run(pipe.__aenter__())
    found = asyncio.run(steps(pipe, 2)) + asyncio.run(steps(pipe, 2))
    asyncio.run(pipe.aclose())
    assert found == wanted


@pytest.mark.promise(
    "Your own program", "Coroutines of several event loops and blocking callers step the same pipeline."
)
def test_loops_of_several_threads_and_blocking_callers_step_the_same_pipeline():
    each = 5

    async def alone() -> list[float]:
        async with pipeline() as pipe:
            return await steps(pipe, 4 * each)

    wanted, pipe, found = sorted(asyncio.run(alone())), pipeline(), []
    together = threading.Barrier(4)

    def of_a_loop() -> None:
        together.wait()
        found.extend(asyncio.run(steps(pipe, each)))

    def blocking() -> None:
        together.wait()
        found.extend(float(pipe.sync().step(X, X).loss) for _ in range(each))

    with pipe.sync():
        threads = [threading.Thread(target=run) for run in (of_a_loop, of_a_loop, blocking, blocking)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == wanted
