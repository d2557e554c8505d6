"""What runs said: bounded, whole after a kill, and read from a place without gaps."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from asyncpipe.service.jobs import run_log
from asyncpipe.service.jobs.run_log import HEAD, KEPT_RUNS, TAIL, RunLog, last_said, place_of, read_said, runs_in


def texts(folder: Path, place: int = 0) -> list[str]:
    """All that is there from ``place`` on."""
    found, place = list[str](), place
    while (page := read_said(folder, place)).lines:
        assert page.next > place
        found += [line.text for line in page.lines]
        place = page.next
    return found


@pytest.mark.promise(
    "The service", "A job's log keeps every line of a killed process, and the beginning and end of a flood."
)
def test_lines_of_several_threads_and_processes_are_whole_and_in_order(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 3)

    def say(name: str) -> None:
        for index in range(200):
            log.say("stdout", f"{name} {index}\nand more")

    # A process that is killed between two lines has lost none.
    code = "import pickle, os, sys; log = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
    code += "for index in range(200): log.say('stderr', f'other {index}')\nos.kill(os.getpid(), 9)"
    child = subprocess.Popen([sys.executable, "-c", code, pickle.dumps(log).hex()])
    threads = [Thread(target=say, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert child.wait() == -9
    log.close()
    page = last_said(tmp_path, 3, 10_000)
    assert (page.run, runs_in(tmp_path)) == (3, [3])
    for name, stream in (("one", "stdout"), ("two", "stdout"), ("other", "stderr")):
        said = [line.text for line in page.lines if line.text.startswith(f"{name} ") and line.stream == stream]
        assert said == [f"{name} {index}" for index in range(200)]
    assert len(page.lines) == 5 * 200
    assert texts(tmp_path) == [line.text for line in page.lines]
    assert [line.text for line in last_said(tmp_path, 3, 2, "stderr").lines] == ["other 198", "other 199"]


@pytest.mark.promise(
    "The service", "A job's log keeps every line of a killed process, and the beginning and end of a flood."
)
@pytest.mark.parametrize("length", [10, 20_000])
def test_a_flood_keeps_its_beginning_and_its_end_and_says_what_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(run_log, "PART", 50_000)
    log = RunLog(tmp_path, 1)
    for index in range(20_000 if length == 10 else 100):
        log.say("stdout", f"{index:<{length}}")
        if index == 10:
            place = last_said(tmp_path, 1, 1).next
    log.close()
    files = list((tmp_path / "said").iterdir())
    assert len(files) == HEAD + TAIL
    assert sum(file.stat().st_size for file in files) < (HEAD + TAIL) * 50_000 + 20_000 * len(files)
    found = texts(tmp_path)
    assert found[0].strip() == "0"
    assert found[-1].strip() == str(index)
    cuts = [at for at, text in enumerate(found) if "MiB are cut here: a run keeps its first 5 MiB" in text]
    assert len(cuts) == 1
    numbers = [int(text) for text in found[: cuts[0]]], [int(text) for text in found[cuts[0] + 1 :]]
    assert all(each == list(range(each[0], each[-1] + 1)) for each in numbers)
    assert int(texts(tmp_path, place)[0]) == 11, "a reader that comes back misses nothing"
    assert "cut" in texts(tmp_path, place_of(1, HEAD + 1, 7))[0], "a reader whose place is gone is told so"


def test_a_disk_that_is_full_loses_lines_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = RunLog(tmp_path, 1), os.write

    def full(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2])

    log.say("stdout", "before")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log.say("stdout", "lost 1")
        patched.setattr(os, "write", lambda *_: os.open(tmp_path / "none" / "none", 0))
        log.say("stdout", "lost 2\nlost 3")
    log.say("stdout", "after")
    assert texts(tmp_path) == ["before", "3 lines are lost here: the disk was full", "after"]


def test_the_last_runs_of_a_job_are_kept(tmp_path: Path) -> None:
    for run in range(1, KEPT_RUNS + 3):
        log = RunLog(tmp_path, run)
        log.say("stdout", f"run {run}, password=hunter2")
        log.close()
    kept = list(range(3, KEPT_RUNS + 3))
    assert runs_in(tmp_path) == kept
    assert texts(tmp_path) == [f"run {run}, password=***" for run in kept]
    assert texts(tmp_path, place_of(5)) == [f"run {run}, password=***" for run in kept[2:]]
    assert [line.text for line in last_said(tmp_path, 4, 9).lines] == ["run 4, password=***"]
    assert read_said(tmp_path / "none", 7).lines == []
