"""Cost models: costs of tasks, by hand; random factors have their mean, and are equal under every schedule."""

from __future__ import annotations

from math import inf, nan
from statistics import fmean, pstdev
from typing import Any

import pytest

from asyncpipe.core.graph.task import WHOLE_STEP, Lane, Queue, Task
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.costs import Costs, Jitter, StageCosts, parse_costs
from asyncpipe.errors import OptionError


def task(
    kind: str,
    stage: int = 0,
    microbatch: int = 0,
    source: int | None = None,
    number: int = 0,
    bucket: int | None = None,
) -> Task:
    return Task(number, TaskKind(kind), microbatch, stage, Lane("dev:0", Queue.COMPUTE), 0, source, bucket)


def rows(**given: Any) -> dict[TaskKind, Any]:
    return {TaskKind(kind): row for kind, row in given.items()}


# Costs from a command line


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("", Costs()),
        ("F=1,I=1,W=1,C=0", Costs()),
        ("F=2", Costs(forward=2)),
        (" F = 0.5 , C=1e-3,", Costs(forward=0.5, copy=1e-3)),
        ("I=3,W=4", Costs(input_gradient=3, weight_gradient=4)),
        ("B=5,R=0", Costs(backward=5, recompute=0)),
        ("A=5,G=2,U=1", Costs(reduce=5, gather=2, update=1)),
    ],
)
def test_costs_are_read_from_a_line(text: str, costs: Costs) -> None:
    assert parse_costs(text) == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F", "--costs takes KIND=NUMBER with the kinds F, R, B, I, W, C, O, L, U, A, G and N, got 'F'"),
        ("S=1", "--costs takes KIND=NUMBER with the kinds F, R, B, I, W, C, O, L, U, A, G and N, got 'S=1'"),
        ("F=1,B=two", "--costs takes KIND=NUMBER .*, got 'B=two'"),
        ("F=-1", "--costs must not be negative or infinite, got 'F=-1'"),
        ("F=nan", "--costs must not be negative or infinite, got 'F=nan'"),
        ("F=1,F=2", "--costs takes each kind once, got F again in 'F=2'"),
    ],
)
def test_a_wrong_line_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_costs(text)


# Costs by stage


def test_each_kind_costs_what_its_stage_says() -> None:
    costs = StageCosts(rows(F=[1, 2], R=[3, 4], I=[5, 6], W=[7, 8], B=[9, 10]), [0], update=[11, 12])
    for kind, row in {"F": (1, 2), "R": (3, 4), "I": (5, 6), "W": (7, 8), "B": (9, 10), "U": (11, 12)}.items():
        assert [costs(task(kind, stage)) for stage in (0, 1)] == list(row)
    assert costs(task("S", 1, WHOLE_STEP)) == 0


@pytest.mark.parametrize(("given", "kind"), [("F", "B"), ("FB", "I"), ("FB", "W"), ("FI", "B")])
def test_a_kind_of_which_nothing_is_known_has_no_cost(given: str, kind: str) -> None:
    costs = StageCosts(rows(**{key: [1, 1] for key in given}), [0])
    with pytest.raises(OptionError, match=rf"{kind}\(0,1\) has no cost: give the seconds of {kind} at each stage"):
        costs(task(kind, 1))


def test_a_copy_costs_its_latency_and_its_bytes_both_ways() -> None:
    costs = StageCosts(rows(F=[0, 0, 0], B=[0, 0, 0]), [100, 300], latency=0.5, bandwidth=200)
    assert costs(task("C", 1, source=0)) == 0.5 + 0.5
    assert costs(task("C", 0, source=1)) == 0.5 + 0.5
    assert costs(task("C", 2, source=1)) == 0.5 + 1.5
    assert costs(task("C", 2, source=0)) == 0.5 + 0.5, "a skip carries what its first stage sends"
    assert costs(task("C", 2, WHOLE_STEP, source=1)) == 0.5, "nobody measured the tied parameter"


def test_replicas_cost_the_same_and_reduce_what_comes_over_the_link() -> None:
    """Of a bucket of 300 bytes, two thirds come from the other replicas; A adds up all, and G copies all."""
    options: dict[str, Any] = {"update": [5, 6], "buckets": [[], [30, 300]], "rows": 3, "reducing": 100}
    costs = StageCosts(rows(F=[1, 2], B=[3, 4]), [100], latency=0.5, bandwidth=200, **options)
    for replica in range(3):
        stage = 1 + 2 * replica
        assert [costs(task(kind, stage)) for kind in "FBU"] == [2, 4, 6]
        assert costs(task("C", stage, source=stage - 1)) == 0.5 + 0.5
        assert costs(task("A", stage, WHOLE_STEP, bucket=1)) == 3 + 0.5 + 1
        assert costs(task("G", stage, WHOLE_STEP, bucket=1)) == 3 + 0.5 + 1
    assert costs.size(task("A", 1, WHOLE_STEP, bucket=1)) == 100
    measured = StageCosts(rows(F=[1, 2], A=[7, 8]), [100], **options)
    assert measured(task("A", 5, WHOLE_STEP, bucket=0)) == 8


@pytest.mark.parametrize(
    ("seconds", "options", "message"),
    [
        (rows(B=[1, 1]), {}, r"seconds takes rows for the kinds F \(always\), R, B, I, W, A, G and U, got B"),
        (rows(F=[1, 1], C=[1, 1]), {}, "got F, C"),
        (rows(F=[1, 1], B=[1]), {}, r"seconds of B must have 2 numbers, by stage, got 1: \[1\]"),
        (rows(F=[1, -1]), {}, "seconds of F must be finite and not negative, got -1"),
        (rows(F=[1, nan]), {}, "seconds of F must be finite and not negative, got nan"),
        (rows(F=[1, 1]), {"sent": []}, r"sent must have 1 numbers, by stage, got 0: \[\]"),
        (rows(F=[1, 1]), {"latency": -1}, "latency must be finite and not negative, got -1"),
        (rows(F=[1, 1]), {"bandwidth": 0}, "bandwidth must be more than 0 bytes per second, got 0"),
        (rows(F=[1, 1]), {"update": [1]}, r"update must have 2 numbers, by stage, got 1: \[1\]"),
    ],
)
def test_wrong_costs_are_refused(seconds: dict[TaskKind, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StageCosts(seconds, **{"sent": [0], **options})


# Jitter


def factors(sigma: float, seed: int = 0, count: int = 20_000) -> list[float]:
    jitter = Jitter(Costs(), sigma, seed)
    return [jitter.factor(task("F", i % 7, i // 7)) for i in range(count)]


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.6])
def test_factors_have_mean_1_and_the_deviation_asked_for(sigma: float) -> None:
    """Within five standard errors of what 20,000 independent factors give."""
    found = factors(sigma)
    assert fmean(found) == pytest.approx(1, abs=5 * sigma / 20_000**0.5)
    assert pstdev(found) == pytest.approx(sigma, rel=0.05)
    assert min(found) > 0


def test_a_seed_gives_these_factors_for_ever() -> None:
    """Written down, so that a change that gives other results for the same seed is noticed."""
    jitter = Jitter(Costs(), 0.3, 7)
    found = [jitter.factor(one) for one in (task("F"), task("B", 1, 2), task("C", 1, 0, 0))]
    assert found == pytest.approx([0.76883837322342, 0.9164588434867812, 0.6939606750621803], rel=1e-12)


def test_a_factor_for_each_micro_batch() -> None:
    jitter = Jitter(Costs(copy=1), 0.6, 3, per_microbatch=True)
    shared = [jitter.factor(one) for one in (task("F", 0, 4), task("B", 2, 4), task("C", 1, 4, 0))]
    assert len(set(shared)) == 1
    assert shared[0] not in (1.0, jitter.factor(task("F", 0, 5)))
    assert jitter.factor(task("U", 0, WHOLE_STEP)) == 1.0


@pytest.mark.parametrize("sigma", [-0.1, inf, nan])
def test_a_wrong_sigma_is_refused(sigma: float) -> None:
    with pytest.raises(OptionError, match="sigma must be finite and not negative"):
        Jitter(Costs(), sigma)
