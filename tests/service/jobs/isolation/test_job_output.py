"""What a job's code prints and logs, as its process takes it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncpipe.service.jobs.isolation import job_output
from asyncpipe.service.jobs.isolation.job_output import JobOutput


@contextmanager
def taken() -> Iterator[list[tuple[int, str]]]:
    """What is told while the standard streams and the root logger are a job's."""
    root, streams = logging.getLogger(), (sys.stdout, sys.stderr)
    handlers, root.handlers[:] = root.handlers[:], []
    told: list[tuple[int, str]] = []
    output = JobOutput(lambda level, text: told.append((level, text)))
    try:
        yield told
        output.end()
    finally:
        sys.stdout, sys.stderr = streams
        root.handlers[:] = handlers


def test_lines_and_records_become_notes() -> None:
    with taken() as notes:
        print("a line", "and its end")
        print("half", end="", flush=True)
        print(" and half")
        print("", file=sys.stderr)
        print("\r10 %\r20 %", file=sys.stderr)
        logging.getLogger("theirs").error("%s of theirs", 1)
        logging.getLogger("asyncpipe.train").error("ours, for the service's log")
        print("no end", end="")
    lines = [(logging.INFO, line) for line in ("a line and its end", "half and half", "20 %", "no end")]
    assert notes == [*lines[:3], (logging.ERROR, "1 of theirs"), lines[3]]


@pytest.mark.parametrize("length", [1, 1000, 100_000])
def test_a_flood_is_cut_and_that_is_said(length: int) -> None:
    with taken() as notes:
        for _ in range(2000):
            print("x" * length)
        logging.getLogger("theirs").error("more")
    assert notes[-1] == (logging.WARNING, "the rest of its output is cut: a run shows 65536 characters")
    assert 1 <= len(notes) - 1 <= job_output.MOST_CHARACTERS / job_output.LEAST_CHARACTERS
    assert max(len(text) for _, text in notes) <= job_output.LONGEST_LINE


def test_a_child_of_a_job_prints_as_the_service_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with taken() as notes:
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: 0)
            print("no note")
        assert sys.stdout.encoding == "utf-8"
    assert notes == []
    assert capsys.readouterr().out == "no note\n"
