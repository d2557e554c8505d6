"""Pictures of several steps on one axis: where each device begins the next one can be seen."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.costs import Costs
from asyncpipe.core.predict.report import reports
from asyncpipe.core.predict.simulate import simulate, simulate_steps
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.observe.pictures.svg import svg_timeline
from asyncpipe.observe.pictures.timeline import text_timeline
from asyncpipe.observe.pictures.trace import to_chrome

SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: str, steps: int, costs: Costs | None = None, shape: Shape = Shape(2, 4, 2)) -> list[StepRecord]:  # noqa: B008 # immutable
    return simulate_steps(lower(find_schedule(name), shape), costs, steps=steps)


def test_a_bar_stands_where_a_device_begins_the_next_step() -> None:
    assert text_timeline(simulated("zb-h2", 3), virtual=True) == (
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
    records = simulated("zb-h2", 3, Costs(copy=0.5))
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


def test_a_trace_marks_where_devices_begin_a_step() -> None:
    events = to_chrome(simulated("zb-h2", 2))["traceEvents"]
    marks = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert marks == [("step 1 begins", 12e6), ("step 1 begins", 13e6)]
    rows = {event["name"]: event["tid"] for event in events if event.get("cat") == "step"}
    assert len(set(rows.values())) == 2
    one_by_one = [simulate(lower(find_schedule("zb-h2"), Shape(2, 4, 2)))]
    assert not [event for event in to_chrome(one_by_one)["traceEvents"] if event["ph"] == "i"]


def test_steps_on_other_devices_have_another_picture() -> None:
    records = [*simulated("1f1b", 1), *simulated("1f1b", 1, shape=Shape(3, 4, 3))]
    for draw in (text_timeline, svg_timeline):
        with pytest.raises(OptionError, match="all on the same devices"):
            draw(records)
        with pytest.raises(OptionError, match="one step or more"):
            draw([])
