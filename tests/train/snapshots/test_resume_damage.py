"""Snapshots that are not as they were written: found out, told in a line, and the one before is used."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_helpers import make_job, make_workload, names

from asyncpipe.errors import AsyncpipeError, JobFileError, OptionError
from asyncpipe.ops.model.state_files import write_state
from asyncpipe.service.jobs.run_outcome import is_permanent
from asyncpipe.train.snapshots import format as snapshot_files
from asyncpipe.train.snapshots.format import FolderError, Manifest, read_manifest, read_snapshot, write_snapshot
from asyncpipe.train.snapshots.resume import newest_snapshot, open_folder
from asyncpipe.train.training_run import TrainingRun

pytestmark = pytest.mark.usefixtures("no_leaks", "snapshot_each_step")


def make_snapshots(folder: Path, *steps: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    states = {"model": {"weight": torch.ones(500)}, "optimizer": {"moment": torch.zeros(10)}, "run": {"step": 0}}
    return [write_snapshot(folder / f"step-{step}", states, Manifest(job="linear", step=step)) for step in steps]


def rewrite(snapshot: Path, **changes: Any) -> None:
    """Change what it says of itself, with the checksum that belongs to that."""
    about = json.loads((snapshot / "snapshot.json").read_text())
    del about["checksum"]
    about |= changes
    about["checksum"] = snapshot_files.manifest_checksum(about)
    (snapshot / "snapshot.json").write_text(json.dumps(about))


def replace(snapshot: Path, name: str, content: bytes) -> None:
    """By a file that has the right sum."""
    (snapshot / name).write_bytes(content)
    about = json.loads((snapshot / "snapshot.json").read_text())
    rewrite(snapshot, sha256=about["sha256"] | {name: hashlib.sha256(content).hexdigest()})


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


class Malicious:
    """Makes a folder when it is loaded by what executes pickles."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.made),)


def malicious(snapshot: Path, *, zipped: bool, name: str = "model.pt") -> None:
    if zipped:
        torch.save({"weight": Malicious(snapshot.parent / "executed")}, snapshot / "new.pt")
        content = (snapshot / "new.pt").read_bytes()
        (snapshot / "new.pt").unlink()
    else:
        content = pickle.dumps(Malicious(snapshot.parent / "executed"))
    replace(snapshot, name, content)


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zip_of_nothing(snapshot: Path) -> bytes:
    with zipfile.ZipFile(snapshot / "new.zip", "w") as file:
        file.writestr("a/b", b"c")
    content = (snapshot / "new.zip").read_bytes()
    (snapshot / "new.zip").unlink()
    return content


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda path: torn(path / "model.pt"), "model.pt is damaged"),
    "empty": (lambda path: os.truncate(path / "optimizer.pt", 0), "optimizer.pt is damaged"),
    "a flipped bit": (lambda path: flip(path / "model.pt", 1000), "model.pt is damaged"),
    "no model": (lambda path: (path / "model.pt").unlink(), "model.pt cannot be read: No such file"),
    "a folder for a model": (
        lambda path: ((path / "run.pt").unlink(), (path / "run.pt").mkdir()),
        "run.pt cannot be read: Is a dir",
    ),
    "empty folder": (lambda path: (shutil.rmtree(path), path.mkdir()), "snapshot.json cannot be read: No such file"),
    "a file": (lambda path: (shutil.rmtree(path), path.touch()), "snapshot.json cannot be read: Not a directory"),
    "torn JSON": (lambda path: torn(path / "snapshot.json"), "snapshot.json is damaged: JSONDecodeError"),
    "no text": (
        lambda path: (path / "snapshot.json").write_bytes(b'{"\xff"}'),
        "snapshot.json is damaged: UnicodeDecodeError",
    ),
    "deep JSON": (
        lambda path: (path / "snapshot.json").write_text("[" * 100_000),
        "snapshot.json is damaged: RecursionError",
    ),
    "JSON of something else": (lambda path: (path / "snapshot.json").write_text("[3]"), "does not match its checksum"),
    "another step in the JSON": (
        lambda path: (path / "snapshot.json").write_text(
            (path / "snapshot.json").read_text().replace('"step": 3', '"step": 9')
        ),
        "does not match its checksum",
    ),
    "a newer format": (
        lambda path: rewrite(path, format=3),
        "is written in format 3, this version of asyncpipe reads formats 1 and 2",
    ),
    "another snapshot's": (lambda path: rewrite(path, step=7), "is the snapshot of step 7"),
    "no step": (lambda path: rewrite(path, step=None), "does not describe a snapshot"),
    "a file elsewhere": (lambda path: rewrite(path, sha256={"../model.pt": ""}), "does not describe a snapshot"),
    "a state less": (lambda path: rewrite(path, sha256={}), "has no model.pt, optimizer.pt, run.pt"),
    "malicious": (lambda path: malicious(path, zipped=True), "model.pt is refused: it holds more than tensors and"),
    "malicious pickle": (lambda path: malicious(path, zipped=False), "model.pt is refused"),
    "no archive": (lambda path: replace(path, "model.pt", b"PK\x03\x04nonsense"), "model.pt is"),
    "another archive": (
        lambda path: replace(path, "model.pt", zip_of_nothing(path)),
        "model.pt is no file of torch.save",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_told_and_the_one_before_it_is_used(tmp_path, caplog, damage):
    newest = make_snapshots(tmp_path, 2, 3)[-1]
    do, told = DAMAGES[damage]
    do(newest)
    resumed = open_folder(make_job(tmp_path))
    assert resumed is not None
    assert (resumed.path, resumed.step) == (tmp_path / "step-2", 2)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"a snapshot cannot be used, the one before it is tried: {newest}: ")
    assert told in message
    assert (record.levelno, "\n" in message, record.exc_info) == (logging.WARNING, False, None)
    assert names(tmp_path) == ["step-2", "step-3.unusable"]


def make_by_stage(folder: Path, *steps: int) -> list[Path]:
    """As ``make_snapshots``, of two stages that were in workers."""

    def write(into: Path) -> dict[str, str]:
        files: dict[str, Any] = {"optimizer-0.pt": {"weight": {"moment": torch.zeros(10)}}, "optimizer-1.pt": {}}
        for stage, name in enumerate(("weight", "bias")):
            files[f"model-{stage}.pt"] = state = OrderedDict({name: torch.ones(500)})
            state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        return {name: write_state(into / name, state) for name, state in files.items()}

    states = {"optimizer": {"state": {}, "param_groups": [], "names": ["bias", "weight"]}, "run": {"step": 0}}
    return [write_snapshot(folder / f"step-{step}", states, Manifest(job="linear", step=step), write) for step in steps]


STAGE_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a stage less": (lambda path: (path / "model-1.pt").unlink(), "model-1.pt cannot be read: No such file"),
    "a flipped bit": (lambda path: flip(path / "optimizer-0.pt", 300), "optimizer-0.pt is damaged"),
    "of another model": (
        lambda path: replace(path, "optimizer.pt", (path / "run.pt").read_bytes()),
        "the files of its stages do not belong together",
    ),
    "malicious": (lambda path: malicious(path, zipped=True, name="model-1.pt"), "model-1.pt is refused"),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("damage", STAGE_DAMAGES)
def test_a_damaged_file_of_a_stage_is_told_and_the_snapshot_before_is_used(tmp_path, caplog, damage, mapped):
    newest = make_by_stage(tmp_path, 2, 3)[-1]
    do, told = STAGE_DAMAGES[damage]
    do(newest)
    resumed = open_folder(make_job(tmp_path), mapped=mapped)
    assert resumed is not None
    assert resumed.step == 2
    assert told in caplog.records[0].getMessage()
    assert list(resumed.states["model"]) == ["weight", "bias"]
    assert (resumed.states["model"]._metadata, resumed.states["optimizer"].keys()) == (
        {"": {"version": 1}},
        {"state", "param_groups"},
    )
    assert list(resumed.states["optimizer"]["state"]) == [1]
    assert [path.name for path in resumed.files("optimizer")] == ["optimizer.pt", "optimizer-0.pt", "optimizer-1.pt"]


def test_a_pickle_in_a_snapshot_would_have_been_executed_by_others(tmp_path):
    (newest,) = make_snapshots(tmp_path, 3)
    malicious(newest, zipped=True)
    with pytest.raises(OptionError, match="refused"):
        read_snapshot(newest)
    assert not (tmp_path / "executed").exists()
    torch.load(newest / "model.pt", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_no_byte_of_what_it_says_can_change_unseen(tmp_path):
    (snapshot,) = make_snapshots(tmp_path, 3)
    path = snapshot / "snapshot.json"
    content, about = path.read_bytes(), read_manifest(snapshot)
    for position in range(len(content)):
        flip(path, position)
        try:
            seen = read_manifest(snapshot)
        except OptionError:
            pass
        else:  # White space.
            assert seen == about, position
        path.write_bytes(content)


def test_no_byte_of_a_state_can_change_unseen(tmp_path):
    (snapshot,) = make_snapshots(tmp_path, 3)
    size = (snapshot / "run.pt").stat().st_size
    for position in range(0, size, 7):
        flip(snapshot / "run.pt", position)
        with pytest.raises(OptionError, match=r"run\.pt is damaged"):
            read_snapshot(snapshot)
        flip(snapshot / "run.pt", position)
    assert read_snapshot(snapshot).states["run"] == {"step": 0}


def test_where_none_can_be_used_the_run_does_not_begin(tmp_path, caplog):
    for snapshot in make_snapshots(tmp_path, 1, 2):
        torn(snapshot / "model.pt")
    message = (
        r"job\.toml: snapshots\.folder: none of the snapshots in .* can be used; the newest: .*step-2: model\.pt is"
    )
    with pytest.raises(JobFileError, match=message):
        open_folder(make_job(tmp_path))
    assert len(caplog.records) == 2
    assert names(tmp_path) == ["step-1", "step-2"]


def test_where_there_is_none_the_run_begins_afresh(tmp_path):
    (tmp_path / "step-1.incomplete").mkdir()
    (tmp_path / "notes.txt").touch()
    assert open_folder(make_job(tmp_path)) is None
    assert newest_snapshot(tmp_path) is None
    assert open_folder(make_job(tmp_path / "new")) is None
    assert names(tmp_path) == ["new", "notes.txt"]


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    make_snapshots(tmp_path, 9, 10, 100)
    for name in ("step-200.incomplete", "step-300.unusable", "step-0400", "other"):
        shutil.copytree(tmp_path / "step-9", tmp_path / name)
    snapshot = newest_snapshot(tmp_path)
    assert snapshot is not None
    assert snapshot.step == 100


def test_an_older_one_set_aside_gives_way(tmp_path):
    (tmp_path / "step-3.unusable").mkdir()
    (tmp_path / "step-3.unusable" / "old").touch()
    torn(make_snapshots(tmp_path, 2, 3)[-1] / "run.pt")
    open_folder(make_job(tmp_path))
    assert names(tmp_path / "step-3.unusable") == ["model.pt", "optimizer.pt", "run.pt", "snapshot.json"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may read every file")
def test_a_file_that_may_not_be_read_is_told(tmp_path):
    (newest,) = make_snapshots(tmp_path, 3)
    (newest / "model.pt").chmod(0)
    with pytest.raises(OptionError, match=r"model\.pt cannot be read: Permission denied"):
        read_snapshot(newest)


async def test_the_step_that_was_damaged_is_done_and_saved_again(tmp_path, caplog):
    await TrainingRun(make_job(tmp_path, training={"steps": 3}), make_workload).run()
    wanted = read_snapshot(tmp_path / "step-3").states["model"]
    flip(tmp_path / "step-3" / "model.pt", 500)
    summary = await TrainingRun(make_job(tmp_path, training={"steps": 3}), make_workload).run()
    assert (summary.steps, summary.snapshot) == (3, tmp_path / "step-3")
    again = read_snapshot(tmp_path / "step-3")
    assert again.manifest.number == 3
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.states["model"].items())
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-3.unusable"]
    assert len(caplog.records) == 1


# What may pass


def breaking(monkeypatch: pytest.MonkeyPatch, what: str, number: int, where: Path) -> None:
    """Let the system fail with ``number`` where ``where`` is made, listed or read."""

    def broken(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if path == where:
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **options)

        return call

    owner: Any = torch if what == "load" else Path
    monkeypatch.setattr(owner, what, broken(getattr(owner, what)))


@pytest.mark.parametrize(("what", "number"), [("mkdir", errno.ENOSPC), ("mkdir", errno.EIO), ("iterdir", errno.EMFILE)])
def test_a_folder_that_cannot_be_used_now_may_be_another_time(tmp_path, monkeypatch, what, number):
    breaking(monkeypatch, what, number, tmp_path)
    with pytest.raises(FolderError) as caught:
        open_folder(make_job(tmp_path))
    assert str(caught.value) == f"job.toml: snapshots.folder: cannot use {tmp_path}: {os.strerror(number)}"
    assert isinstance(caught.value, AsyncpipeError)
    assert not is_permanent(caught.value)


READINGS = [("open", "snapshot.json"), ("open", "model.pt"), ("load", "model.pt")]


@pytest.mark.parametrize(("what", "name"), READINGS)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ESTALE])
def test_a_snapshot_that_cannot_be_read_now_is_left_for_another_time(tmp_path, monkeypatch, caplog, what, name, number):
    newest = make_snapshots(tmp_path, 2, 3)[-1]
    with monkeypatch.context() as patched:
        breaking(patched, what, number, newest / name)
        with pytest.raises(FolderError) as caught:
            open_folder(make_job(tmp_path))
    problem = f"{newest}: {name} cannot be read: {os.strerror(number)}"
    assert str(caught.value) == f"job.toml: snapshots.folder: {problem}"
    assert not is_permanent(caught.value)
    assert (names(tmp_path), caplog.records) == (["step-2", "step-3"], [])
    resumed = open_folder(make_job(tmp_path))
    assert resumed is not None
    assert resumed.step == 3


def test_an_older_one_that_cannot_be_read_now_is_not_taken_for_one_to_remove(tmp_path, monkeypatch):
    older = make_snapshots(tmp_path, 2, 3)[0]
    breaking(monkeypatch, "open", errno.EMFILE, older / "snapshot.json")
    with pytest.raises(FolderError, match=r"step-2: snapshot\.json cannot be read"):
        open_folder(make_job(tmp_path))


@pytest.mark.parametrize(("what", "name"), READINGS)
def test_a_disk_that_fails_has_damaged_a_snapshot_where_there_is_an_older_one(
    tmp_path, monkeypatch, caplog, what, name
):
    newest = make_snapshots(tmp_path, 2, 3)[-1]
    breaking(monkeypatch, what, errno.EIO, newest / name)
    resumed = open_folder(make_job(tmp_path))
    assert resumed is not None
    assert resumed.step == 2
    assert names(tmp_path) == ["step-2", "step-3.unusable"]
    assert f"{name} cannot be read: {os.strerror(errno.EIO)}" in caplog.text


@pytest.mark.parametrize(("what", "name"), READINGS)
def test_a_disk_that_fails_with_the_only_snapshot_may_be_back_another_time(tmp_path, monkeypatch, what, name):
    damaged, newest = make_snapshots(tmp_path, 2, 3)
    torn(damaged / "model.pt")
    breaking(monkeypatch, what, errno.EIO, newest / name)
    with pytest.raises(FolderError, match=f"none of the snapshots in .* can be used; the newest: .*{name} cannot be"):
        open_folder(make_job(tmp_path))
    assert names(tmp_path) == ["step-2", "step-3"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST])
def test_names_and_rights_stay_as_they_are_until_somebody_changes_them(tmp_path, monkeypatch, number):
    breaking(monkeypatch, "mkdir", number, tmp_path)
    with pytest.raises(JobFileError, match=r"job\.toml: snapshots\.folder: cannot use "):
        open_folder(make_job(tmp_path))
