"""What a job's code prints and logs, as its process takes it."""

from __future__ import annotations

import logging
import os
import sys
from contextvars import copy_context

import pytest
from output_helpers import taken

from asyncpipe.service.jobs.run_log import Saying


class Said(Saying):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def say(self, stream: str, text: str) -> None:
        self.all.append((stream, text))


def test_whole_lines_and_records_are_said_with_their_streams() -> None:
    said = Said()
    with taken(said):
        print("a line", "and its end")
        print("half", end="", flush=True)
        sys.stdout.write(" and half\nand more\n")
        print("\r10 %\r20 %", file=sys.stderr)
        logging.getLogger("theirs").error("%s of theirs", 1)
        logging.getLogger("asyncpipe.train").error("ours, for the service's log")
        print("no end", end="")
        assert sys.stdout.encoding == "utf-8"
    assert said.all == [
        ("stdout", "a line and its end"),
        ("stdout", "half and half\nand more"),
        ("stderr", "20 %"),
        ("error", "theirs: 1 of theirs"),
        ("stdout", "no end"),
    ]


def test_in_a_process_of_several_jobs_each_context_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    jobs, contexts = (Said(), Said()), (copy_context(), copy_context())
    with taken(None):
        for job, context in zip(jobs, contexts, strict=True):
            context.run(Saying.here.set, job)
        for number, context in enumerate(contexts):
            context.run(print, "begun by", number, end="")
        print("nobody's")
        for context in contexts:
            context.run(print, ", and ended")
            context.run(logging.getLogger("theirs").warning, "logged")
    for number, job in enumerate(jobs):
        assert job.all == [("stdout", f"begun by {number}, and ended"), ("warning", "theirs: logged")]
    assert capsys.readouterr().out == "nobody's\n"


def test_a_program_without_standard_output_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    said = Said()
    with taken(said):
        print("nowhere")
        print("there", file=sys.stderr)
    assert said.all == [("stderr", "there")]


def test_a_child_of_a_job_prints_to_the_descriptor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Said()
    with taken(said), monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 0)
        print("not here")
    assert said.all == []
    assert capsys.readouterr().out == "not here\n"
