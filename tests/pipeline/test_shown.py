"""What a pipeline and a result show of themselves, in a terminal and in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, StepResult
from asyncpipe.pipeline import result as results
from asyncpipe.pipeline import shown


def pictures(html: str) -> int:
    start = html.find("<svg")
    if start >= 0:
        ElementTree.fromstring(html[start:])
    return html.count("<svg")


async def test_a_pipeline_and_a_result_show_stages_devices_bubble_and_the_step(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    options = {"microbatches": 2, "schedule": "gpipe", "loss_fn": nn.functional.mse_loss, "checkpoint": "never"}
    pipe = Pipeline(model, ["cpu:0", "cpu:1"], **options)
    assert repr(pipe).splitlines() == [
        "Pipeline: 2 stages on 2 devices, gpipe, 2 micro-batches, checkpoint never",
        "  stage 0  cpu:0  20 parameters",
        "  stage 1  cpu:1  10 parameters",
    ]
    assert repr(pipe.sync()) == repr(pipe)
    assert "<td>1<td>cpu:1<td align=right>10" in pipe._repr_html_()
    assert pictures(pipe._repr_html_()) == 1
    async with pipe:
        result = await pipe.step(torch.randn(4, 4), torch.randn(4, 2))
    assert f"loss {float(result.loss):.6g}" in repr(result)
    assert f"bubble {result.report.bubble_ratio:.1%}" in repr(result)
    assert pictures(result._repr_html_()) == 1
    for module in (shown, results):
        monkeypatch.setattr(module, "MOST_TASKS", 3)
    assert not pictures(pipe._repr_html_() + result._repr_html_())


@pytest.mark.parametrize("show", [repr, StepResult._repr_html_])
def test_a_result_whose_devices_are_at_it_waits_for_nothing(show):
    driven = SimpleNamespace(done=SimpleNamespace(done=lambda: False))
    assert "not done yet" in show(StepResult(None, (), None, driven, None))
