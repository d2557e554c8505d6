"""The short form of the campaign of architectures, and that it sees what it is to see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from asyncpipe.ops.model.transformers import counted_loss
from tests.campaigns.architectures import padding, zoo_transformers
from tests.campaigns.architectures.architecture import ZOO, Architecture
from tests.campaigns.architectures.judge import EVALUATION, Cell, Header, findings, judge, judged

assert zoo_transformers

SHORT = [("zb-h1", "always"), EVALUATION]


@pytest.mark.parametrize(("name", "how"), [("llama", "structure"), ("distilbert", "trace")])
def test_architectures_are_right(name: str, how: str) -> None:
    lines = list(judge(ZOO[name], SHORT))
    assert isinstance(lines[0], Header)
    assert lines[0].how == how
    assert [line.outcome for line in lines[1:]] == ["right"] * 2, lines


def test_padded_batches_are_right() -> None:
    assert padding.run(3, 4, until=float("inf"), families=("llama", "t5")) == 0


def test_another_mean_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of micro-batches, each of which counts alike."""
    case = replace(padding.draw(1), family="llama", lengths=(3, 9, 5), padded_left=False, sizes=(1, 2), called=False)
    case = replace(case, ignored=0.0, ignored_sample=-1)
    assert padding.judge_case(case) == ("right", "")
    counted = counted_loss.CountedLoss.__call__

    def alike(*args: Any) -> Any:
        return counted(*args)[0], torch.tensor(1)

    monkeypatch.setattr(counted_loss.CountedLoss, "__call__", alike)
    assert padding.judge_case(case)[0] == "wrong"


@pytest.mark.parametrize(("end", "outcome"), [("die", "crashed"), ("wait", "hung")])
def test_a_process_that_dies_or_hangs_is_a_result(end: str, outcome: str) -> None:
    def work(architecture: Architecture, _: Any) -> Iterator[Header | Cell]:
        yield Cell(*SHORT[0], "right")
        if end == "die":
            os._exit(3)
        while True:
            pass

    lines = judged(ZOO["llama"], 0.5, SHORT, work)
    assert [line.outcome for line in lines if isinstance(line, Cell)] == ["right", outcome]
    assert ("test_architectures.py" in findings(lines)[0].text) == (outcome == "hung")
