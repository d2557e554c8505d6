"""The paper's tables on emulated devices: costs, bounds, what the ablation takes out, and that rows are near bounds."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.graph.task import Queue
from asyncpipe.core.graph.task_graph import critical_path
from asyncpipe.core.predict.report import report
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.gpipe import GPipeSchedule
from asyncpipe.core.schedules.protocol import Shape
from benchmarks import paper
from benchmarks.__main__ import main
from benchmarks.paper import PaperSize, bound
from benchmarks.paper.ablation import without_dependency, without_streams
from benchmarks.paper.emulated import run_steps
from benchmarks.paper.figures import ABLATION, AMOEBANET, AMOEBANET_SPEED, UNET, UNET_SPEED
from benchmarks.paper.models import BYTES_PER_SECOND, SplitModel, paper_model

U_SHAPED = SplitModel((2.0, 3.0, 2.5, 2.0), {(0, 1): 0.3, (0, 3): 0.5, (1, 2): 0.2, (2, 3): 0.1})


@pytest.fixture(scope="module")
def models():
    return {name: paper_model(name) for name in (UNET, AMOEBANET)}


def step(model, microbatches=6, checkpoint="except_last"):
    stages = len(model.forward)
    shape, mode = Shape(stages, microbatches, stages), CheckpointMode(checkpoint)
    return lower(GPipeSchedule(), shape, checkpoint=mode, wiring=model.wiring)


def simulated(graph, model, least):
    """Measures in virtual time: exact, and at once."""
    record = simulate(graph, model)
    return paper._Run(report(record).seconds, least, record)


# Costs and bounds


def test_the_models_are_the_papers(models):
    unet, amoebanet = models[UNET], models[AMOEBANET]
    assert sum(unet.seconds) == pytest.approx(1 / 28.5 / 3)
    assert sorted(size for *_, size in unet.skips) == [
        4 * 64 * 2**level * (192 >> level) ** 2 for level in range(4, -1, -1)
    ]
    assert len(amoebanet.seconds) == 24
    assert not amoebanet.skips


def test_skips_without_portals_pass_every_border_between(models):
    with_portals, without = (models[UNET].split(4, 16, portals=portals).copies for portals in (True, False))
    assert set(without) == {(0, 1), (1, 2), (2, 3)}
    jumping = with_portals[0, 3] + with_portals[1, 3]
    assert without[2, 3] == pytest.approx(with_portals[2, 3] + jumping)
    assert without[0, 1] == pytest.approx(with_portals[0, 1] + with_portals[0, 3])
    first = models[UNET].skips[0][2]
    assert with_portals[0, 3] >= 16 * first / BYTES_PER_SECOND


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("forward", [(1, 1, 1, 1), (1, 3, 2, 1), (4, 1, 1, 2), (1, 1, 1, 5), (2,)])
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_the_bound_is_what_a_chain_takes(forward, microbatches, checkpoint):
    """Without skips nothing keeps a step from its bound, which then is the longest chain of tasks."""
    model = SplitModel(forward, {(j, j + 1): 0.25 for j in range(len(forward) - 1)})
    graph = step(model, microbatches, checkpoint)
    least = bound(model, microbatches, CheckpointMode(checkpoint))
    assert report(simulate(graph, model)).seconds == pytest.approx(least)
    assert critical_path(graph, model) == pytest.approx(least)


def test_even_stages_have_the_textbooks_bound():
    model = SplitModel((1.0,) * 4, {(j, j + 1): 0.0 for j in range(3)})
    assert bound(model, 8, CheckpointMode.NEVER) == (8 + 4 - 1) * 3


# What the ablation takes out


@pytest.mark.parametrize(
    "taken", [without_dependency, without_streams, lambda g: without_streams(without_dependency(g))]
)
def test_an_ablated_graph_has_the_same_tasks_in_an_order_that_can_run(taken):
    whole = step(U_SHAPED)
    graph = taken(whole)
    assert {task.id for task in graph.tasks} == {task.id for task in whole.tasks}
    assert all(before < number for number, row in enumerate(graph.dependencies) for before in row)
    assert [task.number for task in graph.tasks] == list(range(len(graph.tasks)))
    ran = asyncio.run(run_steps(graph, U_SHAPED.scaled(1e-4), 1))[0]
    assert len(report(ran).tasks) == len(graph.tasks)


def test_without_streams_copies_keep_both_devices_from_computing():
    graph = without_streams(step(U_SHAPED))
    assert {task.lane.queue for task in graph.tasks} == {Queue.COMPUTE}
    assert all(task.lane.device == f"dev:{task.stage}" for task in graph.tasks)
    assert len(graph.tasks) == len(step(U_SHAPED).tasks) + 2 * 4 * 6


def test_without_dependency_the_last_stage_recomputes_first():
    def order(graph):
        ran = report(simulate(graph, U_SHAPED)).tasks
        return "".join(time.task.kind for time in ran if time.task.lane.device == "dev:3" and time.task.source is None)

    assert order(step(U_SHAPED)) == "FFFFFF" + "B" + "RB" * 5
    assert order(without_dependency(step(U_SHAPED))) == "FFFFFF" + "RRRRR" + "BBBBBB"


# The tables


def test_each_component_taken_out_shows_its_loss_and_the_whole_is_near_its_bound(models):
    # The private function, since virtual time is exact and `run` takes real time.
    rows, records = paper._ablation(models[UNET], simulated)
    ratio = {row["name"]: row["ratio"] for row in rows}
    whole = "dependency, streams, portals"
    assert list(ratio) == list(records) == [arm.name for arm in ABLATION]
    assert 1 - 1e-9 <= ratio[whole] <= 1.02
    assert all(ratio[name] > 1.02 for name in ratio if name != whole)
    assert ratio["without portals"] < ratio["dependency alone"] < ratio["none of them"]
    assert rows[0]["ours_utilization"] > rows[-1]["ours_utilization"]


def test_every_speed_up_is_near_its_bound(models):
    for settings, name in ((AMOEBANET_SPEED, AMOEBANET), (UNET_SPEED, UNET)):
        for row in paper._speeds(settings, models[name], simulated, over=1.0):
            assert 1 - 1e-9 <= row["ratio"] <= 1.02, row


def test_the_command_writes_timelines_and_says_what_is_not_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(paper, "run", partial(paper.run, size=PaperSize(seconds=0.02, steps=1)))
    assert main(["paper", "--out", str(tmp_path / "pictures"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [Path(name).exists() for name in figures["pictures"]] == [True] * len(ABLATION)
    assert "<svg" in Path(figures["pictures"][0]).read_text()
    rows = [*figures["ablation"], *figures["amoebanet"], *figures["unet"]]
    assert len(rows) == 19
    assert all(row["ratio"] >= 1 - 1e-6 for row in rows)
    shown = paper.show(figures)
    assert shown.count("not stated") == 4
    assert "one GPU: not measured, since torch sees no GPU" in shown
