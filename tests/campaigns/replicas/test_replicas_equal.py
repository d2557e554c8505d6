"""The short form of the campaign of replicas, and that it sees parts in another order."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from asyncpipe.core.graph.rows import Rows
from tests.campaigns.replicas.campaign import judge_all
from tests.campaigns.replicas.cases import TABLE, draw

pytestmark = pytest.mark.timeout(120)


def outcomes(cases):
    return [verdict.outcome for verdict in judge_all(cases)]


def test_some_of_the_table_and_random_cases_are_right(no_leaks):
    assert set(outcomes([*TABLE[5::109], *map(draw, range(2))])) <= {"equal", "close"}


def test_parts_in_another_order_are_seen(no_leaks):
    case = next(case for case in TABLE if case.replicas == 3 and case.schedule == "1f1b" and case.way == "plain")
    backwards = patch.object(Rows, "replicas", lambda rows, stage: _replicas(rows, stage)[::-1])
    with backwards:
        assert outcomes([replace(case, updates=(True,) * 4)]) == ["wrong"]


_replicas = Rows.replicas
