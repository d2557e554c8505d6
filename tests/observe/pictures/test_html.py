"""Pages that compare steps: valid, self-contained, and with the right figures."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

import asyncpipe
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


def test_timelines_share_one_scale() -> None:
    page = Page(html_comparison(compared()))
    lefts, widths = zip(*page.lanes, strict=True)
    assert len(set(lefts)) == 1
    shown = [float(width) for width in widths[::2]]
    assert [width / shown[0] for width in shown] == pytest.approx([1, 14 / 12, 11.5 / 12], abs=0.001)


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


def test_arrows_are_in_all_pictures_or_in_none() -> None:
    small, large = ComparedStep("s", simulated(), True), ComparedStep("l", simulated("gpipe", Shape(4, 16, 4)), True)
    assert html_comparison([small]).count("marker-end") == 6
    assert "marker-end" not in html_comparison([small, large])


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


def test_a_step_without_time_has_a_page() -> None:
    page = Page(html_comparison([ComparedStep("nothing", simulated(costs=Costs(0, 0, 0, 0, 0, 0)), virtual=True)]))
    assert page.table[1][:4] == ["nothing", "0", "100.0%", "0.0%"]


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


class Recorder:
    """Keeps the last record, as the docstring of ``html_comparison`` has it."""

    def step_completed(self, record: StepRecord) -> None:
        self.record = record


async def test_a_simulated_step_stands_beside_the_measured_one() -> None:
    torch = pytest.importorskip("torch")
    recorder = Recorder()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    async with asyncpipe.Pipeline(
        model, devices=["cpu", "cpu"], balance=[1, 1], microbatches=2, loss_fn=torch.nn.functional.mse_loss
    ) as pipe:
        pipe.observers.append(recorder)
        await (await pipe.step(torch.ones(4, 4), torch.ones(4, 1))).completed()
    measured = recorder.record
    predicted = simulate(measured.graph, Costs(0.001, input_gradient=0.001, weight_gradient=0.001))
    page = Page(
        html_comparison([ComparedStep("measured", measured, False), ComparedStep("simulated", predicted, False)])
    )
    assert page.headings == ["measured", "simulated"]
    assert sum(story.startswith("B(0,0): ") for story in page.stories) == 2
