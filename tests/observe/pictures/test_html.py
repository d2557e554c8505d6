"""Pages that compare steps: self-contained, and with the right figures."""

from __future__ import annotations

import re
from html import unescape

import pytest

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.pictures.html import ComparedStep, html_comparison


def simulated(
    name: str = "gpipe",
    shape: Shape = Shape(2, 3, 2),  # noqa: B008 # immutable
    costs: Costs | None = None,
    phase: Phase = Phase.STEP,
) -> StepRecord:
    return simulate(lower(find_schedule(name), shape, phase=phase), costs)


def compared() -> list[ComparedStep]:
    halved = Costs(0.5, input_gradient=0.5, weight_gradient=0.5)
    return [
        ComparedStep("gpipe", simulated(), virtual=True),
        ComparedStep("1f1b", simulated("1f1b", costs=Costs(copy=0.5)), virtual=True, detail="copies cost 0.5"),
        ComparedStep("interleaved", simulated("interleaved", Shape(4, 3, 2), halved), virtual=True),
    ]


def table(page: str) -> list[list[str]]:
    """The texts of the cells; those of each device follow after a bar."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows)
    return [[unescape(re.sub(r"<[^>]*>", "", cell.replace("<small>", "|"))) for cell in row] for row in cells]


def test_a_page_asks_for_nothing_outside_it_and_its_links_lead_somewhere() -> None:
    text = html_comparison(compared())
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert set(re.findall(r"\w+://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|src=|<script", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert ids == re.findall(r'href="#([^"]+)"', text) == [f"step-{k}" for k in range(3)]
    assert text.count("<svg") == text.count("</svg>") == 3


def test_the_table_has_the_figures_of_every_step() -> None:
    assert table(html_comparison(compared())) == [
        ["step", "makespan", "of the shortest", "bubble", "peak in flight"],
        ["gpipe", "12", "104.3%", "25.0%|on each device", "3|on each device"],
        ["1f1b", "14", "121.7%", "35.7%|on each device", "2|2 · 1"],
        ["interleaved", "11.5", "100.0%", "21.7%|on each device", "2.5|2.5 · 1.5"],
    ]


def test_every_task_tells_its_story() -> None:
    given = compared()
    stories = re.findall(r"<title>([^<]*)</title><rect", html_comparison(given))
    ran = [time.task for step in given for time in report(step.record).tasks if time.seconds > 0]
    assert sorted(unescape(story).partition(":")[0] for story in stories) == sorted(task.id for task in ran)
    assert "B(0,0): 5 to 7 on dev:0/compute\nwaited for C(0,1&gt;0) until 5, device idle for 3" in stories


def test_the_legend_names_the_kinds_that_ran() -> None:
    legend = re.findall(r'--kind:(#\w+)">(\w)', html_comparison(compared()))
    assert legend == [(kind.colour, kind.value) for kind in TaskKind if kind.value in "FBC"]
    assert "paler:" in html_comparison(compared())
    assert "paler:" not in html_comparison(compared()[:2])


def test_texts_are_escaped() -> None:
    bad = '<script>alert("1")</script>&\'"'
    text = html_comparison([ComparedStep(bad, simulated(), True, detail=bad)], title=bad)
    assert "<script" not in text
    assert table(text)[1][0] == bad


def test_seconds_have_units_and_a_forward_step_is_shown_too() -> None:
    record = simulated(costs=Costs(0.001, input_gradient=0.001, weight_gradient=0.001), phase=Phase.FORWARD)
    text = html_comparison([ComparedStep("forward", record, virtual=False)])
    assert table(text)[1][:4] == ["forward", "4 ms", "100.0%", "25.0%|on each device"]
    assert "F(0,1): 1 ms to 2 ms on dev:1/compute" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "at least one step"),
        (
            [ComparedStep("a", simulated(), True), ComparedStep("b", simulated(), False)],
            "all virtual or all in seconds",
        ),
    ],
)
def test_steps_that_cannot_be_compared_are_refused(wrong: list[ComparedStep], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        html_comparison(wrong)
