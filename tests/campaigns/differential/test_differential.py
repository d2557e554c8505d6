"""The short form of the differential campaign, and that it sees what it is to see."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from asyncpipe.ops.execute import compute
from asyncpipe.ops.model import buffers, microbatch, output_watch
from asyncpipe.pipeline import step_inputs
from tests.campaigns.differential.campaign import CAMPAIGN
from tests.campaigns.differential.cases import Case, build, draw
from tests.campaigns.differential.judge import judge
from tests.campaigns.harness import in_short
from tests.campaigns.models.items import Item

pytestmark = pytest.mark.filterwarnings("ignore")  # Pieces that torch has deprecated are what the campaign is for.

SIMPLE = Case(
    seed=1,
    kind="vector",
    items=(Item("Linear"), Item("Tanh"), Item("counter"), Item("Linear without bias")),
    output="",
    cuts=(0.5,),
    devices=2,
    schedule="1f1b",
    checkpoint="always",
    microbatches=3,
    samples=7,
    face="sync step",
    steps=("train", "eval", "train"),
    loss="mean",
)


@pytest.mark.promise("Refused, not wrong", "Random models have the results of the unsplit model, or are refused.")
@pytest.mark.timeout(240)
def test_random_models_are_right_or_refused():
    report = in_short(CAMPAIGN, seed=7, cases=10)
    assert not report.findings, report
    assert report.counts["outcome"]["right"] > 5, report
    assert report.counts["outcome"].total() == 10


def test_a_case_is_the_same_whenever_it_is_drawn():
    for seed in range(60):
        case = draw(seed)
        assert draw(seed) == case
        first, again = build(case)[0], build(case)[0]
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_a_simple_case_is_right():
    assert judge(SIMPLE).outcome == "right"


def test_swapped_microbatches_are_seen(monkeypatch):
    def swapped(*args, **kwargs):
        made = microbatch.cut(*args, **kwargs)
        made.pieces[1:3] = made.pieces[2], made.pieces[1]
        return made

    monkeypatch.setattr(step_inputs, "cut", swapped)
    verdict = judge(SIMPLE)
    assert verdict.outcome == "wrong"
    assert "output of step 0" in verdict.text


def test_a_lost_gradient_is_seen(monkeypatch):
    backward = compute.StageCompute.backward

    def forgetful(self, task):
        backward(self, task)
        if task.stage == 0 and task.microbatch == 1:
            self.stages[0].module.layers[0].bias.grad = None

    monkeypatch.setattr(compute.StageCompute, "backward", forgetful)
    verdict = judge(SIMPLE)
    assert verdict.outcome == "wrong"
    assert "gradient of step 0: 0.bias" in verdict.text


def test_a_buffer_that_is_changed_again_is_seen(monkeypatch):
    monkeypatch.setattr(buffers.StageBuffers, "during", lambda *_: nullcontext())
    assert "RecomputeError: stage 1 computed other values" in judge(SIMPLE).text
    monkeypatch.setattr(output_watch.OutputWatch, "compare", lambda *_: None)
    verdict = judge(SIMPLE)
    assert verdict.outcome == "wrong"
    assert "buffer: " in verdict.text
