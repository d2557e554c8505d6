"""Tracebacks as an engineer expects them, and root lines: one failure is one group, two bugs are two."""

from __future__ import annotations

import re
import traceback
from functools import partial
from pathlib import Path
from traceback import FrameSummary

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asyncpipe
from asyncpipe.errors import RemoteError, TaskError
from asyncpipe.runtime.thread_calls import call_for_future
from asyncpipe.service.jobs.failure_texts import full_traceback, root_line

HERE = Path(__file__).name


def broken(text: str) -> None:
    raise KeyError(text)


def other(text: str) -> None:
    raise KeyError(text)


def raised(function, *arguments):
    """What ``function`` raises, as a task that has failed."""
    try:
        call_for_future(partial(function, *arguments))
    except Exception as error:  # noqa: BLE001 - whatever it is
        return TaskError("F(0,1)", "F", 0, 1, "cpu:0", error)


def test_a_traceback_is_in_the_usual_order_with_all_causes_and_frames_of_asyncpipe_in_a_row_are_folded():
    failed = raised(broken, "a")
    text = full_traceback(failed)
    assert text.index("in broken\n    raise KeyError(text)") < text.index("KeyError: 'a'\n\nThe above exception was")
    assert text.endswith(f"asyncpipe.errors.TaskError: {failed}\n")
    assert "in call_for_future" in text
    frames = traceback.extract_tb(failed.__cause__.__traceback__)
    ours = [frame for frame in frames if "thread_calls" in frame.filename]
    many = "".join(traceback.StackSummary.from_list([*ours * 3, frames[-1], *ours * 2]).format())
    folded = full_traceback(RemoteError("w", f"Traceback (most recent call last):\n{many}KeyError: 'a'\n"))
    assert re.findall("… .*", folded) == ["… 3 frames of asyncpipe", "… 2 frames of asyncpipe"]
    assert folded.count("in broken\n") == 1
    assert "in call_for_future" not in folded


def roots(*errors):
    return [root_line(full_traceback(error)) for error in errors]


def test_the_same_failure_is_one_group_and_two_bugs_are_two():
    a, b, c = roots(raised(broken, "no column 7"), raised(broken, "no column 12"), raised(other, "no column 7"))
    assert a == b == f"KeyError: 'no column N' ({HERE}:{broken.__code__.co_firstlineno + 1} in broken)"
    assert a != c
    assert roots(raised(broken, "no row 7"))[0] != a


def test_the_root_is_the_first_error_also_of_another_process_and_of_a_library():
    local = raised(broken, "x")
    remote = ValueError("in the worker")
    remote.__cause__ = RemoteError("job 1", "".join(traceback.format_exception(local.__cause__)))
    assert roots(remote) == roots(local)
    frames = [(f"{Path(asyncpipe.__file__).parent}/ops/a.py", 1, "call"), (torch.nn.__file__, 2, "forward")]
    stack = "".join(traceback.StackSummary.from_list([FrameSummary(*frame) for frame in frames]).format())
    text = f"Traceback (most recent call last):\n{stack}RuntimeError: shapes (3x4 and 2x1)\n"
    assert root_line(text) == "RuntimeError: shapes (NxN and NxN) (__init__.py:2 in forward)"
    assert roots(ValueError("without a frame, at 0x7f")) == ["ValueError: without a frame, at N"]


def test_the_root_of_a_crash_has_the_innermost_own_frame():
    stack = 'File "/srv/job/model.py", line 3 in forward\n  File "/srv/job/train.py", line 9 in <module>\n'
    text = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n  {stack}"
    assert root_line(text, "its process was killed by SIGSEGV") == (
        "its process was killed by SIGSEGV (model.py:3 in forward)"
    )
    assert root_line("", "no snapshot of step 12") == "no snapshot of step N"


WORDS = st.lists(st.sampled_from("shape of the data is wrong: expected got in file at".split()), min_size=1, max_size=8)
VALUES = st.one_of(
    st.integers().map(str),
    st.floats(0, 1e30).map(repr),
    st.integers(0, 2**64).map(hex),
    st.uuids().map(lambda each: f"id{each.hex}9"),
)
FOLDERS = st.lists(st.from_regex(r"[a-z0-9_.-]{1,12}", fullmatch=True), min_size=1, max_size=4).map("/".join)


@given(WORDS, st.lists(VALUES, min_size=8, max_size=8), st.lists(VALUES, min_size=8, max_size=8), FOLDERS, FOLDERS)
def test_messages_that_differ_in_values_and_folders_have_one_root(words, values, others, folder, other):
    def message(values, folder):
        return (
            "ValueError: "
            + " ".join(f"{word} {value}" for word, value in zip(words, values, strict=False))
            + f" /{folder}/x.bin"
        )

    assert root_line(message(values, folder)) == root_line(message(others, other))


@given(WORDS, WORDS)
def test_messages_that_differ_in_words_have_two(words, others):
    same = root_line(f"ValueError: {' '.join(words)}") == root_line(f"ValueError: {' '.join(others)}")
    assert same == (words == others)


@pytest.mark.parametrize("text", ["", "\n", "Traceback (most recent call last):\n", "x" * 10_000])
def test_whatever_the_text_is_there_is_a_short_root(text):
    assert len(root_line(text)) <= 300
    assert len(root_line(text, text)) <= 300
