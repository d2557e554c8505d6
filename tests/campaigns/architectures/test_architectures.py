"""The short form of the campaign of architectures, and that it sees what it is to see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from asyncpipe.ops.model.transformers import counted_loss
from tests.campaigns.architectures import heads, padding, zoo_transformers
from tests.campaigns.architectures.architecture import ZOO
from tests.campaigns.architectures.judge import EVALUATION, judge
from tests.campaigns.harness import in_short

assert zoo_transformers

SHORT = [("zb-h1", "always"), EVALUATION]


@pytest.mark.parametrize(("name", "how"), [("llama", "structure"), ("swin", "trace")])
def test_architectures_are_right(name: str, how: str) -> None:
    said, *verdicts = judge(ZOO[name], SHORT)
    assert f"cut by {how}" in said
    assert [each.outcome for each in verdicts] == ["right"] * 2, verdicts


@pytest.mark.promise(
    "Right results",
    "A model of transformers has the loss and gradients of the whole batch, however the batch is padded and cut.",
)
@pytest.mark.parametrize(
    "name",
    [
        *"Gemma3 DeepseekV3 GptOss MBart:ConditionalGeneration".split(),
        *(pytest.param(name, marks=pytest.mark.long) for name in "SmolLM3 Granite OPT Falcon".split()),
    ],
)
def test_families_and_heads_are_right(name: str) -> None:
    only = name if ":" in name else f"{name}:CausalLM"
    report = in_short(heads.CAMPAIGN, only=only, short=True, here=True)
    assert report.counts["outcome"]["right"] == (1 if ":" in name else 2), report
    assert not report.findings


def test_padded_batches_are_right() -> None:
    report = in_short(padding.CAMPAIGN, seed=3, cases=4, only="llama,t5", here=True)
    assert report.counts["outcome"] == {"right": 4}, report


def test_another_mean_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of micro-batches, each of which counts alike."""
    case = replace(padding.draw(1), family="llama", lengths=(3, 9, 5), padded_left=False, sizes=(1, 2), called=False)
    case = replace(case, ignored=0.0, ignored_sample=-1)
    assert padding.judge_case(case).outcome == "right"
    counted = counted_loss.CountedLoss.__call__

    def alike(*args: Any) -> Any:
        return counted(*args)[0], torch.tensor(1)

    monkeypatch.setattr(counted_loss.CountedLoss, "__call__", alike)
    assert padding.judge_case(case).outcome == "wrong"
