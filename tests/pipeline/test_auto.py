"""schedule="auto" and balance="auto" with a sample: measuring does not change the model, which then trains."""

from __future__ import annotations

import copy
import sys
from math import inf
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe import Pipeline, Share, known_schedules
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.layer_profile import message_sizes
from asyncpipe.core.predict.memory import peak_memory
from asyncpipe.core.predict.profile_from_journals import MeasuredStep
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.one_f_one_b import OneFOneB
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import BalanceError, MicrobatchError, OptionError, PlanError, ScheduleError
from asyncpipe.ops.device.devices import Device
from asyncpipe.pipeline import profiling
from asyncpipe.pipeline.options import PipelineArguments
from benchmarks.byte_counters import ByteMeter, CountedExecutor

mse = nn.functional.mse_loss
DEVICES = ["cpu:0", "cpu:1"]


def pipeline(workload, model, **options):
    options = {"microbatches": 4, "loss_fn": mse, "sample": (workload.x, workload.target)} | options
    return Pipeline(model, DEVICES, **options)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
async def test_a_schedule_is_chosen_and_trains(workload, no_leaks, checkpoint):
    model = workload.model()
    state, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    async with pipeline(workload, model, schedule="auto", checkpoint=checkpoint) as pipe:
        assert torch.equal(torch.get_rng_state(), seed)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert pipe.schedule.name in known_schedules()
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10
    # A copy does not measure again.
    assert copy.deepcopy(pipe).schedule.name == pipe.schedule.name


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, 0),
        ({"optimizer": torch.optim.SGD}, 1),
        ({"optimizer": torch.optim.SGD, "share": Share("mine")}, 1),
        ({"optimizer": torch.optim.SGD, "deferred_batch_norm": True}, 0),
    ],
    ids=str,
)
def test_where_steps_overlap_what_counts_is_how_soon_one_follows_the_other(workload, monkeypatch, options, ahead):
    asked = []
    plan = profiling.plan
    monkeypatch.setattr(profiling, "plan", lambda *a, **k: asked.append(k["ahead"]) or plan(*a, **k))
    monkeypatch.setattr(profiling, "STEPS", 1)
    pipeline(workload, workload.model(), schedule="1f1b", **options)
    assert asked == [ahead]


async def test_replicas_are_chosen_for_on_the_devices_of_the_first(workload, monkeypatch):
    """With micro-batches of the size that they have; the optimizer of a copy is measured, and the model stays."""
    asked = []
    plan = profiling.plan
    monkeypatch.setattr(profiling, "plan", lambda *a, **k: asked.append((a, k)) or plan(*a, **k))
    monkeypatch.setattr(profiling, "STEPS", 1)
    model, options = workload.model(), {"microbatches": 2, "schedule": "1f1b", "shard_optimizer": True}
    state = copy.deepcopy(model.state_dict())
    devices = [DEVICES, ["cpu:2", "cpu:3"]]
    sample = workload.x, workload.target
    async with Pipeline(model, devices, loss_fn=mse, sample=sample, optimizer=torch.optim.Adam, **options) as pipe:
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        [((profile, count), keywords)] = asked
        assert (profile.devices, profile.measured, count) == (("cpu:0", "cpu:1"), [4], 4)
        assert (keywords["replicas"], keywords["shards"]) == ([2], [True])
        measured = profile.measurement(4)
        assert 0 < measured.updating < inf
        assert 0 < measured.reducing < inf
        assert pipe.microbatches == 2
        await pipe.step(workload.x, workload.target)
    assert not any(torch.equal(value, state[key]) for key, value in model.state_dict().items() if value.numel() > 1)


@pytest.mark.parametrize(
    ("names", "given", "is_free", "why"),
    [
        (["cpu:0", "cuda:0"], {}, False, "operators on CPUs"),
        (["cuda:0", "cuda:0"], {}, False, "on one accelerator"),
        (["cuda:0", "cuda:1"], {}, True, "without a lock"),
        (["cuda:0", "cuda:1"], {"optimizer": None}, False, "without an optimizer="),
        (["cuda:0", "cuda:1"], {"sample": None}, False, "there is no sample="),
        (["cuda:0", "cuda:1"], {}, False, None),
    ],
    ids=str,
)
def test_where_nothing_is_to_be_measured_it_is_threads(workload, monkeypatch, names, given, is_free, why):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: not is_free, raising=False)
    options = {"sample": (workload.x,), "optimizer": torch.optim.SGD, "microbatches": 2} | given
    arguments = PipelineArguments(model=workload.model(), devices=names, workers="auto", **options)
    found = profiling._why_threads(arguments, [Device(name, torch.device(name)) for name in names])
    assert found is None if why is None else why in found


@pytest.mark.parametrize(("share", "workers"), [(0.3, "threads"), (0.9, "processes")])
@pytest.mark.parametrize("balance", ["auto", [2, 6]], ids=str)
def test_workers_are_chosen_by_the_measured_processor_time(workload, monkeypatch, share, workers, balance):
    monkeypatch.setattr(profiling, "STEPS", 1)
    monkeypatch.setattr(profiling, "_why_threads", lambda *_: None)
    clock = iter([0.0, 7.0])
    monkeypatch.setattr(profiling, "process_time", lambda: next(clock))
    measured = profiling._MeasuredPipeline.step
    monkeypatch.setattr(profiling._MeasuredPipeline, "step", lambda *a: MeasuredStep(7.0 / share, measured(*a).record))
    options = {"microbatches": 4, "loss_fn": mse, "sample": (workload.x, workload.target), "balance": balance}
    arguments = PipelineArguments(
        model=workload.model(), devices=DEVICES, workers="auto", transport="connection", checkpoint="never", **options
    )
    chosen, why = profiling.resolve_workers(arguments)
    assert (chosen.workers, chosen.has_workers) == (workers, workers == "processes")
    assert chosen.transport == ("connection" if workers == "processes" else "shared_memory")
    assert f"{share:.0%} busy" in why
    # On each device 4 F and 4 B, and a copy each way.
    assert "24 tasks" in why


@pytest.mark.parametrize("workers", ["auto", "processes"])
async def test_the_steps_notes_say_why(workload, monkeypatch, workers):
    why = "operators on CPUs run without the interpreter's lock"
    if workers == "processes":
        monkeypatch.setattr(asyncpipe.pipeline.pipeline, "resolve_workers", lambda arguments: (arguments, why))
    records = []
    observer = SimpleNamespace(step_completed=records.append)
    options = {"microbatches": 2, "loss_fn": mse, "optimizer": torch.optim.SGD, "observers": [observer]}
    async with Pipeline(workload.model(), DEVICES, workers=workers, **options) as pipe:
        await (await pipe.step(workload.x, workload.target)).completed()
    assert [record.notes.why_workers for record in records] == [why]


def test_a_pool_cannot_choose_its_workers():
    with pytest.raises(OptionError, match="give it to Pipeline"):
        asyncpipe.DevicePool(workers="auto")


async def test_a_balance_is_chosen_for_a_schedule(workload):
    model = workload.model()
    async with pipeline(workload, model, schedule="zb-h1") as pipe:
        assert len(pipe.stages) == 2
        await pipe.step(workload.x, workload.target)
    assert workload.worst(model) < 1e-10


async def test_a_balance_that_is_given_stays(workload):
    async with pipeline(workload, workload.model(), schedule="auto", balance=[2, 6]) as pipe:
        assert [len(list(stage.module.parameters())) for stage in pipe.stages] == [2, 6]


class Biased(nn.Module):
    """An embedding that is the head as well, a bias that all blocks read, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        bias = x.sin()
        for block in self.blocks:
            x = block(x).tanh() * bias
        return self.head(x)


async def test_what_is_measured_of_skips_and_ties_is_what_travels(monkeypatch):
    torch.manual_seed(0)
    model = Biased().double()
    ids = torch.randint(7, (8, 5))

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    wanted = torch.autograd.grad(loss_fn(model(ids), ids), list(model.parameters()))
    staged = asyncpipe.trace(model, asyncpipe.Arguments.of(ids), split=["blocks.0", "blocks.1", "blocks.2", "head"])
    sample = profiling.SampleBatch(ids, ids, loss_fn)
    profile = profiling.measure(staged, DEVICES, sample, [4], steps=1)
    rows = 2 * 5 * 8
    # The bias and its own output.
    messages = {(0, 1): 12, (0, 2): 6, (0, 3): 6, (1, 2): 6, (2, 3): 6, (3, 4): 6}
    assert message_sizes(profile.measurements[4].sent, range(5)) == {k: rows * n for k, n in messages.items()}
    assert profile.costs([2, 3], 4).sent == (rows * 12,)
    (tie,) = profile.ties
    assert (tie.users, tie.size, tie.trained) == ((0, 4), 7 * 6 * 8, True)
    assert profile.wiring([4, 1]).ties == ((0, 1),)
    assert 0 < profile.measurements[4].adding < float("inf")
    assert all(parameter.grad is None for parameter in model.parameters())
    monkeypatch.setattr(profiling, "STEPS", 1)
    options = {"microbatches": 4, "loss_fn": loss_fn, "sample": (ids, ids), "schedule": "auto"}
    async with Pipeline(staged, DEVICES, **options) as pipe:
        await pipe.step(ids, ids)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10)


async def test_the_finest_cut_is_joined_evenly_or_as_measured(workload, monkeypatch):
    monkeypatch.setattr(profiling, "STEPS", 1)
    model = workload.model()
    finest = asyncpipe.trace(model, asyncpipe.Arguments.of(workload.x), split="finest")
    assert len(finest.stages) == 12, "one for each layer, inside the sequences too"
    stages = []
    for options in ({"sample": None}, {"sample": None, "stages": 4, "schedule": "interleaved"}, {"schedule": "auto"}):
        model.zero_grad()
        async with pipeline(workload, finest, **options) as pipe:
            stages.append(len(pipe.stages))
            await pipe.step(workload.x, workload.target)
        assert workload.worst(model) < 1e-10
        # A copy has the stages that were made of them.
        assert len(copy.deepcopy(pipe).stages) == stages[-1]
    assert stages[:2] == [2, 4]


@pytest.mark.parametrize("options", [{"schedule": "auto"}, {"schedule": "gpipe", "balance": "auto"}])
def test_stages_that_are_built_where_they_live_are_not_measured(workload, options):
    factory = asyncpipe.StageFactory(lambda stage: nn.Linear(4, 4), stages=2)
    with pytest.raises(OptionError, match=r"builds stages where they live, which cannot be .* measured here; name a"):
        pipeline(workload, factory, **options)


def test_without_a_sample_parameters_are_spread(workload):
    assert len(pipeline(workload, workload.model(), sample=None).stages) == 2


@pytest.fixture
def traced(workload):
    """The model of eight layers, traced and cut into four pieces."""
    return asyncpipe.trace(workload.model(), asyncpipe.Arguments.of(workload.x), split=["2", "4", "6"])


@pytest.mark.promise(
    "Right results", "A traced model trains with a measured schedule and balance, or with a balance that you give."
)
@pytest.mark.parametrize(
    "options", [{"schedule": "auto"}, {"schedule": "zb-h1"}, {"schedule": "auto", "balance": [1, 3]}]
)
async def test_a_traced_model_is_cut_as_measured(workload, traced, options):
    traced.module.eval()
    async with pipeline(workload, traced, **options) as pipe:
        assert len(pipe.stages) in (2, 4)
        assert options.get("balance") is None or len(list(pipe.stages[0].module.parameters())) == 2
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.train()
        await pipe.step(workload.x, workload.target)
    assert workload.worst(traced.module) < 1e-10
    # A copy has the same stages, of parameters of its own.
    traced.module.zero_grad()
    async with copy.deepcopy(pipe) as twin:
        assert len(twin.stages) == len(pipe.stages)
        await twin.step(workload.x, workload.target)
        assert workload.worst(twin.module) < 1e-10
    assert all(parameter.grad is None for parameter in traced.module.parameters())


@pytest.mark.promise("Right results", "A copy of a traced pipeline has its own parameters and its own mode.")
async def test_a_copy_of_a_traced_pipeline_follows_its_own_mode(workload):
    model = workload.model(dropout=0.5)
    pipe = pipeline(workload, asyncpipe.trace(model, asyncpipe.Arguments.of(workload.x), split=2), sample=None)
    async with copy.deepcopy(pipe).eval() as twin:
        outputs = (await twin.step(workload.x)).outputs
    torch.testing.assert_close(outputs, workload.model(dropout=0.5).eval()(workload.x))
    assert model.training


@pytest.mark.promise(
    "Right results", "A traced model trains with a measured schedule and balance, or with a balance that you give."
)
@pytest.mark.parametrize("balance", [[2, 2], [1, 3], [3, 1]])
async def test_a_balance_joins_the_stages_of_a_traced_model(workload, traced, balance):
    async with pipeline(workload, traced, balance=balance, sample=None) as pipe:
        assert [len(list(stage.module.parameters())) for stage in pipe.stages] == [2 * size for size in balance]
        await pipe.step(workload.x, workload.target)
        assert workload.worst(traced.module) < 1e-10
        pipe.eval()
        torch.testing.assert_close((await pipe.step(workload.x)).outputs, workload.outputs)


def test_what_a_balance_of_a_traced_model_cannot_be(workload, traced):
    with pytest.raises(BalanceError, match="sums up to 3, but the model has 4 layers"):
        pipeline(workload, traced, balance=[1, 2], sample=None)
    with pytest.raises(ScheduleError, match="or give a balance with 2 entries, which joins stages"):
        pipeline(workload, traced, sample=None)
    with pytest.raises(BalanceError, match="a copy of a traced model cannot be cut in another way"):
        pipeline(workload, copy.deepcopy(traced), balance=[2, 2], sample=None)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"schedule": "auto", "sample": None}, OptionError, "give a sample=\\(x, target\\)"),
        ({"sample": "x"}, OptionError, "sample must be a tuple \\(x, target\\), or \\(x,\\) without a target, got str"),
        ({"schedule": OneFOneB()}, OptionError, "by name, in their strict order"),
        ({"schedule": "auto", "order": "hint"}, OptionError, "by name, in their strict order"),
        ({"schedule": "auto", "stages": 2}, OptionError, "leave out order and stages"),
        ({"schedule": "auto", "microbatches": 64}, MicrobatchError, "64"),
        ({"schedule": "dualpipev", "microbatches": 3}, PlanError, "no schedule serves"),
    ],
)
def test_what_cannot_be_chosen(workload, options, error, told):
    with pytest.raises(error, match=told):
        pipeline(workload, workload.model(), **options)


class Shifts(nn.Module):
    """A causal loss as Llama has it in transformers: logits in float32, those of the last token left out."""

    def forward(self, logits, target):
        logits = logits.float()[:, :-1].contiguous()
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


class CountsTokens(nn.Module):
    """A causal loss as of GPT-2 here: the targets are the next tokens already."""

    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("norm", "vocabulary", "tokens", "loss"),
    [(nn.RMSNorm, 4000, 64, Shifts()), (nn.LayerNorm, 5000, 8, CountsTokens())],
    ids=["llama", "gpt2"],
)
def test_a_head_needs_the_memory_that_is_predicted(monkeypatch, norm, vocabulary, tokens, loss, schedule):
    """What the loss makes of the logits, and their gradient; with few tokens, the gradient of the head's weight."""
    monkeypatch.setattr(profiling, "STEPS", 1)
    width, pieces = 32, 4
    block = nn.Sequential(norm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    head = nn.Sequential(norm(width), nn.Linear(width, vocabulary, bias=False))
    model = nn.Sequential(nn.Embedding(vocabulary, width), block, head)
    batch = torch.randint(vocabulary, (2, 2 * pieces, tokens))
    profile = profiling.measure(model, DEVICES, profiling.SampleBatch(*batch, loss), [pieces], steps=1)
    graph = lower(find_schedule(schedule), Shape(2, pieces, 2), wiring=profile.wiring([2, 1]))
    predicted = peak_memory(simulate(graph, profile.costs([2, 1], pieces)), profile.memory([2, 1], pieces))
    meters = {}

    def executor(device):
        meters[device] = ByteMeter()
        meters[device].ignore(model.parameters())
        return CountedExecutor(device, meters[device])

    options = {"schedule": schedule, "balance": [2, 1], "checkpoint": "never", "loss_fn": loss}
    with Pipeline(model, DEVICES, microbatches=pieces, executors=executor, **options).sync() as run:
        run.step(*batch, return_outputs=False)
    weights = sum(parameter.nbytes for parameter in head.parameters())
    assert meters["cpu:1"].peak == pytest.approx(predicted[1] - weights, rel=0.15)
