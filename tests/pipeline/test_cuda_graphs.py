"""Stages whose kernels are captured in CUDA graphs compute what stages compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe import Pipeline
from asyncpipe.ops.torch_internals import CAPTURES_HAVE_SEEDS

pytestmark = pytest.mark.cuda

DEVICE = "cuda:0"


def layers() -> list[nn.Module]:
    return [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.2)]


def trained(option: Any, make: Callable[[], list[nn.Module]] = layers, **options: Any) -> tuple[list[Tensor], Pipeline]:
    """Losses and gradients of four steps, of different sizes, and the pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(*make()).double()
    options = {"checkpoint": "never", "loss_fn": nn.functional.mse_loss, "compile": option, **options}
    devices = options.pop("devices", (DEVICE, DEVICE))
    pipe = Pipeline(model, devices, microbatches=4, balance=[3, len(model) - 3], **options)
    losses = []
    with pipe.sync() as run:
        for samples in (8, 8, 10, 8):
            result = run.step(*torch.randn(2, samples, 64).double())
            assert result.loss is not None
            losses.append(result.loss.cpu())
        run.step(*torch.randn(2, 8, 64).double()).wait()
    return [*losses, *(p.grad.cpu() for p in model.parameters() if p.grad is not None)], pipe


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_micro_batches_in_flight_compute_what_is_computed_without_graphs(checkpoint: str, schedule: str) -> None:
    plain, _ = trained(False, checkpoint=checkpoint, schedule=schedule)
    found, pipe = trained("cudagraphs", checkpoint=checkpoint, schedule=schedule)
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert [(stage.forward_graphs, stage.backward_graphs) for stage in pipe.compiled] == [(1, 1), (1, 1)]
    assert all(not stage.recompilations for stage in pipe.compiled)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_two_logical_devices_of_a_gpu_draw_the_same_with_and_without_graphs(checkpoint: str) -> None:
    devices = (DEVICE, f"{DEVICE}#1")
    if not CAPTURES_HAVE_SEEDS:
        with pytest.raises(asyncpipe.TaskError, match="share the seed"):
            trained("cudagraphs", devices=devices)
        return
    for _ in range(5):
        plain, _ = trained(False, checkpoint=checkpoint, devices=devices)
        found, _ = trained("cudagraphs", checkpoint=checkpoint, devices=devices)
        for one, other in zip(plain, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def convolutions() -> list[nn.Module]:
    shape = nn.Unflatten(1, (1, 8, 8))
    return [shape, nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1), nn.Flatten()]


def test_convolutions_that_cudnn_benchmarks_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(False, convolutions)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found, _ = trained("cudagraphs", convolutions)
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_slots_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    synchronize, empty_cache = torch.cuda.synchronize, torch.cuda.empty_cache
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: (calls.append("wait"), synchronize(*device))[1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: (calls.append("empty"), empty_cache())[1])
    _, pipe = trained("cudagraphs", schedule="gpipe")
    captured = [each.stage for stage in pipe.stages if stage.compiler for each in stage.compiler.compilations]
    assert "wait" not in calls
    # Once for each of two stages and two sizes.
    assert calls.count("empty") == 4 < len(captured)


def test_slots_are_as_many_as_micro_batches_in_flight() -> None:
    _, pipe = trained("cudagraphs", schedule="1f1b")
    captured = [each.stage for stage in pipe.stages if stage.compiler for each in stage.compiler.compilations]
    # Sizes 2 and 3; stage 1 holds one micro-batch at a time.
    assert captured.count(1) <= 2 * 2
    assert captured.count(0) <= 2 * 3


class Averages(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9)
        return x * self.average


def hooked() -> list[nn.Module]:
    made = layers()
    made[0].register_forward_hook(lambda *_: None)
    return made


class Waits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: [*layers(), Averages()], "its forward changes a buffer"),
        (lambda: [*layers(), nn.BatchNorm1d(64)], "its forward changes a buffer"),
        (hooked, "does not call the hooks|would not call the hooks"),
        (lambda: [*layers(), Waits()], "its kernels cannot be captured"),
    ],
)
def test_what_a_replay_would_get_wrong_is_refused(make: Callable[[], list[nn.Module]], says: str) -> None:
    with pytest.raises(asyncpipe.TaskError, match=says):
        trained("cudagraphs", make)


def test_tied_parameters_and_a_second_backward_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    options: Any = {"microbatches": 2, "balance": [1, 1], "compile": "cudagraphs"}
    with pytest.raises(asyncpipe.errors.OptionError, match="brought to other memory"):
        Pipeline(model, [DEVICE, DEVICE], **options)
    pipe = Pipeline(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [DEVICE, DEVICE], checkpoint="never", **options)
    with pipe.sync() as run:
        for _ in range(2):
            run(torch.randn(4, 8, device=DEVICE)).sum().backward()
        loss = run(torch.randn(4, 8, device=DEVICE)).sum()
        with pytest.raises(asyncpipe.TaskError, match="cannot be retained"):
            loss.backward(retain_graph=True)
