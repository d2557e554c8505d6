"""Pages that compare steps: valid, self-contained, and with the right figures."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

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

VOID = {"meta"}


class Page(HTMLParser):
    """The contents of a page; raises if a tag is left open or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.stories: list[str] = []
        self.lanes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs), f"an attribute of <{tag}> is there twice"
        self.ids += [given["id"]] if "id" in given else []
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if given.get("class") == "lane":
            self.lanes.append((given["x"], given["width"]))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "title" and "svg" in self._open:
            self.stories.append("")
        if tag == "h2":
            self.headings.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self._open, f"<{tag}/> is closed like this in SVG only"
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += ("|" if self._open[-1] == "small" else "") + data
        if self._open[-1:] == ["h2"]:
            self.headings[-1] += data
        if self._open[-1:] == ["title"] and "svg" in self._open:
            self.stories[-1] += data

    @property
    def table(self) -> list[list[str]]:
        return [[cell.strip() for cell in row] for row in self.rows]


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


def test_a_page_is_valid_and_every_id_unique() -> None:
    text = html_comparison(compared())
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert max(Counter(page.ids).values()) == 1
    used = re.findall(r"url\(#([^)]*)\)", text)
    used += [value.removeprefix("#") for _, name, value in page.attributes if name in ("href", "for")]
    assert set(used) == {f"step-{k}" for k in range(3)} | {f"picture-{k}-head" for k in range(3)}
    assert set(used) <= set(page.ids)


def test_a_page_asks_for_nothing_outside_it() -> None:
    text = html_comparison(compared())
    assert [value for _, name, value in Page(text).attributes if name == "src"] == []
    assert set(re.findall(r"\w+://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|fetch\(|import\(", text)
    assert "<script" not in text


def test_the_table_has_the_figures_of_every_step() -> None:
    page = Page(html_comparison(compared()))
    assert page.table == [
        ["step", "makespan", "of the shortest", "bubble", "peak in flight"],
        ["gpipe", "12", "104.3%", "25.0%|on each device", "3|on each device"],
        ["1f1b", "14", "121.7%", "35.7%|on each device", "2|2 · 1"],
        ["interleaved", "11.5", "100.0%", "21.7%|on each device", "2.5|2.5 · 1.5"],
    ]
    assert page.headings == ["gpipe", "1f1b", "interleaved"]


def test_memory_has_a_column_where_it_is_known() -> None:
    record = simulated()
    page = Page(
        html_comparison(
            [
                ComparedStep("a", record, True, memory=[3 << 29, 10]),
                ComparedStep("b", record, True),
                ComparedStep("c", record, True, [7, 7]),
            ]
        )
    )
    assert [row[-1] for row in page.table] == [
        "peak memory",
        "1.5 GiB|1.5 GiB · 10 B",
        "–",
        "7 B|on each device",
    ]


def test_every_task_tells_its_story() -> None:
    given = compared()
    page = Page(html_comparison(given))
    ran = [time.task for step in given for time in report(step.record).tasks if time.seconds > 0]
    assert sorted(story.partition(":")[0] for story in page.stories) == sorted(task.id for task in ran)
    assert "B(0,0): 5 to 7 on dev:0/compute\nwaited for C(0,1>0) until 5, device idle for 3" in page.stories


def test_the_legend_names_the_kinds_that_ran() -> None:
    legend = re.findall(r'--kind:(#\w+)">(\w)', html_comparison(compared()))
    assert legend == [(kind.colour, kind.value) for kind in TaskKind if kind.value in "FBC"]
    assert "paler:" in html_comparison(compared())
    assert "paler:" not in html_comparison(compared()[:2])


def test_texts_are_escaped() -> None:
    bad = '<script>alert("1")</script>&\'"'
    text = html_comparison([ComparedStep(bad, simulated(), True, detail=bad)], title=bad)
    page = Page(text)
    assert "<script" not in text
    assert page.headings == [bad]
    assert page.table[1][0] == bad
    assert ("svg", "aria-label", bad) in page.attributes


def test_seconds_have_units_and_a_forward_step_is_shown_too() -> None:
    record = simulated(costs=Costs(0.001, input_gradient=0.001, weight_gradient=0.001), phase=Phase.FORWARD)
    text = html_comparison([ComparedStep("forward", record, virtual=False)])
    assert Page(text).table[1][:4] == ["forward", "4 ms", "100.0%", "25.0%|on each device"]
    assert "F(0,1): 1 ms to 2 ms on dev:1/compute" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "at least one step"),
        (
            [ComparedStep("a", simulated(), True), ComparedStep("b", simulated(), False)],
            "all virtual or all in seconds",
        ),
        ([ComparedStep("a", simulated(), True, memory=[1])], "one number for each of 2 devices, got 1 in 'a'"),
    ],
)
def test_steps_that_cannot_be_compared_are_refused(wrong: list[ComparedStep], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        html_comparison(wrong)
