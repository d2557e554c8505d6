"""What ``asyncpipe train`` shows while it runs."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from asyncpipe.cli.progress import LineProgress, LiveProgress, choose_progress, headline, minutes, show_phases
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.report import Report, report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_notes import StepSize
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import OptionError
from asyncpipe.train.progress import Meter, ProgressSink, RunStarted, StepProgress

RUN = RunStarted("tiny", 41, 1234567, ("dev:0", "dev:1"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def simulated() -> Report:
    """Two stages, four micro-batches: makespan 15, of which every device is busy 12."""
    return report(simulate(lower(find_schedule("1f1b"), Shape(2, 4, 2), checkpoint=CheckpointMode.NEVER)))


def steps(simulated: Report, count: int) -> list[StepProgress]:
    meter, found = Meter(steps=41), []
    for n in range(count):
        meter.add(4.5 - n / 100, 0.5, 1000, simulated.bubble_ratio)
        means = meter.recent_tokens_per_second, meter.remaining_seconds
        found.append(StepProgress(n + 1, 41, 4.5 - n / 100, 1e-3, 1.0, 0.5, 8, 1000, *means, simulated))
    return found


def test_the_meter_gives_recent_means_and_what_is_left(simulated):
    meter = Meter(steps=100)
    for n in range(30):
        meter.add(float(n), (n + 1) / 10, n + 1, simulated.bubble_ratio)
    assert meter.loss == pytest.approx(19.5)
    assert meter.step == 30
    assert meter.recent_tokens_per_second == pytest.approx(10)
    assert meter.remaining_seconds == pytest.approx(70 * 2.05)
    assert meter.bubble_ratio == pytest.approx(simulated.bubble_ratio)


def test_lines_come_at_the_first_every_twentieth_and_the_last_step(simulated):
    out = io.StringIO()
    with choose_progress(wanted=True, out=out) as progress:
        assert isinstance(progress, LineProgress)
        progress.started(RUN)
        for step in steps(simulated, 41):
            progress.stepped(step)
        for _ in range(20):
            progress.entered("sampling")
    lines = out.getvalue().splitlines()
    assert lines[0] == "tiny: 1,234,567 parameters, 41 steps on dev:0, dev:1"
    assert headline(replace(RUN, workers=("dev:0", "dev:1"))) == f"{lines[0]} in 2 worker processes"
    assert headline(replace(RUN, workers=("one",))) == f"{lines[0]} in 1 worker process"
    assert lines[1] == "step 1/41  loss 4.500  2,000 tokens/s  bubble 20%  0:20 left  norm 1"
    assert [line.split()[1] for line in lines[1:-1]] == ["1/41", "20/41", "40/41", "41/41"]
    assert lines[-1] == "sampling"


def test_a_phase_is_a_line_however_often_its_details_change():
    out = io.StringIO()
    with show_phases(out) as show:
        for number in (2, 4):
            for turn in range(20):
                show(f"measuring {number} micro-batches, round {turn + 1} of 20")
    assert out.getvalue().splitlines() == [
        "… measuring 2 micro-batches, round 1 of 20",
        "… measuring 4 micro-batches, round 1 of 20",
    ]


def test_a_terminal_shows_the_newest_phase_in_a_line_that_is_gone_in_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with show_phases(out) as show:
        show("measuring 2 micro-batches, round 1 of 20")
        show("measuring 4 micro-batches, round 3 of 20")
    assert "measuring 4 micro-batches, round 3 of 20" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")  # The line is erased.


def test_a_terminal_shows_a_bar_and_the_utilization_of_every_stage(simulated):
    out = Terminal()
    with choose_progress(wanted=True, out=out) as progress:
        assert isinstance(progress, LiveProgress)
        progress.started(RUN)
        measured = replace(simulated, size=StepSize(1, 10, 1.5e9, 1e9), stage_memory=(2**30, 2**31))
        for step in steps(measured, 20):
            progress.stepped(step)
    shown = out.getvalue()
    for part in (
        "1,234,567 parameters",
        "training",
        "20/41",
        "loss 4.310",
        "2,000 tokens/s",
        "0:10 left",
        "bubble 20%",
        "norm 1  MFU 10.0%",
        "busy 80% 80%",
        "memory 1 GiB 2 GiB",
    ):
        assert part in shown


def test_no_progress_shows_nothing(simulated):
    out = Terminal()
    with choose_progress(wanted=False, out=out) as progress:
        assert isinstance(progress, ProgressSink)
        progress.started(RUN)
        progress.stepped(steps(simulated, 1)[0])
        progress.entered("sampling")
    assert out.getvalue() == ""


def test_a_terminal_without_rich_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with (
        pytest.raises(OptionError, match=r"pip install -e '\.\[cli\]'"),
        choose_progress(wanted=True, out=Terminal()),
    ):
        pass


def test_minutes():
    assert [minutes(seconds) for seconds in (0, 59.9, 60, 3605)] == ["0:00", "0:59", "1:00", "60:05"]
