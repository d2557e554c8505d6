"""The benchmark of a service with very many jobs, with few."""

from __future__ import annotations

import pytest

from benchmarks import service


@pytest.mark.long
def test_every_figure_is_taken_and_shown() -> None:
    said: list[str] = []
    figures = service.run(said.append, ended=120, queued=60, running=4)
    rows = {row["what"]: row["p50"] for row in figures["rows"]}
    assert {f"list, {each}" for each in service.LISTS} <= rows.keys()
    assert all(value > 0 for value in rows.values())
    assert [row["clients"] for row in figures["commits"]] == [1, 8, 64]
    assert "submit, one client" in service.show(figures)
    assert said
