"""Snapshots that fail: told, counted, nothing torn is left behind, and nobody else's is touched."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import Part, make_job, names

import asyncpipe.whole_folder as module
from asyncpipe.errors import JobFileError
from asyncpipe.ops.model import state_files
from asyncpipe.train.snapshots.resume import open_folder
from asyncpipe.train.snapshots.writer import SnapshotWriter
from asyncpipe.train.training_run import TrainingRun

pytestmark = pytest.mark.usefixtures("no_leaks")


class Listener:
    """Counts."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []
        self.failed = 0

    def snapshot_taken(self, seconds: float, at: float) -> None:
        self.taken.append((seconds, at))

    def snapshot_failed(self) -> None:
        self.failed += 1

    def observer_failed(self, reason: str) -> None:
        assert reason == "snapshot"


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path):
    for name in ("step-7.incomplete", "step-12.incomplete", "step-x.incomplete", "step-7.incomplete.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_bytes(b"half")
    open_folder(make_job(tmp_path))
    assert names(tmp_path) == ["step-7.incomplete.old", "step-x.incomplete"]


async def test_a_run_does_not_begin_where_another_ones_snapshots_are(tmp_path):
    for name in ("step-9", "step-10", "step-11.incomplete"):
        (tmp_path / name).mkdir()
    message = r"job\.toml: snapshots\.folder: .* holds snapshots of another run, up to step-10; .*or go on .*--resume"
    with pytest.raises(JobFileError, match=message):
        await TrainingRun(make_job(tmp_path, snapshots={"resume": False}), lambda: pytest.fail("built")).run()
    assert names(tmp_path) == ["step-10", "step-11.incomplete", "step-9"]


@pytest.mark.parametrize("below", [".", "below"])
def test_a_folder_that_cannot_be_used_is_told(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(JobFileError, match=r"job\.toml: snapshots\.folder: cannot use .*file.*: "):
        open_folder(make_job(tmp_path / "file" / below))


def full_after(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A disk with room for ``limit`` more bytes in each of our files."""
    real = state_files.FileIO.write

    class Full(state_files.FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell() + len(data) <= limit:
                return real(self, data)
            real(self, data[: max(limit - self.tell(), 0)])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state_files, "FileIO", Full)


def failing(number: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


FAULTS = {
    "full at once": lambda patch: full_after(patch, 0),
    "full half way": lambda patch: full_after(patch, 30_000),
    "input/output error": lambda patch: patch.setattr(module.os, "fsync", failing(errno.EIO)),
    "rename": lambda patch: patch.setattr(Path, "rename", failing(errno.EACCES)),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_snapshot_that_cannot_be_written_is_told_counted_and_leaves_nothing(
    tmp_path, monkeypatch, caplog, fault
):
    listener = Listener()
    states = {"model": Part(weight=torch.ones(5000)), "optimizer": Part(moment=torch.zeros(500, 100))}
    async with SnapshotWriter(make_job(tmp_path), listener) as snapshots:
        with monkeypatch.context() as patch:
            FAULTS[fault](patch)
            await snapshots.after_step(1, states)
            await snapshots.finish()
        assert (names(tmp_path), snapshots.last) == ([], None)
        await snapshots.after_step(2, states)
    assert (names(tmp_path), snapshots.last) == (["step-2"], tmp_path / "step-2")
    assert (len(listener.taken), listener.failed) == (1, 1)
    (record,) = caplog.records
    wanted = {"input/output error": errno.EIO, "rename": errno.EACCES}.get(fault, errno.ENOSPC)
    assert record.getMessage() == f"no snapshot of step 1 in {tmp_path}: {os.strerror(wanted)}"
    assert record.levelno == logging.ERROR


async def test_a_state_that_cannot_be_had_is_told_and_counted(tmp_path, caplog):
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("moment")

    listener = Listener()
    async with SnapshotWriter(make_job(tmp_path), listener) as snapshots:
        await snapshots.after_step(1, {"part": Broken()})
    assert (names(tmp_path), listener.failed) == ([], 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"no snapshot of step 1 in {tmp_path}: KeyError: 'moment'"
    ]


async def test_a_snapshot_of_that_name_is_not_replaced(tmp_path, caplog):
    listener = Listener()
    async with SnapshotWriter(make_job(tmp_path), listener) as snapshots:
        for name in ("step-1", "step-2.incomplete"):  # Another process is at work here, against the rules.
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.pt").write_bytes(b"theirs")
        for step in (1, 2):
            await snapshots.after_step(step, {"part": Part()})
            await snapshots.finish()
    assert names(tmp_path) == ["step-1", "step-2.incomplete"]
    assert {path.read_bytes() for path in tmp_path.glob("*/*")} == {b"theirs"}
    assert listener.failed == 2
    assert all(re.match(r"no snapshot of step [12] in ", record.getMessage()) for record in caplog.records)


async def test_an_old_one_that_cannot_be_removed_does_not_look_whole(tmp_path, monkeypatch, caplog):
    def rmtree(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module.shutil, "rmtree", rmtree)
    listener = Listener()
    async with SnapshotWriter(make_job(tmp_path, snapshots={"keep": 1}), listener) as snapshots:
        for step in (1, 2):
            await snapshots.after_step(step, {"part": Part()})
            await snapshots.finish()
    assert names(tmp_path) == ["step-1.incomplete", "step-2"]
    assert [record.getMessage() for record in caplog.records] == [
        f"the old snapshot {tmp_path / 'step-1'} was not removed: Permission denied"
    ]
    assert (len(listener.taken), listener.failed) == (2, 0)
