"""What is told when memory runs out: the stage, what it holds, and only what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import Pipeline, TaskError
from asyncpipe.core.records.step_notes import DeviceMemory
from asyncpipe.train import out_of_memory
from asyncpipe.train.out_of_memory import explain_out_of_memory

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
    devices = options.pop("devices", DEVICES)
    pipe = Pipeline(nn.Sequential(*layers), devices, loss_fn=nn.functional.mse_loss, **options)  # type: ignore[arg-type]
    async with pipe:
        with pytest.raises(TaskError) as caught:
            await pipe.step(torch.arange(32.0).reshape(8, 4), torch.randn(8, 4))
    return caught.value, pipe


async def explained(layers: list[nn.Module], **options: object) -> str:
    error, pipe = await failing(layers, **options)
    text = explain_out_of_memory(error, pipe)
    assert text is not None
    return text


def of_help(text: str) -> list[str]:
    return text.partition("What would help: ")[2].split("; ")


ALWAYS = 'checkpoint = "always", which keeps the inputs of stages in place of all activations'
ONE_F_ONE_B = 'schedule = "1f1b", which keeps fewer micro-batches at once'
MORE = "more micro-batches than 4, which makes each smaller"
SMALLER = "a smaller batch_size"
OTHERS = "more memory than cpu has, or other devices for some of the 2 stages there"


async def test_an_allocation_that_fails() -> None:
    text = await explained([nn.Linear(4, 4), nn.BatchNorm1d(4), Hungry()])
    assert text.startswith("no memory left on cpu:1 in F(0,1): ")
    # Weight and bias, and the running mean, variance and count.
    assert (
        "stage 1 holds 32 B of parameters, 32 B of gradients, 40 B of buffers, activations of 1 micro-batch. " in text
    )
    assert of_help(text) == [ALWAYS, MORE, SMALLER, OTHERS]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
async def test_errors_of_their_own(error: BaseException) -> None:
    text = await explained([Hungry(error), nn.Linear(4, 4)], schedule="gpipe", checkpoint="always", balance=[1, 1])
    assert "on cpu:0 in F(0,0)" in text
    assert "stage 0 holds activations of up to 4 micro-batches" in text
    assert of_help(text) == [ONE_F_ONE_B, MORE, SMALLER, OTHERS]


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "expected"),
    [
        # The last micro-batch is the first to go back: that it is not recomputed costs nothing. In 1F1B it would.
        ("gpipe", "except_last", [MORE]),
        # The whole mini-batch is kept, in however many parts.
        ("gpipe", "never", [ALWAYS, ONE_F_ONE_B]),
        ("1f1b", "always", [MORE]),
        ("1f1b", "never", [ALWAYS, MORE]),
    ],
)
async def test_only_what_would_help_is_said(schedule: str, checkpoint: str, expected: list[str]) -> None:
    text = await explained([nn.Linear(4, 4), Hungry()], schedule=schedule, checkpoint=checkpoint, balance=[1, 1])
    assert of_help(text) == [*expected, SMALLER, OTHERS]


async def test_a_device_with_several_stages() -> None:
    """1F1B has one stage a device, so it is no help."""
    text = await explained(
        [Hungry(), *(nn.Linear(4, 4) for _ in range(3))], schedule="interleaved", balance=[1, 1, 1, 1]
    )
    assert of_help(text) == [ALWAYS, MORE, SMALLER, OTHERS.replace("2 stages", "4 stages")]


class HungryLater(Hungry):
    """Lets the first half of a mini-batch pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] >= 16 else x


def devices_of_their_own(monkeypatch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    """As if each stage had a GPU."""
    placed = [
        replace(stage, device=replace(stage.device, physical=torch.device("cuda", stage.index)))
        for stage in pipe.stages
    ]
    monkeypatch.setattr(Pipeline, "stages", placed)
    monkeypatch.setattr(out_of_memory, "device_memory", lambda device: DeviceMemory(3 * 2**30, 0, 4 * 2**30))


async def test_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then layers may go to another one, and what the others keep does not count."""
    error, pipe = await failing([nn.Linear(4, 4), nn.BatchNorm1d(4), Hungry()])
    devices_of_their_own(monkeypatch, pipe)
    text = explain_out_of_memory(error, pipe)
    assert text is not None
    assert "3 GiB of 4 GiB are in use" in text
    # The last stage of 1F1B has one micro-batch at a time, recomputed or not.
    assert of_help(text) == [MORE, SMALLER, "fewer layers on stage 1, by balance", "more memory than cuda:1 has"]


async def test_the_stage_of_a_later_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [HungryLater(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)]
    options: dict[str, object] = {"balance": [2, 1], "microbatches": 2, "optimizer": torch.optim.Adam}
    error, pipe = await failing(layers, devices=[["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], **options)
    devices_of_their_own(monkeypatch, pipe)
    text = explain_out_of_memory(error, pipe)
    assert text is not None
    assert "stage 2 holds 160 B of parameters, 160 B of gradients, activations of up to 2 micro-batches" in text
    more = "more micro-batches than 2, which makes each smaller"
    assert of_help(text) == [
        ALWAYS,
        more,
        SMALLER,
        "fewer layers on stage 0, by balance",
        "more memory than cuda:2 has",
    ]


class HungrySGD(torch.optim.SGD):
    """Has no room for what it wants to keep."""

    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        torch.empty(2**58)


async def test_an_update_has_no_micro_batches_to_be_smaller() -> None:
    text = await explained([nn.Linear(4, 4), nn.Linear(4, 4)], balance=[1, 1], optimizer=HungrySGD)
    assert "in U(" in text
    assert "80 B of parameters, 80 B of gradients, 80 B of optimizer state" in text
    assert of_help(text) == [OTHERS]


class Wrapping(Hungry):
    """Hides why it failed, as much as Python lets it."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except RuntimeError:
            raise ValueError("the layer is broken")  # noqa: B904 - as people write it


async def test_an_error_behind_another_one() -> None:
    assert "in F(0,1)" in await explained([nn.Linear(4, 4), nn.Linear(4, 4), Wrapping()])


async def test_anything_else_is_not_explained() -> None:
    error, pipe = await failing([nn.Linear(4, 4), nn.Linear(4, 4), Hungry(RuntimeError("shape"))])
    assert explain_out_of_memory(error, pipe) is None
