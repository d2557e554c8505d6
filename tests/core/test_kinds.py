"""The table of task kinds: complete, without doubles, and plain letters to everything outside."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from asyncpipe.core.kinds import COMPUTE_KINDS, SCHEDULED_KINDS, TaskKind


@pytest.mark.parametrize("column", ["value", "word", "colour", "ansi_colour", "trace_colour"])
def test_every_kind_has_a_name_and_colours_of_its_own(column: str) -> None:
    values = [getattr(kind, column) for kind in TaskKind]
    assert len(set(values)) == len(TaskKind)
    assert all(values)


def test_letters_and_colours_are_what_formats_ask_for() -> None:
    for kind in TaskKind:
        assert re.fullmatch("[A-Z]", kind.value)
        assert re.fullmatch("#[0-9a-f]{6}", kind.colour)
        assert 16 <= kind.ansi_colour <= 255


def test_a_kind_is_its_letter() -> None:
    for kind in TaskKind:
        assert pickle.loads(pickle.dumps(kind)) is kind is TaskKind(kind.value)
        assert (str(kind), json.dumps(kind)) == (kind.value, f'"{kind.value}"')


def test_kinds_that_schedules_name_compute() -> None:
    assert [kind for kind in TaskKind if kind in SCHEDULED_KINDS] == list(SCHEDULED_KINDS)
    assert set(SCHEDULED_KINDS) == set(COMPUTE_KINDS) - {TaskKind.RECOMPUTE}
