"""What is told when memory runs out: the stage, what it holds, and only what would help."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import Pipeline, TaskError
from asyncpipe.service.out_of_memory import explain_out_of_memory

DEVICES = ["cpu:0", "cpu:1"]


class Hungry(nn.Module):
    """Wants more memory than there is, or says that it did."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x + torch.empty(2**58).sum()


async def failing(layers: list[nn.Module], **options: object) -> tuple[TaskError, Pipeline]:
    options = {"microbatches": 4, "schedule": "1f1b", "checkpoint": "except_last", "balance": [1, 2]} | options
    pipe = Pipeline(nn.Sequential(*layers), DEVICES, loss_fn=nn.functional.mse_loss, **options)  # type: ignore[arg-type]
    async with pipe:
        with pytest.raises(TaskError) as caught:
            await pipe.step(torch.randn(8, 4), torch.randn(8, 4))
    return caught.value, pipe


async def explained(layers: list[nn.Module], **options: object) -> str:
    error, pipe = await failing(layers, **options)
    text = explain_out_of_memory(error, pipe)
    assert text is not None
    return text


@pytest.mark.one_loop
async def test_an_allocation_that_fails() -> None:
    text = await explained([nn.Linear(4, 4), nn.BatchNorm1d(4), Hungry()])
    assert text.startswith("no memory left on cpu:1 in F(0,1): ")
    # Weight and bias, and the running mean, variance and count.
    assert "stage 1 holds 32 B of parameters, 40 B of buffers, activations of up to 1 micro-batches at once" in text
    help_ = text.partition("What would help: ")[2]
    assert help_ == (
        'checkpoint = "always", which keeps the inputs of stages in place of all activations; more micro-batches than '
        "4, which makes each smaller, or a smaller batch_size; fewer layers on stage 1, by balance; more devices"
    )


@pytest.mark.one_loop
@pytest.mark.parametrize("error", [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory")])
async def test_errors_of_their_own(error: BaseException) -> None:
    text = await explained([Hungry(error), nn.Linear(4, 4)], schedule="gpipe", checkpoint="always", balance=[1, 1])
    assert "on cpu:0 in F(0,0)" in text
    assert "stage 0 holds activations of up to 4 micro-batches" in text
    assert 'help: schedule = "1f1b", which keeps 2 here; more micro-batches than 4' in text
    assert "checkpoint" not in text
    assert "fewer layers" not in text


@pytest.mark.one_loop
async def test_a_device_with_several_stages() -> None:
    text = await explained(
        [Hungry(), *(nn.Linear(4, 4) for _ in range(3))], schedule="interleaved", balance=[1, 1, 1, 1]
    )
    assert text.endswith("more devices, since this one has several stages")


@pytest.mark.one_loop
async def test_anything_else_is_not_explained() -> None:
    error, pipe = await failing([nn.Linear(4, 4), nn.Linear(4, 4), Hungry(RuntimeError("shape"))])
    assert explain_out_of_memory(error, pipe) is None
