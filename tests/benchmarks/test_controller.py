"""The benchmarks of controllers and of predictions for hosts: tiny forms run, and what they count is right."""

from __future__ import annotations

import json

import pytest
import torch

from asyncpipe.core.predict.topology import NetworkLink, Topology
from benchmarks import controller, prediction


def quiet(_: str) -> None:
    """Nobody wants to see the progress."""


def test_a_controller_is_measured_with_workers_that_answer_at_once() -> None:
    size = controller.ControllerSize(
        workers=(),
        light=(2,),
        stand_ins=(2, 3),
        microbatches=40,
        grown=(4,),
        tasks=1,
        opening=(4, 12),
        parts=(("1f1b", 8, 4),),
        whole_parts=(8,),
        fresh=False,
    )
    figures = json.loads(json.dumps(controller.run(quiet, size=size)))
    assert [(row["kind"], row["workers"], row["microbatches"]) for row in figures["rows"]] == [
        *(("light", 2, 40), ("stand-ins", 2, 40), ("stand-ins", 3, 40), ("stand-ins", 3, 160)),
    ]
    # F and B of every stage, C both ways between them, U.
    assert [row["tasks_a_step"] for row in figures["rows"]] == [242, 242, 403, 1603]
    assert all(row["observed_us"] > 0 for row in figures["rows"])
    once, grown = figures["rows"][2:]
    assert grown["journal_bytes"] == pytest.approx(4 * once["journal_bytes"], rel=0.1)
    few, many = (row["edge_bytes"] / row["workers"] for row in figures["opening"])
    assert many == pytest.approx(few, rel=0.3), "a worker is told of its own edges alone"
    assert [(row["whole"], row["tasks"]) for row in figures["parts"]] == [(False, 17), (True, 17)]
    assert len(controller.show(figures).splitlines()) == 25


def test_the_cases_grow_one_number_of_workers() -> None:
    cases = controller.ControllerSize(workers=(2, 3), light=(), stand_ins=(5,), microbatches=8).cases()
    assert [case[:3] for case in cases] == [
        *(("workers", 2, 8), ("workers", 3, 8), ("workers", 3, 16), ("workers", 3, 32), ("stand-ins", 5, 8)),
    ]


def test_a_stage_that_rests_gives_on_values_and_gradients() -> None:
    stage = prediction.make_stage(1, [9.0, 0.0])
    x = torch.randn(3, 4, requires_grad=True)
    y = stage(x)
    assert torch.equal(y, x)
    gradient = torch.randn(3, 4)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)
    assert all(parameter.grad is not None for parameter in stage.parameters())


@pytest.mark.usefixtures("no_leaks")
def test_no_step_on_slowed_edges_is_quicker_than_predicted() -> None:
    case = prediction.EmulatedHosts("far", Topology(prediction.hosts(2, 1), link=NetworkLink(0.05, 1e6)))
    size = prediction.PredictionSize(forward=0.005, numbers=500, microbatches=2, rounds=1, cases=(case,))
    figures = json.loads(json.dumps(prediction.run(quiet, size=size)))
    [row] = figures["rows"]
    # The pipe is filled and emptied over the link, and messages of 2 kB take 2 ms more.
    assert row["predicted_seconds"] == pytest.approx(2 * (0.05 + 0.002) + (2 + 1) * 0.015, rel=0.1)
    assert row["measured_seconds"] >= row["predicted_seconds"] * (1 - 1e-6)
    assert 0 < row["measured_waits_share"] < 1
    assert "far" in prediction.show(figures)
