"""How much a step computes: tokens, model FLOPs and MFU, from the mini-batch to the report and the metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

import asyncpipe
from asyncpipe import Arguments, FlopCount, count_flops
from asyncpipe.errors import BatchError, OptionError
from asyncpipe.observe.metrics import PipelineCollector
from asyncpipe.observe.scalars import report_scalars
from asyncpipe.ops.device.devices import Device, resolve_devices
from asyncpipe.ops.model.flops import peak_flops, token_count

WORDS, WIDTH, LENGTH, SAMPLES = 11, 4, 5, 8


class Looking(nn.Module):
    """A model that looks at values, as no meta tensor has them, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 7)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x if x.sum().item() > 1e9 else 2 * x)


def language_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_flops_are_three_times_those_of_the_products_forward() -> None:
    ids = torch.randint(WORDS, (SAMPLES, LENGTH))
    per_token = 3 * 2 * (WIDTH * WIDTH + WIDTH * WORDS)
    assert count_flops(language_model(), ids) == FlopCount(per_token=per_token)
    model = nn.Linear(3, 7).train()
    assert count_flops(model, Arguments.of(torch.randn(4, 3))) == FlopCount(per_sample=3 * 2 * 3 * 7)
    assert model.training
    assert FlopCount(per_token=2.0, per_sample=3.0).of(samples=5, tokens=7) == 29.0


def test_a_transformers_model_is_counted_by_its_batch_as_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    width, hidden, length = 16, 24, 6
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(WORDS, (2, length))
    layer = 4 * width * width + 3 * width * hidden + 2 * length * width
    counted = count_flops(model, {"input_ids": ids, "labels": ids})
    # The rotary embedding's outer product of positions and frequencies is a product as well.
    assert counted.per_token == pytest.approx(6 * (2 * layer + width * WORDS), rel=5e-3)


def test_a_model_that_looks_at_values_runs_once_where_it_is() -> None:
    model = Looking()
    assert count_flops(model, torch.randn(4, 3)) == FlopCount(per_sample=3 * 2 * 3 * 7)
    assert model.calls == 2
    assert model.layer.weight.grad is None
    with pytest.raises(BatchError, match="no tensor"):
        count_flops(model, {})


@pytest.mark.parametrize(
    ("piece", "count"),
    [
        (torch.zeros(2, 3, dtype=torch.long), 6),
        (torch.zeros(2, 3), 0),
        (torch.zeros(2, dtype=torch.long), 0),
        (Arguments.of(input_ids=torch.zeros(2, 3, dtype=torch.int32), attention_mask=torch.ones(2, 3)), 6),
        (Arguments.of({"input_ids": torch.zeros(2, 4, dtype=torch.long)}), 8),
        (Arguments.of(pixel_values=torch.zeros(2, 4)), 0),
    ],
    ids=["ids", "floats", "classes", "named", "dict", "pictures"],
)
def test_tokens_are_the_elements_of_ids(piece: Any, count: int) -> None:
    assert token_count([piece, piece]) == 2 * count


def test_the_peak_is_that_of_all_gpus_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA H100 80GB HBM3", 1: "NVIDIA H100 PCIe", 2: "NVIDIA L4", 3: "Tesla K80"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    at = [Device(f"cuda:{k}", torch.device("cuda", k)) for k in names]
    assert peak_flops([at[0], at[0], at[1], at[2]]) == 989e12 + 756e12 + 121e12
    assert peak_flops([at[0], at[3]]) == peak_flops(resolve_devices(["cpu:0"])) == 0.0


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_results_metrics_and_scalars_have_tokens_mfu_and_memory(workers: str) -> None:
    model, collector = language_model(), PipelineCollector("job")
    registry = CollectorRegistry()
    registry.register(collector)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH))
    counted = count_flops(model, ids)
    with asyncpipe.Pipeline(
        *(model, ["cpu:0", "cpu:1"]),
        microbatches=4,
        loss_fn=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        workers=workers,
        observers=[collector],
        clip_grad_norm=1.0,
        flops=counted,
        peak_flops=1e9,
    ).sync() as pipe:
        report = pipe.step(ids, ids).report
        second = pipe.step(ids, ids)
        norm = registry.get_sample_value("asyncpipe_gradient_norm", {"job": "job"})
        assert norm == pytest.approx(float(second.gradient_norm))
        evaluated = pipe.step(ids, ids, update=False).report
    needed = counted.per_token * ids.numel()
    assert report.size == (SAMPLES, ids.numel(), needed, 1e9)
    assert report.tokens_per_second == ids.numel() / report.seconds
    assert report.mfu == needed / (1e9 * report.seconds)
    assert len(report.stage_memory) == 2
    assert min(report.stage_memory) > 0
    scalars = report_scalars(report)
    assert scalars.keys() >= {"tokens_per_second", "mfu", "memory/stage 0", "memory/stage 1"}
    assert registry.get_sample_value("asyncpipe_mfu", {"job": "job"}) == evaluated.mfu
    assert registry.get_sample_value("asyncpipe_stage_memory_bytes", {"job": "job", "stage": "1"})


def test_an_mfu_is_not_told_where_something_is_unknown() -> None:
    x = torch.randn(4, 3)
    with asyncpipe.Pipeline(
        nn.Sequential(nn.Linear(3, 3)),
        ["cpu:0"],
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        flops=FlopCount(per_sample=1.0),
    ).sync() as pipe:
        report = pipe.step(x, x).report
        assert (report.mfu, report.tokens_per_second, report.size.samples) == (None, 0.0, 4)
    with pytest.raises(OptionError, match="peak_flops"):
        asyncpipe.Pipeline(nn.Linear(3, 3), ["cpu:0"], microbatches=2, peak_flops=0.0)
