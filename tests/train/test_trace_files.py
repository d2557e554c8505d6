"""The trace and the picture of a run: whole or not there, and never its end."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from resume_helpers import STEPS, make_workload
from resume_helpers import make_job as make_run
from torch import Tensor, nn

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.records.step_record import StepRecord
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.train import trace_files
from asyncpipe.train.job_file import Job
from asyncpipe.train.progress import ProgressSink
from asyncpipe.train.trace_files import TraceRecorder, WrittenFiles
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.workload import Workload


def make_job(**observe: object) -> Job:
    return make_run(observe={name: str(value) for name, value in observe.items()})


def recorder(steps: int = 1) -> TraceRecorder:
    """One that has seen two steps."""
    made = TraceRecorder(steps)
    for _ in range(2):
        made.step_completed(simulate(lower(find_schedule("1f1b"), Shape(2, 4, 2))))
    return made


class Failures:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def write_half(records: Iterable[StepRecord], path: Path, **_: Any) -> None:
    path.write_text('{"traceEvents": [', encoding="utf-8")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_asked_for_is_written_and_whatever_was_there_is_replaced(tmp_path, caplog):
    trace, timeline, failures = tmp_path / "t.json", tmp_path / "t.svg", Failures()
    trace.write_text("x" * 1_000_000)
    assert recorder().write(make_job(trace=trace, timeline=timeline), failures) == WrittenFiles(trace, timeline)
    assert json.loads(trace.read_text())["traceEvents"]
    assert timeline.read_text().startswith("<svg")
    assert sorted(tmp_path.iterdir()) == [trace, timeline]
    assert (failures.count, caplog.records) == (0, [])


@pytest.mark.parametrize("there", [None, "an older one"])
def test_a_trace_that_fails_half_way_leaves_what_was_there(tmp_path, monkeypatch, caplog, there):
    trace, timeline, failures = tmp_path / "t.json", tmp_path / "t.svg", Failures()
    if there is not None:
        trace.write_text(there)
    monkeypatch.setattr(trace_files, "write_trace", write_half)
    assert recorder().write(make_job(trace=trace, timeline=timeline), failures) == WrittenFiles(None, timeline)
    assert {path.name for path in tmp_path.iterdir()} == {"t.svg", *(["t.json"] if there else [])}
    assert there is None or trace.read_text() == there
    assert failures.count == 1
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.ERROR, None)
    assert record.getMessage() == f"the trace {trace} was not written: No space left on device"


def test_a_full_disk_and_a_folder_that_has_gone_are_told_in_a_line_for_each_file(full, tmp_path, caplog):
    failures = Failures()
    job = make_job(trace=full, timeline=tmp_path / "gone" / "t.svg")
    assert recorder().write(job, failures) == WrittenFiles()
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace {full} was not written: No space left on device",
        f"the timeline {tmp_path / 'gone' / 't.svg'} was not written: No such file or directory",
    ]
    assert failures.count == 2
    assert not full.with_name("full.incomplete").exists()
    assert full.is_char_device()


def test_a_fold_that_fails_is_told_with_its_traceback(tmp_path, monkeypatch, caplog):
    def fail(*_: object, **__: object) -> None:
        raise KeyError("F(0,0)")

    monkeypatch.setattr(trace_files, "write_trace", fail)
    failures = Failures()
    assert recorder().write(make_job(trace=tmp_path / "t.json"), failures) == WrittenFiles()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert failures.count == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_written_into(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert recorder().write(make_job(trace=pipe), Failures()) == WrittenFiles(pipe)
    reader.join()
    assert json.loads(read[0])["traceEvents"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_one(tmp_path):
    link, behind = tmp_path / "latest.json", tmp_path / "3.json"
    link.symlink_to(behind)
    assert recorder().write(make_job(trace=link), Failures()) == WrittenFiles(link)
    assert link.is_symlink()
    assert json.loads(behind.read_text())["traceEvents"]


def test_only_the_last_steps_are_kept_and_given_up_when_written(tmp_path):
    kept = recorder(steps=1)
    trace = tmp_path / "t.json"
    kept.write(make_job(trace=trace), Failures())
    events = json.loads(trace.read_text())["traceEvents"]
    assert len({event["args"]["step"] for event in events if "step" in event.get("args", {})}) == 1
    trace.unlink()
    assert kept.write(make_job(trace=trace), Failures()) == WrittenFiles()
    assert not trace.exists()


# Steps that fail


class Failing(nn.Module):
    """Fails at its first forward, and looks at the next attempt for what that one had in its frame."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ref[Tensor]] = []
        self.tried_again = False
        self.left: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            activation = x * 2
            self.made.append(ref(activation))
            raise ArithmeticError("hot")
        if self.tried_again and self.left is None:
            gc.collect()
            self.left = sum(made() is not None for made in self.made)
        return x


@pytest.mark.parametrize("asked", ["nothing", "trace", "timeline"])
async def test_a_step_is_tried_again_without_the_tensors_of_the_attempt_that_failed(tmp_path, monkeypatch, asked):
    shown = []

    class Noted(TraceRecorder):
        def step_completed(self, record: StepRecord) -> None:
            shown.append(record.outcome)
            super().step_completed(record)

    class Told(ProgressSink):
        def noted(self, level: int, text: str) -> None:
            failing.tried_again = True

    monkeypatch.setattr("asyncpipe.train.training_run.TraceRecorder", Noted)
    failing = Failing()

    def make() -> Workload:
        made = make_workload()
        return replace(made, model=nn.Sequential(*made.model, failing))

    observe = {} if asked == "nothing" else {asked: tmp_path / "file", "trace_steps": 9}
    job = make_run(tmp_path / "snapshots").override("observe", **observe)
    summary = await TrainingRun(job, make, progress=Told()).run()
    assert failing.left == 0
    # Nobody has to keep what nobody asked for.
    assert shown == ([] if asked == "nothing" else ["failed", *["ok"] * STEPS])
    if asked == "trace":
        names = [event["name"] for event in json.loads(summary.trace.read_text())["traceEvents"]]
        assert "F(0,1) failed: ArithmeticError" in names


def test_records_of_large_steps_are_fewer():
    """Each has 20 tasks or so; at least one is kept."""
    records = [simulate(lower(find_schedule("gpipe"), Shape(2, 4, 2))) for _ in range(4)]
    each = len(records[0].graph.tasks)
    for most, kept in ((None, 3), (2 * each, 2), (2 * each - 1, 1), (1, 1)):
        made = TraceRecorder(3, most)
        for record in records:
            made.step_completed(record)
        assert [id(record) for record in made.records] == [id(record) for record in records[-kept:]]
