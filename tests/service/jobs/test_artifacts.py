"""What can be downloaded of a job: real snapshots, losses, logs and traces, also while others change them."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from io import BytesIO, StringIO
from pathlib import Path

import pytest
import torch

from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.service.jobs.artifacts import (
    ArtifactError,
    JobFiles,
    OpenArtifact,
    UnknownArtifactError,
    event_lines,
    loss_lines,
)
from asyncpipe.service.store.job_records import JobEvent, LossRow
from asyncpipe.train.snapshots.format import Manifest, write_snapshot

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "snapshots").mkdir()
    return tmp_path


def snapshot(folder: Path, step: int, **more: object) -> Path:
    states = {"model": {"weight": torch.full((5,), float(step))}, "optimizer": {}, "run": {"step": step}, **more}
    return write_snapshot(folder / "snapshots" / f"step-{step}", states, Manifest(step=step))


def row(step: int, loss: float = 0.1) -> LossRow:
    return LossRow(step, loss, 1e-3, 0.25, 64, 2.5)


def content(artifact: OpenArtifact) -> bytes:
    """All of it, checked."""
    with artifact.file as file:
        found = file.read()
    assert hashlib.sha256(found).hexdigest() == artifact.sha256
    return found


def test_the_model_is_the_newest_snapshots_or_that_of_a_step(folder):
    snapshot(folder, 9)
    newest = snapshot(folder, 10)
    files = JobFiles(folder)
    opened = files.open("model.pt")
    assert opened.media_type == "application/octet-stream"
    found = content(opened)
    assert found == (newest / "model.pt").read_bytes()
    assert torch.load(BytesIO(found), weights_only=True)["weight"].tolist() == [10.0] * 5
    assert torch.load(BytesIO(content(files.open("model.pt", 9))), weights_only=True)["weight"][0] == 9
    models = [(each.name, each.step) for each in files.found() if each.step is not None]
    assert models == [("model.pt", 10), ("model.pt", 9)]


def test_an_open_model_stays_whole_while_its_snapshot_is_removed(folder):
    path = snapshot(folder, 3)
    expected = (path / "model.pt").read_bytes()
    opened = JobFiles(folder).open("model.pt")
    shutil.rmtree(path)
    assert content(opened) == expected
    with pytest.raises(UnknownArtifactError, match=r"there is no model\.pt; there are log\.jsonl"):
        JobFiles(folder).open("model.pt")


def test_a_snapshot_that_goes_while_it_is_opened_gives_way_to_a_newer_one(folder, monkeypatch):
    old = snapshot(folder, 3)
    real = Path.open

    def goes(self: Path, *arguments: object, **options: object) -> object:
        if self == old / "model.pt":
            shutil.rmtree(old)
            snapshot(folder, 4)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", goes)
    found = content(JobFiles(folder).open("model.pt"))
    assert torch.load(BytesIO(found), weights_only=True)["weight"][0] == 4


def test_stages_that_live_in_workers_have_a_file_each(folder):
    (folder / "snapshots" / "step-2").mkdir()
    for name in ("model-0", "model-1", "model-10", "optimizer-0"):
        (folder / "snapshots" / "step-2" / f"{name}.pt").write_bytes(name.encode())

    def write(path: Path) -> dict[str, str]:
        sums = {}
        for name in ("model-0.pt", "model-1.pt", "model-10.pt", "optimizer-0.pt"):
            (path / name).write_bytes(name.encode())
            sums[name] = hashlib.sha256(name.encode()).hexdigest()
        return sums

    write_snapshot(folder / "snapshots" / "step-3", {"optimizer": {}}, Manifest(step=3), write)
    files = JobFiles(folder)
    models = [each.name for each in files.found() if each.step == 3]
    assert models == ["model-0.pt", "model-1.pt", "model-10.pt"]
    assert content(files.open("model-10.pt")) == b"model-10.pt"
    with pytest.raises(UnknownArtifactError):
        files.open("model.pt")


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt", "run.pt", "snapshot.json", "events.jsonl", "model", "", ".", "..", "../model.pt",
        "model.pt/../run.pt", "/etc/passwd", "snapshots/step-3/model.pt", "model-.pt", "model-01.pt", "model.pt\n",
    ],
)  # fmt: skip
def test_a_name_is_looked_up_and_never_a_path(folder, name):
    snapshot(folder, 3)
    with pytest.raises(UnknownArtifactError):
        JobFiles(folder).open(name)


def test_losses_are_lines_and_a_table_that_is_read_back_with_the_same_bits(folder):
    with pytest.raises(UnknownArtifactError):
        JobFiles(folder).open("losses.csv")
    rows = [*(row(step, 1 / step) for step in range(1, 2001)), row(2001, float("nan"))]
    files = JobFiles(folder, has_losses=True)
    lines = content(files.open("losses.jsonl", parts=[loss_lines(rows, as_csv=False)])).splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [LossRow(**{**each, "loss": float(each["loss"])}) for each in found[:-1]] == rows[:-1]
    assert found[-1]["loss"] == "nan"
    table = list(csv.reader(StringIO(loss_lines(rows, as_csv=True).decode(), newline="")))
    kinds = (int, float, float, float, int, float)
    assert [LossRow(*(kind(each) for kind, each in zip(kinds, line, strict=True))) for line in table[:-1]] == rows[:-1]
    assert table[-1][:2] == ["2001", "nan"]


def test_the_log_has_each_event(folder):
    events = [JobEvent(1, 5.0, "note", {"level": 20, "text": "a word"}), JobEvent(2, 6.0, "snapshot", {"step": 3})]
    opened = JobFiles(folder).open("log.jsonl", parts=[event_lines(events)])
    assert [json.loads(line) for line in content(opened).splitlines()] == [
        {"id": 1, "at": 5.0, "kind": "note", "data": {"level": 20, "text": "a word"}},
        {"id": 2, "at": 6.0, "kind": "snapshot", "data": {"step": 3}},
    ]


def test_a_trace_is_of_the_run_under_way_or_of_the_last_one(folder):
    (folder / "trace.json").write_text('{"traceEvents": []}')
    assert content(JobFiles(folder).open("trace.json")) == b'{"traceEvents": []}'
    graph = lower(find_schedule("gpipe"), Shape(2, 200, 2))
    files = JobFiles(folder, [simulate(graph)] * 2, "demo")
    trace = json.loads(content(files.open("trace.json")))
    assert sum(event.get("cat") == "F" or event["name"].startswith("F(") for event in trace["traceEvents"]) >= 800
    assert trace["displayTimeUnit"] == "ms"
    assert b"demo" in content(files.open("timeline.svg"))


def test_a_full_disk_is_said(folder, monkeypatch):
    def full(**_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncpipe.service.jobs.artifacts.TemporaryFile", full)
    with pytest.raises(ArtifactError, match=r"losses\.csv cannot be read: No space left"):
        JobFiles(folder, has_losses=True).open("losses.csv")
