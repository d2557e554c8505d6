"""The short form of the campaign of torch's modules, and that it sees what it is to see.

All of it runs in a process of its own: torch's tests change torch where they are imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("expecttest", reason="no expecttest, which torch's tests import: pip install -e '.[dev]'")

from torch import nn

from asyncpipe.errors import StageError
from asyncpipe.ops.model import microbatch
from asyncpipe.pipeline import call, step_inputs
from asyncpipe.runtime.task_threads import inside_task
from tests.campaigns.harness import Apart, Verdict, in_short
from tests.campaigns.modules.campaign import CAMPAIGN
from tests.campaigns.modules.cases import CELLS, Case, fixed, modules
from tests.campaigns.modules.judge import judge

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    apart = Apart(_results, 200)
    while not apart.is_over():
        wait([apart.connection], timeout=0.5)
    assert not apart.outcome, apart.told
    return apart.results


def _results() -> Iterator[Any]:
    yield len(modules()), len({case.module for case in fixed()}), len(CELLS)
    yield list(_spoiled())
    report = in_short(CAMPAIGN, seed=7, cases=200, here=True)
    yield str(report), dict(report.findings), report.counts["outcome"], set(report.counts["topic"])


def _spoiled() -> Iterator[Verdict]:
    """Verdicts of cases that are spoiled."""

    def swapped(*args: Any, **kwargs: Any) -> Any:
        made = microbatch.cut(*args, **kwargs)
        made.pieces[:2] = made.pieces[1], made.pieces[0]
        return made

    with patch.object(step_inputs, "cut", swapped), patch.object(call, "cut", swapped):
        for face in ("step", "call", "gpipe"):
            yield judge(_case("nn.Linear", face))
    for module, error in (("nn.Tanh", ValueError("planted")), ("nn.BatchNorm1d", StageError("planted"))):
        layer = getattr(nn, module.removeprefix("nn."))
        forward = layer.forward

        def failing(self: Any, x: Any, forward: Any = forward, error: Exception = error) -> Any:
            made = forward(self, x)
            if inside_task():
                raise error
            return made

        with patch.object(layer, "forward", failing):
            yield judge(_case(module, "step"))


def _case(name: str, face: str) -> Case:
    (module,) = (number for number, info in enumerate(modules()) if info.name == name)
    return Case(module, 0, face, "gpipe", "always")


def test_every_module_of_torch_is_there(results: list[Any]) -> None:
    there, listed, cells = results[0]
    assert there == listed >= 100
    assert cells == 3 * 4 * 2 + 4


def test_what_is_wrong_is_seen(results: list[Any]) -> None:
    *swapped, told, late = results[1]
    assert [verdict.outcome for verdict in swapped] == ["wrong"] * 3
    assert all("output of step 0" in verdict.text for verdict in swapped)
    assert (told.label, told.topic) == ("told, not refused", "nn.Tanh")
    assert (late.outcome, late.text) == ("wrong", "refused too late: StageError: planted")


def test_a_sample_is_right_or_refused(results: list[Any]) -> None:
    report, findings, outcomes, topics = results[2]
    assert not findings, report
    assert sum(outcomes.values()) == 200
    assert outcomes["right"] > 190, report
    assert len({topic.partition(": ")[0] for topic in topics}) >= 100
