"""asyncpipe bench peers: a short run of every contestant that is there, and what is said of those that are not."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn

from asyncpipe.bench import peers
from asyncpipe.bench.harness import mlp
from asyncpipe.bench.peers.bare_threads import BareThreads
from asyncpipe.bench.peers.cases import CASES, Case, plain_step

SMALL = {"small": Case("2 stages of Linear(4)+ReLU", 2, 4, (2, 4), partial(mlp, 4, 1))}


def quiet(_: str) -> None:
    """Nobody wants to see the progress."""


def small_run(contestants: str, repeats: int = 2):
    figures = json.loads(json.dumps(peers.run(quiet, contestants=contestants, repeats=repeats, chosen=SMALL)))
    return figures["cases"]["small"], peers.show(figures)


@pytest.fixture
def peer(monkeypatch):
    """Puts a function in the place of torchgpipe's ``GPipe``."""

    def put(make):
        module = ModuleType("torchgpipe")
        module.GPipe = make
        monkeypatch.setitem(sys.modules, "torchgpipe", module)

    return put


@pytest.mark.parametrize("repeats", [1, 3])
def test_contestants_take_turns_and_are_compared_with_bare_threads(repeats):
    before = threading.active_count(), torch.get_num_threads()
    row, shown = small_run("step,bare,plain,dropin", repeats)
    assert list(row["results"]) == ["plain", "bare", "step", "dropin"]
    for result in row["results"].values():
        assert 0 < result["low"] <= result["seconds"] <= result["high"]
        assert len(result["all"]) == repeats
    # F and B of 4 micro-batches in 2 stages, and a copy each way between them.
    assert row["inside"]["tasks"] == 24
    assert row["inside"]["inside_seconds"] == pytest.approx(
        row["inside"]["inside_over_plain"] * row["results"]["plain"]["seconds"]
    )
    assert "times the bare threads' step" in shown
    assert "outside, µs a task" in shown
    assert (threading.active_count(), torch.get_num_threads()) == before


@pytest.mark.parametrize("contestant", ["distributed", "bare-processes"])
def test_two_processes_train_and_are_gone_afterwards(contestant):
    row, _ = small_run(contestant, repeats=1)
    assert row["results"][contestant]["seconds"] > 0
    assert row["inside"] is None
    assert not multiprocessing.active_children()


def test_workers_make_the_same_gradients_and_are_gone_afterwards():
    row, shown = small_run("plain,processes", repeats=2)
    assert len(row["results"]["processes"]["all"]) == 2, shown


def test_steps_in_two_processes_are_compared_with_bare_ones():
    cell = {"seconds": 0.03, "low": 0.02, "high": 0.04}
    row = {"about": "", "inside": None, "results": {"bare-processes": cell, "processes": {**cell, "seconds": 0.036}}}
    figures = {"repeats": 1, "contestants": dict.fromkeys(row["results"], ""), "cases": {"small": row}}
    shown = peers.show(figures).splitlines()
    assert shown[shown.index("times the bare processes' step") + 2].split() == ["small", "1.00", "1.20"]


def test_a_rank_that_fails_is_said_and_leaves_no_process():
    odd = {"odd": Case("its second half has no parameters", 2, 4, (2, 4), _Failing)}
    figures = peers.run(quiet, contestants="distributed", repeats=1, chosen=odd)
    assert "this stage does not compute" in figures["cases"]["odd"]["results"]["distributed"]["failed"]
    assert not multiprocessing.active_children()


class _Failing(nn.Sequential):
    def forward(self, x):
        raise ArithmeticError("this stage does not compute")


def test_a_missing_peer_is_said_in_its_column(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchgpipe", None)
    monkeypatch.setitem(sys.modules, "fairscale", None)
    row, shown = small_run("plain,torchgpipe,fairscale")
    assert list(row["results"]["torchgpipe"]) == ["missing"]
    needs = "this contestant needs fairscale; to install it, in a checkout of asyncpipe: pip install -e '.[peers]'"
    assert row["results"]["fairscale"] == {"missing": needs}
    assert f"fairscale: missing: {needs}" in shown.splitlines()
    assert row["results"]["plain"]["seconds"] > 0


def test_a_peer_is_given_the_same_stages_and_timed(peer):
    asked = []

    def gpipe(model, balance, **options):
        asked.append((len(model), balance, options))
        return model

    peer(gpipe)
    row, _ = small_run("torchgpipe")
    assert row["results"]["torchgpipe"]["seconds"] > 0
    assert asked == [(2, [1, 1], {"devices": ["cpu", "cpu"], "chunks": 4, "checkpoint": "never"})]


def test_a_peer_with_other_gradients_is_said_and_not_timed(peer):
    peer(lambda model, balance, **options: lambda x: 1.1 * model(x))
    row, shown = small_run("plain,torchgpipe")
    assert list(row["results"]["torchgpipe"]) == ["wrong"]
    assert "torchgpipe: wrong: its gradients are not those of the plain loop (difference" in shown
    peer(lambda model, balance, **options: lambda x: model(x).detach().requires_grad_())
    assert small_run("torchgpipe")[0]["results"]["torchgpipe"]["wrong"].endswith("(difference inf)")


def test_a_peer_that_raises_is_said_and_the_others_go_on(peer):
    def gpipe(*_, **__):
        raise ValueError("no CPU, please")

    peer(gpipe)
    row, shown = small_run("plain,torchgpipe")
    assert row["results"]["torchgpipe"] == {"failed": "ValueError: no CPU, please"}
    assert row["results"]["plain"]["seconds"] > 0
    assert "failed" in shown.splitlines()[2]


@pytest.mark.parametrize("case", CASES)
def test_every_case_can_be_cut_for_every_contestant(case):
    case = CASES[case]
    assert case.stages % 2 == 0, "two processes have half of the stages each"
    x, target = case.batch()
    assert x.shape == target.shape
    assert len(x.chunk(case.microbatches)) == case.microbatches
    assert case.model()(x[:1]).shape == x[:1].shape


@pytest.mark.parametrize("stages", [1, 3])
def test_bare_threads_make_the_plain_loops_gradients(stages):
    torch.manual_seed(0)
    x, target = torch.randn(2, 12, 4, dtype=torch.float64)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(stages))).double()
    plain_step(list(model), x, target, 6)
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    bare = BareThreads(list(model), 6)
    bare.step(x, target)
    bare.close()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_bare_threads_end_where_a_stage_raises(broken):
    stages = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    stages[broken] = nn.Linear(5, 4)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        BareThreads(stages, 6).step(torch.randn(12, 4), torch.randn(12, 4))
    assert threading.active_count() == before
