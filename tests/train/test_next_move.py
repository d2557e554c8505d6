"""What a run does that has lost workers: the table of ``next_move``."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpipe.errors import EdgeError, HangError, TaskError, WorkerLostError
from asyncpipe.train.job_file import FaultTable
from asyncpipe.train.next_move import Loss, Losses, MoveKind, loss_of, next_move

UNITS = frozenset("abc")
WORKER = Loss(("b",), "worker 'b' was killed")
CUT = Loss(("a", "b"), "a hears nothing of b", {"a": 1, "b": 1})
SURE = CUT._replace(cut_off="a")
GO_ON, LOOK, GIVE_UP = MoveKind.GO_ON, MoveKind.LOOK_AGAIN, MoveKind.GIVE_UP
B = {"b": "no route"}


@pytest.mark.parametrize(
    ("loss", "losses", "given", "kind", "gone", "text"),
    [
        # Workers
        (WORKER, {"lost": 3}, {}, GIVE_UP, "", "gives up after 3 losses without a new snapshot between: worker 'b'"),
        (WORKER, {"lost": 2}, {}, GO_ON, "", ""),
        (WORKER, {"lost": 1, "gone": "b"}, {}, GO_ON, "", ""),
        (WORKER, {"lost": 1, "gone": "b"}, {"missing": B}, GO_ON, "b", ""),
        (WORKER, {"lost": 1}, {"missing": B}, LOOK, "", "waits for b, up to 60 s: no route"),
        (WORKER, {"lost": 1}, {"missing": B, "now": 60}, GIVE_UP, "", "has waited 60 s for a replacement: no route"),
        (WORKER, {"lost": 1}, {"missing": B, "now": 60, "how": "split"}, GO_ON, "b", "b did not come back within 60 s"),
        (WORKER, {"lost": 1}, {"missing": B, "now": 60, "how": "split", "usable": "b"}, GIVE_UP, "", "has waited"),
        # A connection between workers that are up
        (CUT, {"breaks": 1}, {}, GO_ON, "", ""),
        (CUT, {"breaks": 2}, {}, GO_ON, "", "waits for the connection, up to 60 s: a hears nothing"),
        (CUT, {"breaks": 2}, {"now": 60}, GIVE_UP, "", "has waited 60 s for their connection"),
        (
            CUT,
            {"breaks": 2, "broken": {"a": 3, "b": 2}},
            {"now": 60, "how": "split"},
            GO_ON,
            "a",
            "a cannot be reached",
        ),
        (CUT, {"breaks": 2, "broken": {"a": 2, "b": 2}, "gone": "a"}, {"now": 60, "how": "split"}, GO_ON, "b", "b can"),
        (CUT, {"breaks": 2, "broken": {"a": 2}}, {"now": 60, "how": "split", "usable": "a"}, GIVE_UP, "", "has waited"),
        (SURE, {"breaks": 1}, {}, GO_ON, "", ""),
        (WORKER, {"lost": 1}, {"missing": B, "how": "shrink"}, GO_ON, "b", "b did not come back within 0 s"),
        (SURE, {"breaks": 1, "broken": {"b": 9}}, {"now": 60, "how": "split"}, GO_ON, "a", "a cannot be"),
        (SURE, {"breaks": 1}, {"now": 60}, GIVE_UP, "", "has waited"),
    ],
)
def test_the_table(loss, losses, given, kind, gone, text):
    faults = FaultTable(lost_host=given.pop("how", "wait"), snapshot_retries=2, wait_seconds=60.0)
    before = Losses(**{"broken": loss.broken, **losses, "gone": frozenset(losses.get("gone", ""))})
    usable = frozenset(given.pop("usable", UNITS))
    move = next_move(loss, before, faults, usable=usable, **{"now": 1.0, **given})
    assert (move.kind, move.gone) == (kind, frozenset(gone))
    assert move.text.startswith(text) if text else not move.text


def test_pauses_grow_and_end_with_the_time():
    def pause(loss: Loss, now: float = 0.0, looks: int = 0, **losses: Any) -> float:
        faults = FaultTable(wait_seconds=60.0)
        return next_move(loss, Losses(**losses), faults, usable=UNITS, missing=B, looks=looks, now=now).seconds

    assert [pause(WORKER, looks=looks) for looks in (0, 1, 4, 5, 99)] == [0.2, 0.4, 3.2, 5, 5]
    assert [pause(CUT, breaks=breaks) for breaks in (2, 3, 99)] == pytest.approx([0.4, 0.6, 5])
    assert pause(WORKER, 59.5, looks=9) == pause(CUT, 59.5, breaks=9) == 0.5


def test_losses_count_since_the_last_snapshot():
    once = Losses(frozenset("c")).and_(WORKER, has_saved=False, now=1.0)
    assert (once.lost, once.since) == (1, 1.0)
    twice = once.and_(WORKER, has_saved=False, now=2.0)
    assert (twice.lost, twice.since) == (2, 2.0)
    assert twice.and_(WORKER, has_saved=True, now=3.0) == Losses(frozenset("c"), lost=1, since=3.0)

    cut = twice.and_(CUT, has_saved=False, now=3.0).and_(SURE, has_saved=False, now=4.0)
    assert (cut.lost, cut.breaks, cut.broken, cut.since) == (2, 2, {"a": 2, "b": 2}, 3.0)
    assert cut.and_(CUT, has_saved=True, now=5.0) == Losses(frozenset("c"), 0, 1, {"a": 1, "b": 1}, 5.0)


def test_what_an_error_says_is_lost():
    worker = WorkerLostError("host/w", "was killed", stderr="a long story")
    assert loss_of(worker).units == ("host",)
    assert "story" not in loss_of(worker).how
    edge = EdgeError("it broke", edge=("a", "b"))
    assert loss_of(edge) == Loss(("a", "b"), "it broke", {"a": 1, "b": 1})
    assert loss_of(EdgeError("it broke")).units == ("a connection",)
    assert loss_of(ValueError("else")) is None
    assert loss_of(HangError("hangs", "computing", worker="a")) is None
    hang = HangError("hangs", "waiting for an edge", worker="a", peer="host/b", cut_off="host/b")
    assert loss_of(hang) == Loss(("a", "host"), "hangs", {"a": 1, "host": 1}, "host")
    assert loss_of(TaskError("F(0,0)", "F", 0, 0, "cpu:0", hang)) == loss_of(hang)
