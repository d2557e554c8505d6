"""What is known of jobs beside their records: their speed, their curve as few points, and a page after their end."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from store_helpers import SPEC

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.last_view import earlier_steps, keep_view, past_view
from asyncpipe.service.jobs.loss_file import LossFile, LossRow, spread_losses
from asyncpipe.service.jobs.outlook import Pace

RECORD = JobRecord("1" * 26, SPEC, JobState.FAILED, "because", 0.0, 1.0, step=50)


def row(step: int) -> LossRow:
    return LossRow(step, 10 / step, 0.1, 0.5, 64)


def write(folder: Path, rows: list[LossRow]) -> None:
    file = LossFile(folder)
    for each in rows:
        file.append(each)
    file.close()


@pytest.mark.parametrize(("steps", "most"), [(0, 5), (1, 5), (3, 5), (5, 5), (1000, 7), (1000, 1)])
def test_a_curve_of_few_points_goes_from_the_first_step_to_the_last(tmp_path, steps, most):
    assert spread_losses(tmp_path, most) == []
    write(tmp_path, [row(step) for step in range(1, steps + 1)])
    found = [each.step for each in spread_losses(tmp_path, most)]
    assert len(found) <= most
    assert found == sorted(set(found))
    if steps and most > 1:
        assert (found[0], found[-1]) == (1, steps)
    if steps == 1000 and most > 1:
        gaps = [b - a for a, b in pairwise(found)]
        assert max(gaps) < 1.2 * min(gaps)


def test_a_line_that_is_being_written_is_no_point(tmp_path):
    write(tmp_path, [row(1), row(2)])
    with (tmp_path / "losses.jsonl").open("ab") as file:
        file.write(row(3).line()[:20])
    assert [each.step for each in spread_losses(tmp_path, 50)] == [1, 2]


def test_the_pace_is_that_of_the_last_steps():
    pace = Pace(steps=100)
    assert (pace.has_begun, pace.steps_per_second, pace.tokens_per_second, pace.left_seconds) == (False, *[None] * 3)
    pace.add(1, 1e6, 0)
    for step in range(2, 22):
        pace.add(step, 0.5, 64)
    assert (pace.steps_per_second, pace.tokens_per_second, pace.left_seconds) == (2.0, 128.0, 39.5)
    pace.add(120, 0.5, 64)
    assert pace.left_seconds == 0
    words = Pace(steps=1)
    words.add(1, math.inf, 0)
    assert (words.has_begun, words.steps_per_second, words.tokens_per_second) == (True, None, None)


def test_a_job_that_does_not_run_shows_its_losses_and_its_last_step(tmp_path):
    view = LiveView("run", steps=50)
    keep_view(tmp_path, view)
    assert list(tmp_path.iterdir()) == []
    view.step_completed(simulate(lower(find_schedule("gpipe"), Shape(2, 2, 2), devices=["cpu:0", "cpu:1"])))
    keep_view(tmp_path, view)
    write(tmp_path, [row(step) for step in range(1, 51)])
    state = past_view(RECORD, tmp_path).snapshot()
    expected = json.loads(json.dumps(view.snapshot()))
    assert (state["step"], state["timeline"]) == (expected["step"], expected["timeline"])
    assert (state["ended"], state["job"]) == (True, SPEC.name)
    assert (state["training"]["steps"], state["training"]["loss"], state["training"]["rate"]) == (50, 0.2, 128.0)
    assert [point[0] for point in state["history"]] == list(range(1, 51))


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"[1"), gzip.compress(b"3"), gzip.compress(b"x")[:-9]]
)
def test_a_damaged_file_leaves_the_losses(tmp_path, content):
    (tmp_path / "last_step.json.gz").write_bytes(content)
    write(tmp_path, [row(1)])
    state = past_view(RECORD, tmp_path).snapshot()
    assert (state["step"], state["timeline"], state["training"]["loss"]) == (None, None, 10.0)


def test_a_run_that_goes_on_has_the_steps_before_it(tmp_path):
    write(tmp_path, [row(step) for step in range(1, 41)])
    view = LiveView("run", steps=50)
    view.go_on(30, earlier_steps(tmp_path))
    assert [point[0] for point in view.snapshot()["history"]] == list(range(1, 31))
    view.training_step(0.5, 0, 64, 0.5)
    assert view.snapshot()["training"]["steps"] == 31
    view.go_on(5)  # It has lost workers, and goes back to a snapshot.
    view.training_step(0.25, 0, 64, 0.5)
    assert [point[0] for point in view.snapshot()["history"]] == [1, 2, 3, 4, 5, 6]


def test_points_of_a_long_run_stand_for_as_many_steps_before_and_after_it_went_on():
    view = LiveView()
    view.go_on(1000, [(step, 1.0, 0.5, 0, 64) for step in range(1, 1001, 10)])
    for _ in range(25):
        view.training_step(2.0, 0, 64, 0.5)
    assert [point[0] for point in view.snapshot()["history"]][-4:] == [991, 1005.5, 1015.5, 1023.0]
