"""What is known of jobs beside their records: their speed, their curve as few points, and a page after their end."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from store_helpers import SPEC

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.observe.live import LiveView
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.last_view import RECENT, PastView, keep_view, past_view, steps_of_view
from asyncpipe.service.jobs.outlook import Outlook, Pace
from asyncpipe.service.store.job_records import LossRow

RECORD = JobRecord("1" * 26, SPEC, JobState.FAILED, "because", 0.0, 1.0, step=50)


def row(step: int) -> LossRow:
    return LossRow(step, 10 / step, 0.1, 0.5, 64)


def shown(folder: Path, steps: int) -> PastView:
    rows = [row(step) for step in range(1, steps + 1)]
    return past_view(RECORD, folder, rows, rows[-RECENT:])


def test_the_pace_is_that_of_the_last_steps():
    pace = Pace(steps=100)
    assert (pace.has_begun, pace.outlook("workers")) == (False, Outlook("workers"))
    pace.add(1, 1e6, 0)
    for step in range(2, 22):
        pace.add(step, 0.5, 64)
    assert pace.outlook(None) == Outlook(steps_per_second=2.0, tokens_per_second=128.0, left_seconds=39.5)
    pace.add(120, 0.5, 64)
    assert pace.outlook(None).left_seconds == 0
    words = Pace(steps=1)
    words.add(1, math.inf, 0)
    assert (words.has_begun, words.outlook(None)) == (True, Outlook())


def test_a_job_that_does_not_run_shows_its_losses_and_its_last_step(tmp_path):
    view = LiveView("run", steps=50)
    keep_view(tmp_path, view)
    assert list(tmp_path.iterdir()) == []
    view.step_completed(simulate(lower(find_schedule("gpipe"), Shape(2, 2, 2), devices=["cpu:0", "cpu:1"])))
    keep_view(tmp_path, view)
    state = shown(tmp_path, 50).snapshot()
    expected = json.loads(json.dumps(view.snapshot()))
    assert (state["step"], state["timeline"]) == (expected["step"], expected["timeline"])
    assert (state["ended"], state["job"]) == (True, SPEC["name"])
    assert (state["training"]["steps"], state["training"]["loss"], state["training"]["rate"]) == (50, 0.2, 128.0)
    assert [point[0] for point in state["history"]] == list(range(1, 51))


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"[1", mtime=0), gzip.compress(b"3", mtime=0), gzip.compress(b"x", mtime=0)[:-9]],
)
def test_a_damaged_file_leaves_the_losses(tmp_path, content):
    (tmp_path / "last_step.json.gz").write_bytes(content)
    state = shown(tmp_path, 1).snapshot()
    assert (state["step"], state["timeline"], state["training"]["loss"]) == (None, None, 10.0)


def test_a_run_that_goes_on_has_the_steps_before_it():
    view = LiveView("run", steps=50)
    view.go_on(30, steps_of_view([row(step) for step in range(1, 41)]))
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
