"""Stages that a factory builds where they live: the same bits as on threads, and nothing in other processes."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncpipe import Pipeline, StageFactory, convert_deferred_batch_norm
from asyncpipe.errors import BalanceError, OptionError

pytestmark = [pytest.mark.timeout(120)]

mse = nn.functional.mse_loss
SHARED = nn.Linear(4, 4)


def make_stage(stage, folder, norm=False):
    """Notes who has called it, and whether it makes values there."""
    linear = nn.Linear(4, 4, dtype=torch.float64)
    Path(folder, f"{stage} {os.getpid()} {linear.weight.device.type}").touch()
    layers = [linear, nn.Dropout(0.2), nn.Tanh(), *([nn.BatchNorm1d(4, dtype=torch.float64)] if norm else [])]
    return convert_deferred_batch_norm(nn.Sequential(*layers))


def tied(stage):
    return SHARED if stage != 1 else nn.Linear(4, 4)


def reads(stage):
    weight = torch.ones(3)
    assert weight.sum().item() == 3
    return nn.Linear(4, 4)


def returns_none(stage):
    return None


async def train(factory, pool, **options):
    torch.manual_seed(3)
    x = torch.randn(12, 4, dtype=torch.float64)
    options = {"schedule": "interleaved", "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | options
    async with Pipeline(factory, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse, pool=pool, **options) as pipe:
        first = pipe.state_dict()
        first = {name: value.clone() for name, value in first.items()}
        losses = [(await pipe.step(x, x)).loss for _ in range(2)]
        return first, losses, pipe.state_dict()


@pytest.mark.parametrize("norm", [False, True])
async def test_stages_have_the_same_values_wherever_they_are_built(tmp_path, pool, norm):
    ends = []
    for where in (None, pool):
        (folder := tmp_path / str(where is None)).mkdir()
        factory = StageFactory(f"{__name__}:make_stage", stages=4, arguments={"folder": folder, "norm": norm})
        ends.append(await train(factory, where))
    (first, losses, last), (remote_first, remote_losses, remote_last) = ends
    assert list(first)[:2] == ["0.0.weight", "0.0.bias"]
    assert len({value.sum().item() for name, value in first.items() if name.endswith("0.weight")}) == 4
    assert losses == remote_losses
    for state, remote in ((first, remote_first), (last, remote_last)):
        assert list(state) == list(remote)
        assert all(torch.equal(state[name], remote[name]) for name in state)
    assert not torch.equal(first["0.0.weight"], last["0.0.weight"])


async def test_a_process_makes_only_what_it_has(tmp_path, pool):
    await train(StageFactory(make_stage, stages=4, arguments={"folder": tmp_path}), pool)
    calls = [path.name.split() for path in tmp_path.iterdir()]
    here = str(os.getpid())
    assert sorted(stage for stage, pid, device in calls if pid == here) == list("0123")
    assert {device for _, pid, device in calls if pid == here} == {"meta"}
    whole = {pid: {stage for stage, p, device in calls if p == pid and device == "cpu"} for _, pid, _ in calls}
    del whole[here]
    assert sorted(map(sorted, whole.values())) == [["0", "2"], ["1", "3"]]


async def test_a_seed_of_its_own_and_copies_of_what_was_trained(tmp_path):
    factory = StageFactory(make_stage, stages=2, arguments={"folder": tmp_path}, seed=7)
    x = torch.randn(8, 4, dtype=torch.float64)
    states = []
    for _ in range(2):
        pipe = Pipeline(factory, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse, optimizer=torch.optim.Adam)
        states.append({name: value.clone() for name, value in pipe.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    async with pipe:
        await pipe.step(x, x)
    again = copy.deepcopy(pipe)
    assert not torch.equal(again.state_dict()["0.0.weight"], states[0]["0.0.weight"])
    assert torch.equal(again.state_dict()["0.0.weight"], pipe.state_dict()["0.0.weight"])


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (f"{__name__}:nothing", {}, r"StageFactory\(.*:nothing\) cannot be found .* importable in every process"),
        ("no module", {}, "'module:function' or a function, got 'no module'"),
        (returns_none, {}, r"StageFactory\(returns_none\) must return the module of a stage, and returned NoneType"),
        (tied, {}, r"'weight' of stage 2 is 'weight' of stage 0; stages .* share no tensors: make it anew"),
        (make_stage, {"sample": (torch.zeros(4, 1),)}, "name a schedule"),
        (make_stage, {"deferred_batch_norm": True}, r"return asyncpipe.convert_deferred_batch_norm\(module\) from it"),
    ],
    ids=["missing", "no name", "no module", "ties", "sample", "batch norm"],
)
def test_what_cannot_work_is_refused(tmp_path, function, options, message):
    arguments = {"folder": tmp_path} if function is make_stage else {}
    with pytest.raises(OptionError, match=message):
        Pipeline(
            StageFactory(function, stages=3, arguments=arguments),
            ["cpu:0", "cpu:1", "cpu:2"],
            microbatches=4,
            **options,
        )


def test_what_reads_values_cannot_be_built_elsewhere(pool):
    with pytest.raises(OptionError, match=r"fails for stage 0 on torch's meta device.* must not read the values"):
        Pipeline(StageFactory(reads, stages=2), ["cpu:0", "cpu:1"], microbatches=4, pool=pool)
    with pytest.raises(BalanceError, match="has 2 stages, one a call; leave stages and balance out"):
        Pipeline(StageFactory(reads, stages=2), ["cpu:0", "cpu:1"], microbatches=4, balance=[1, 1])
