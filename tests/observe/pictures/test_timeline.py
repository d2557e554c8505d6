"""Timelines as text and as SVG, of one step and of several on one axis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task_graph import Phase, Wiring
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import report, reports
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Action, B, F, I, OrderedSchedule, Shape, W
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.timeline import text_timeline

SVG = "{http://www.w3.org/2000/svg}"


def simulated(
    name: str = "gpipe",
    shape: Shape = Shape(3, 4, 3),  # noqa: B008 # immutable
    costs: Costs | None = None,
    checkpoint: str = "never",
    phase: Phase = Phase.STEP,
) -> StepRecord:
    mode = CheckpointMode(checkpoint)
    return simulate(lower(find_schedule(name), shape, checkpoint=mode, phase=phase), costs)


def tasks(root: ElementTree.Element) -> list[ElementTree.Element]:
    """The drawn tasks of a picture."""
    return [group for group in root.iter(f"{SVG}g") if group.attrib.get("class") == "task"]


def story(group: ElementTree.Element) -> str:
    return group.findtext(f"{SVG}title") or ""


class Halves(OrderedSchedule):
    """All forwards, then backwards in halves, save that of the last micro-batch."""

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        yield from (F(i, device) for i in range(shape.microbatches))
        for i in range(shape.microbatches - 1):
            yield I(i, device)
            yield W(i, device)
        yield B(shape.microbatches - 1, device)


def halves(microbatches: int = 3) -> StepRecord:
    return simulate(lower(Halves(), Shape(2, microbatches, 2)))


def test_figure_2_as_text() -> None:
    assert text_timeline(simulated(checkpoint="except_last"), virtual=True) == (
        "time   0              5              10             15             20\n"
        "dev:0  F0 F1 F2 F3 ··················B3─── R2 B2─── R1 B1─── R0 B0───\n"
        "dev:1  ···F0 F1 F2 F3 ·········B3─── R2 B2─── R1 B1─── R0 B0─── ······\n"
        "dev:2  ······F0 F1 F2 F3 B3─── R2 B2─── R1 B1─── R0 B0─── ············\n"
        "\n"
        "F forward, R recompute, B backward\n"
        "\n"
        "makespan 21, bubble 28.6%, peak in flight 4 at every stage\n"
    )


def test_stages_are_named_where_a_device_has_several() -> None:
    assert text_timeline(simulated("interleaved", Shape(4, 2, 2)), virtual=True) == (
        "time   0         2         4         6         8         10        12        14\n"
        "dev:0  F0.0 F1.0 F0.2 F1.2 ··········B0.2───── ·····B1.2───── B0.0───── B1.0─────\n"
        "dev:1  ·····F0.1 F1.1 F0.3 B0.3───── F1.3 B1.3───── B0.1───── B1.1───── ··········\n"
        "\n"
        "makespan 15, bubble 20.0%, peak in flight 2 2 2 1 (stages 0 … 3)\n"
    )


def test_halves_of_a_backward_have_letters_and_a_legend() -> None:
    assert text_timeline(halves(), virtual=True) == (
        "time   0              5              10\n"
        "dev:0  F0 F1 F2 ······I0 W0 I1 W1 ···B2───\n"
        "dev:1  ···F0 F1 F2 I0 W0 I1 W1 B2─── ······\n"
        "\n"
        "F forward, B backward, I input gradient, W weight gradient\n"
        "\n"
        "makespan 12, bubble 25.0%, peak in flight 3 at every stage\n"
    )


def test_real_times_fill_the_width_and_carry_a_unit() -> None:
    costs = Costs(forward=0.00123457, backward=0.00251, copy=0.00011)
    text = text_timeline(simulated(costs=costs), 80)
    axis, *rows = text.splitlines()[:4]
    assert re.findall(r"\d+ ms", axis)[:2] == ["0 ms", "5 ms"]
    assert max(map(len, rows)) == 80
    assert [re.findall(r"[FB]\d", row) for row in rows] == [["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]] * 3
    assert "makespan 22.91 ms" in text


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.builds(Costs, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)),
)
def test_every_cell_is_exactly_as_wide_as_its_task_is_long(
    name: str, stages: int, microbatches: int, costs: Costs
) -> None:
    record = simulated(name, Shape(stages, microbatches, stages), costs, "always")
    lines = text_timeline(record, virtual=True).splitlines()
    makespan = report(record).seconds
    rows = {line.split()[0]: line[7:] for line in lines[1 : stages + 1]}
    # Ends of lines are stripped: of the gap after the last cell, where no other row has dots up to the end.
    columns = max(map(len, rows.values())) + (stages == 1)
    unit = columns / makespan
    for time in report(record).tasks:
        if time.task.source is not None:
            continue
        assert (unit * time.start).is_integer()
        cell = rows[time.task.lane.device].ljust(columns)[int(unit * time.start) : int(unit * time.end)]
        assert len(cell) == unit * time.seconds
        assert re.fullmatch(rf"{time.task.kind.value}{time.task.microbatch}─* ", cell)
    busy = sum(time.seconds for time in report(record).tasks if time.task.source is None)
    assert sum(row.count("·") for row in rows.values()) == unit * (stages * makespan - busy)


def test_svg_has_a_rectangle_and_a_tooltip_for_every_task_that_took_time() -> None:
    record = simulated(costs=Costs(copy=0.5), checkpoint="except_last")
    root = ElementTree.fromstring(svg_timeline(record, title="a < b", virtual=True))
    groups = {story(group).partition("\n")[0]: group for group in tasks(root)}
    assert {text.partition(":")[0] for text in groups} == {task.id for task in record.graph.tasks}
    first, copy = groups["F(0,1): 1.5 to 2.5 on dev:1/compute"], groups["C(0,0>1): 1 to 1.5 on dev:1/copy-in"]
    assert (first.findtext(f"{SVG}text"), copy.find(f"{SVG}text")) == ("F0", None)
    assert root.findtext(f"{SVG}title") == "a < b"


def test_svg_says_what_each_task_waited_for() -> None:
    record = simulated("1f1b", Shape(2, 2, 2), Costs(copy=0.5))
    stories = {story(group).partition(":")[0]: story(group) for group in tasks(root_of(record))}
    assert stories["F(0,0)"] == "F(0,0): 0 to 1 on dev:0/compute"
    assert stories["F(1,0)"].endswith("\nwaited for F(0,0) until 1")
    assert stories["C(0,0>1)"].endswith("\nwaited for F(0,0) until 1, copy-in idle for 1")
    assert stories["B(0,0)"].endswith("\nwaited for C(0,1>0) until 5, device idle for 3")
    # At the same moment both its input and its device were there: the input is what explains the time.
    even = simulated("gpipe", Shape(2, 2, 2))
    stories = {story(group).partition(":")[0]: story(group) for group in tasks(root_of(even))}
    assert stories["B(0,0)"].endswith("\nwaited for B(0,1) until 7")
    # A copy waits for the one before it in its queue, though it does not depend on it.
    slow = simulated("1f1b", Shape(2, 2, 2), Costs(copy=2))
    stories = {story(group).partition(":")[0]: story(group) for group in tasks(root_of(slow))}
    assert stories["C(1,0>1)"].endswith("\nwaited for C(0,0>1) until 3")
    # A copy that takes no time is not in the picture: what it copied is named.
    stories = {story(group).partition(":")[0]: story(group) for group in tasks(root_of(simulated("1f1b")))}
    assert stories["F(0,1)"].endswith("\nwaited for F(0,0) until 1, device idle for 1")


def in_replicas() -> StepRecord:
    """Of one stage on two devices each; a reduction takes three quarters of a gradient's time."""
    wiring = Wiring.chain(2).in_rows(2, [1, 1])
    costs = Costs(copy=0.5, reduce=1.5, gather=0.5, update=0.5)
    return simulate(lower(find_schedule("1f1b"), Shape(4, 4, 4), wiring=wiring), costs)


def test_the_devices_of_a_replica_stand_together() -> None:
    record = in_replicas()
    text = text_timeline(record, copies=True, virtual=True).splitlines()
    heads = [line.split()[:2] for line in text if line.startswith(("replica", "dev", "  reduce"))]
    assert [head[0] if head[0] != "replica" else " ".join(head) for head in heads] == [
        *("replica 0", "dev:0", "reduce", "dev:1", "reduce"),
        *("replica 1", "dev:2", "reduce", "dev:3", "reduce"),
    ]
    assert "F forward, B backward, C copy, U update, A reduce, G gather" in text
    root = root_of(record)
    at = {each.text: float(each.attrib["y"]) for each in root.iter(f"{SVG}text") if each.text and ":" in each.text}
    names = [each for each in root.iter(f"{SVG}text") if each.attrib.get("class") == "replica"]
    lines = {each.text: float(each.attrib["y"]) for each in names}
    assert lines["replica 0"] < at["dev:0"] < at["dev:1"] < lines["replica 1"] < at["dev:2"] < at["dev:3"]
    assert at["dev:2"] - lines["replica 1"] > 18, "the name is above the row"
    # A reduction is a bar below those of copies, and does not reach the next row.
    bars = {story(group).partition(":")[0]: rectangle_of(group) for group in tasks(root)}
    tops = [float(bars[task].attrib["y"]) for task in ("B(1,1)", "C(1,0>1)", "A(1,0)")]
    assert tops == sorted(set(tops))
    assert tops[-1] + float(bars["A(1,0)"].attrib["height"]) < lines["replica 1"] - 12


def root_of(record: StepRecord) -> ElementTree.Element:
    return ElementTree.fromstring(svg_timeline(record, virtual=True))


PAIRS = ("01", "23", "45")
"""The first, second and third stages of two devices."""


def test_svg_tells_the_stages_of_a_device_apart() -> None:
    record = simulated("interleaved", Shape(6, 2, 2))
    found = {(story(group)[0], story(group)[4], rectangle_of(group).attrib["fill"]) for group in tasks(root_of(record))}
    assert len(found) == 12
    for kind in "FB":
        first, second, third = (
            {colour for k, s, colour in found if (k, s) in ((kind, a), (kind, b))} for a, b in PAIRS
        )
        assert first == {TaskKind(kind).colour}
        assert len(first | second | third) == 3
        assert max(third) > max(second) > max(first)


def rectangle_of(group: ElementTree.Element) -> ElementTree.Element:
    rectangle = group.find(f"{SVG}rect")
    assert rectangle is not None
    return rectangle


def test_svgs_are_to_scale_and_those_of_one_time_can_be_laid_over_each_other() -> None:
    records = [simulated("1f1b", Shape(2, 2, 2)), simulated("gpipe", Shape(3, 9, 3))]
    seconds = report(records[1]).seconds
    for record in records:
        root = ElementTree.fromstring(svg_timeline(record, virtual=True, seconds=seconds))
        ran = [time for time in report(record).tasks if time.seconds > 0]
        drawn = {story(group).partition(":")[0]: rectangle_of(group).attrib for group in tasks(root)}
        for time in ran:
            box = drawn[time.task.id]
            assert float(box["x"]) == pytest.approx(51 + time.start * 1000 / seconds, abs=0.01)
            assert float(box["width"]) == pytest.approx(time.seconds * 1000 / seconds - 0.8, abs=0.01)


def test_svg_inside_a_page_has_no_heading() -> None:
    root = ElementTree.fromstring(svg_timeline(simulated(), title="a < b", virtual=True, inline=True))
    assert root.attrib["aria-label"] == "a < b"
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert not texts & {"a < b", "forward"}


# Several steps


def in_a_row(name: str, steps: int, costs: Costs | None = None, shape: Shape = Shape(2, 4, 2)) -> list[StepRecord]:  # noqa: B008
    return simulate_steps(lower(find_schedule(name), shape), costs, steps=steps)


def test_a_bar_stands_where_a_device_begins_the_next_step() -> None:
    assert text_timeline(in_a_row("zb-h2", 3), virtual=True) == (
        "step   0                                   1                                   2\n"
        "time   0              5              10             15             20             25             30"
        "             35\n"
        "dev:0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3│F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3│F0 F1 F2 I0 W0 F3 I1 W1 I2"
        " W2 I3 W3 ···\n"
        "dev:1  ···F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3│F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3│F0 I0 F1 I1 F2 I2 W0 F3"
        " I3 W1 W2 W3\n"
        "\n"
        "F forward, I input gradient, W weight gradient\n"
        "\n"
        "3 steps, makespan 37, a step every 12, bubble 0.0%, peak in flight 3 at every stage\n"
    )


def test_svg_has_a_line_on_each_device_and_names_the_steps() -> None:
    records = in_a_row("zb-h2", 3, Costs(copy=0.5))
    root = ElementTree.fromstring(svg_timeline(records, virtual=True))
    lines = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.attrib.get("class") == "border"]
    assert len(set(lines)) == 2 * 2
    stories = [
        group.findtext(f"{SVG}title") or "" for group in root.iter(f"{SVG}g") if group.attrib.get("class") == "task"
    ]
    assert len(stories) == 3 * len(records[0].graph.tasks)
    _, second, _ = reports(records)
    begin = next(time.start for time in second.tasks if time.task.id == "F(0,0)")
    (story,) = [story for story in stories if story.startswith("step 1, F(0,0):")]
    assert story.endswith(f"\nwaited for the step before until {begin:g}")
    assert root.findtext(f"{SVG}title") == "zb-h2"


def test_steps_on_other_devices_have_another_picture() -> None:
    records = [*in_a_row("1f1b", 1), *in_a_row("1f1b", 1, shape=Shape(3, 4, 3))]
    for draw in (text_timeline, svg_timeline):
        with pytest.raises(OptionError, match="all on the same devices"):
            draw(records)
        with pytest.raises(OptionError, match="one step or more"):
            draw([])
