"""python -m benchmarks peers: a short run of every contestant, and what is said of those that are not timed."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from preloaded import preloaded_context
from torch import nn

from asyncpipe.bench.cases import Case, mlp, plain_step
from benchmarks import peers
from benchmarks.cases import CASES
from benchmarks.peers import two_processes
from benchmarks.peers.bare import bare_threads
from benchmarks.peers.contestants import CONTESTANTS

SMALL = {"small": Case("2 stages of Linear(4)+ReLU", 2, 4, (2, 4), partial(mlp, 4, 1))}


@pytest.fixture(autouse=True)
def preloaded(monkeypatch):
    """Ranks have imported torch already."""
    monkeypatch.setattr(two_processes, "get_context", lambda _: preloaded_context())


def quiet(_: str) -> None:
    """Nobody wants to see the progress."""


def small_run(contestants: str, repeats: int = 2, chosen=SMALL):
    """Its rows by contestant, and its Markdown."""
    figures = json.loads(json.dumps(peers.run(quiet, contestants=contestants, repeats=repeats, chosen=chosen)))
    return {row["contestant"]: row for row in figures["rows"]}, peers.show(figures)


@pytest.mark.parametrize("repeats", [1, 3])
def test_contestants_take_turns_and_are_compared_with_bare_threads(repeats):
    before = threading.active_count(), torch.get_num_threads()
    rows, shown = small_run("step,bare,plain", repeats)
    assert list(rows) == ["plain", "bare", "step"]
    for row in rows.values():
        assert 0 < row["from_seconds"] <= row["step_seconds"] <= row["to_seconds"]
        assert row["times_bare_threads"] == pytest.approx(row["step_seconds"] / rows["bare"]["step_seconds"])
    # F and B of 4 micro-batches in 2 stages, and a copy each way between them.
    assert rows["step"]["tasks"] == 24
    assert rows["step"]["inside"] > 0
    assert "µs outside a task" in shown
    assert (threading.active_count(), torch.get_num_threads()) == before


def test_two_processes_train_and_are_gone_afterwards():
    rows, shown = small_run("plain,distributed,bare-processes", repeats=1)
    assert all(row["step_seconds"] > 0 for row in rows.values()), shown
    assert rows["bare-processes"]["times_bare_processes"] == 1
    assert not multiprocessing.active_children()


def test_workers_make_the_same_gradients():
    rows, shown = small_run("plain,processes", repeats=2)
    assert rows["processes"]["step_seconds"] > 0, shown


class _Failing(nn.Sequential):
    def forward(self, x):
        raise ArithmeticError("this stage does not compute")


@contextmanager
def _wrong(case, by):
    with CONTESTANTS["plain"][1](case) as plain:
        yield peers.Contestant(plain.seconds, lambda: [by * gradient for gradient in plain.gradients()], plain.clear)


def test_what_fails_or_is_wrong_is_said_and_not_timed(monkeypatch):
    for name, by in (("wrong", 1.1), ("not a number", float("nan"))):
        monkeypatch.setitem(CONTESTANTS, name, ("", partial(_wrong, by=by)))
    rows, shown = small_run("plain,wrong,not a number")
    told = "AssertionError: gradient 0 is not that of the plain loop"
    assert [row.get("not_timed") for row in rows.values()] == [None, told, told]
    assert told in shown
    assert "step_seconds" not in rows["wrong"]
    odd = {"odd": Case("a rank that fails", 2, 4, (2, 4), _Failing)}
    row = small_run("distributed", 1, odd)[0]["distributed"]
    assert row["not_timed"] == "ArithmeticError: this stage does not compute"


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_case_can_be_cut_for_every_contestant(case):
    assert case.stages % 2 == 0, "two processes have half of the stages each"
    x, target = case.batch()
    assert x.shape == target.shape
    assert len(x.chunk(case.microbatches)) == case.microbatches
    assert case.model()(x[:1]).shape == x[:1].shape


@pytest.mark.parametrize("stages", [1, 3])
def test_bare_threads_make_the_plain_loops_gradients(stages):
    torch.manual_seed(0)
    x, target = torch.randn(2, 12, 4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(stages)))
    plain_step(list(model), x, target, 6)
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with bare_threads(list(model), 6) as step:
        step(x, target)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_bare_threads_end_where_a_stage_raises(broken):
    stages = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    stages[broken] = nn.Linear(5, 4)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="cannot be multiplied"), bare_threads(stages, 6) as step:
        step(torch.randn(12, 4), torch.randn(12, 4))
    assert threading.active_count() == before


def test_replicas_and_whole_models_make_the_same_gradients():
    rows, shown = small_run("plain,ddp,all-reduce,replicas-2x1-threads,replicas-2x2-processes-sharded", repeats=1)
    assert all(row["step_seconds"] > 0 for row in rows.values()), shown
    assert rows["ddp"]["times_ddp"] == rows["all-reduce"]["times_all_reduce"] == 1
    assert not multiprocessing.active_children()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed may compile for minutes")
@pytest.mark.parametrize("contestant", ["deepspeed-1x2", "deepspeed-2x1", "deepspeed-2x1-zero1"])
def test_a_contestant_whose_library_is_missing_says_so(contestant):
    rows, _ = small_run(f"plain,{contestant}", repeats=1)
    assert rows[contestant]["not_timed"] == "ModuleNotFoundError: No module named 'deepspeed'"
    assert rows["plain"]["step_seconds"] > 0
