"""The table of task kinds: complete, without doubles, and plain letters to everything outside."""

from __future__ import annotations

import json
import pickle

import pytest

from asyncpipe.core.kinds import TaskKind


@pytest.mark.parametrize("column", ["value", "word", "colour", "trace_colour"])
def test_every_kind_has_a_name_and_colours_of_its_own(column: str) -> None:
    values = [getattr(kind, column) for kind in TaskKind]
    assert len(set(values)) == len(TaskKind)
    assert all(values)


def test_a_kind_is_its_letter() -> None:
    for kind in TaskKind:
        assert pickle.loads(pickle.dumps(kind)) is kind is TaskKind(kind.value)
        assert (str(kind), json.dumps(kind)) == (kind.value, f'"{kind.value}"')
