"""The optimizer inside the step: each stage's update is a task behind its last backward."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn

from asyncpipe import Arguments, Pipeline, TaskError
from asyncpipe.core.graph.task import WHOLE_STEP, Task
from asyncpipe.core.kinds import TaskKind
from asyncpipe.core.predict.report import report
from asyncpipe.errors import OptionError, StateDictError
from asyncpipe.pipeline.steps import Batch
from asyncpipe.testing import EmulatedExecutor

mse = nn.functional.mse_loss


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
async def test_updates_are_those_of_one_optimizer(workload, schedule):
    model, bare = workload.model(), workload.model()
    optimizer = adamw(bare.parameters())
    devices = ["cpu:0", "cpu:1"]
    async with Pipeline(
        model, devices, microbatches=5, schedule=schedule, loss_fn=mse, optimizer=adamw, checkpoint="always"
    ) as pipe:
        assert list(pipe.optimizers) == list(range(len(pipe.stages)))
        for step in range(5):
            # Accumulate over the first two.
            await pipe.step(workload.x, workload.target, update=step != 0)
            mse(bare(workload.x), workload.target).backward()
            if step != 0:
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert ours.grad is None
        assert (ours - theirs).abs().max() < 1e-10


async def test_updates_follow_a_loss_that_counts(workload):
    model, bare = workload.model(), workload.model()
    optimizer = torch.optim.SGD(bare.parameters(), lr=1.0)
    kept = torch.arange(12) % 3 > 0

    def loss_fn(output, target, kept):
        return mse(output[kept], target[kept]), kept.sum()

    async with Pipeline(
        model,
        ["cpu:0", "cpu:1"],
        microbatches=5,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    ) as pipe:
        for update in (False, True):
            await pipe.step(workload.x, Arguments.of(workload.target, kept), update=update)
            loss_fn(bare(workload.x), workload.target, kept)[0].backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-10


async def test_an_update_waits_for_its_own_stage_alone(workload):
    """The last stage is updated while the first still has backwards to run."""

    def cost(task: Task) -> float:
        return 0.01 if task.kind is TaskKind.BACKWARD else 0.0

    devices = ["cpu:0", "cpu:1", "cpu:2"]
    async with Pipeline(
        workload.model(),
        devices,
        microbatches=3,
        schedule="gpipe",
        loss_fn=mse,
        optimizer=adamw,
        executors=lambda device: EmulatedExecutor(device, cost),
    ) as pipe:
        record = (await pipe.step(workload.x, workload.target)).record
    times = {time.task.id: time for time in report(record).tasks}
    assert [times[f"U({j})"].task.microbatch for j in range(3)] == [WHOLE_STEP] * 3
    assert times["U(2)"].end < times["B(0,0)"].start
    assert times["B(0,0)"].end <= times["U(0)"].start


async def test_a_step_that_fails_before_its_updates_changes_nothing(workload, before_task):
    model = workload.model()
    before = [parameter.clone() for parameter in model.parameters()]
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=3, loss_fn=mse, optimizer=adamw) as pipe:

        def fail(task):
            if task.id == "B(0,1)":
                raise ValueError("no")

        before_task(fail)
        with pytest.raises(TaskError):
            await pipe.step(workload.x, workload.target)
    for ours, earlier in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, earlier)
        assert ours.grad is None


async def test_stages_without_parameters_have_no_optimizer(workload):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double()
    async with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=2, loss_fn=mse, optimizer=adamw) as pipe:
        assert list(pipe.optimizers) == [0]
        await pipe.step(workload.x, workload.target)


def test_what_is_no_optimizer():
    with pytest.raises(OptionError, match="from a stage's parameters to a torch optimizer, and returned list"):
        Pipeline([nn.Linear(2, 2)], ["cpu"], microbatches=1, optimizer=lambda parameters: parameters)


def test_the_scaler_of_a_step_scales_its_loss(workload):
    model, bare = workload.model().float(), workload.model().float()
    x, target = workload.x.float(), workload.target.float()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, bare))
    scaler, reference = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2))
    with Pipeline(model, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=mse).sync() as pipe:
        for _ in range(5):
            assert pipe.step(x, target, scaler=scaler).loss < 100, "losses are not scaled, gradients are"
            assert max(p.grad.abs().max() for p in model.parameters()) > 1
            reference.scale(mse(bare(x), target)).backward()
            for optimizer, scale in ((ours, scaler), (theirs, reference)):
                scale.step(optimizer)
                scale.update()
                optimizer.zero_grad()
    assert scaler.get_scale() == reference.get_scale()
    torch.testing.assert_close(list(model.parameters()), list(bare.parameters()))


class _Noisy(torch.optim.SGD):
    """Draws in each update, as stochastic-gradient Langevin dynamics does."""

    def step(self, closure=None):
        self.drawn = torch.rand(3)
        return super().step(closure)


async def test_an_optimizer_draws_from_the_default_generator(workload):
    model = workload.model()
    torch.manual_seed(0)
    torch.randint(0, 2**62, ())  # the step's own number
    wanted = torch.rand(3)
    torch.manual_seed(0)
    async with Pipeline(
        model,
        ["cpu:0"],
        microbatches=2,
        loss_fn=mse,
        optimizer=lambda parameters: _Noisy(parameters, lr=0.1),
    ) as pipe:
        await pipe.step(workload.x, workload.target)
    assert torch.equal(pipe.optimizers[0].drawn, wanted)


async def test_a_step_sets_the_learning_rate_and_tells_the_norms(workload):
    model, bare = workload.model(), workload.model()
    optimizer = adamw(bare.parameters())
    options = {"microbatches": 3, "loss_fn": mse, "gradient_norms": True}
    rates = [0.3, 0.1, None, 0.02]

    def batches():
        return (Batch(workload.x, workload.target, learning_rate=rate) for rate in rates)

    async with Pipeline(model, ["cpu:0", "cpu:1"], optimizer=adamw, **options) as pipe:
        stages = [list(stage.module.parameters()) for stage in pipe.stages]
        at = [0, *accumulate(map(len, stages))]
        results = [result async for result in pipe.steps(batches())]
    for rate, result in zip(rates, results, strict=True):
        mse(bare(workload.x), workload.target).backward()
        optimizer.param_groups[0]["lr"] = rate or optimizer.param_groups[0]["lr"]
        gradients = [parameter.grad for parameter in bare.parameters()]
        for stage, norm in result.gradient_norms.items():
            expected = nn.utils.get_total_norm(gradients[at[stage] : at[stage + 1]])
            assert abs(norm - expected) < 1e-10
        assert list(result.gradient_norms) == [0, 1]
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-10
    async with Pipeline(model, ["cpu:0"], microbatches=2, loss_fn=mse) as pipe:
        with pytest.raises(OptionError, match="learning_rate is for the pipeline's own optimizers"):
            await pipe.step(workload.x, workload.target, learning_rate=0.1)
        assert (await pipe.step(workload.x, workload.target)).gradient_norms == {}


@pytest.mark.promise(
    "Killed and resumed",
    "Optimizer states can be loaded with other stages, devices and workers: parameters are matched by name.",
)
async def test_what_optimizers_remember_goes_to_other_stages(workload):
    ends = []
    for devices in (["cpu:0", "cpu:1"], ["cpu:0"]):
        async with Pipeline(
            workload.model(), ["cpu:0", "cpu:1"], microbatches=3, loss_fn=mse, optimizer=adamw
        ) as first:
            await first.step(workload.x, workload.target)
            states = first.optimizer_states()
            assert list(states) == [name for name, _ in first.named_parameters()]
        model = workload.model()
        async with Pipeline(model, devices, microbatches=3, loss_fn=mse, optimizer=adamw) as then:
            then.load_state_dict(first.state_dict())
            then.load_optimizer_states(states)
            before = states["0.weight"]["exp_avg"].clone()
            await then.step(workload.x, workload.target)
            assert torch.equal(states["0.weight"]["exp_avg"], before)
            ends.append(then.state_dict() | {name: s["exp_avg"] for name, s in then.optimizer_states().items()})
            then.load_optimizer_states({}, strict=False)
            assert then.optimizer_states() == {}
    for name, value in ends[0].items():
        assert (value - ends[1][name]).abs().max() < 1e-10


@pytest.mark.promise(
    "Refused, not wrong", "States of optimizers whose names or shapes do not fit are refused, and nothing is changed."
)
@pytest.mark.parametrize("workers", ["threads", "processes"])
async def test_states_of_optimizers_that_do_not_fit_are_refused_and_those_of_a_plain_optimizer_are_split(
    workload, workers
):
    bare = workload.model()
    plain = adamw(bare.parameters())
    mse(bare(workload.x), workload.target).backward()
    plain.step()
    options = {"microbatches": 3, "loss_fn": mse, "optimizer": adamw, "workers": workers}
    async with Pipeline(workload.model(), ["cpu:0", "cpu:1"], **options) as pipe:
        await pipe.step(workload.x, workload.target)
        before = pipe.optimizer_states()
        short = {name: state for name, state in before.items() if name != "0.weight"}
        wide = {**before, "0.weight": {"exp_avg": torch.zeros(1000, 2)}}
        for wrong, text in (
            ({}, "would forget"),
            (short, "nothing of '0.weight' .1 such"),
            ({"nonsense": 1}, "no parameter 'nonsense'"),
            ({**before, "0.weight": 1}, "must be a dict, got int"),
            (wide, "'exp_avg' of '0.weight' has the shape .1000, 2."),
            (torch.optim.SGD([torch.zeros(1)]).state_dict(), "has 1 parameters in 1 groups, and does not say"),
        ):
            with pytest.raises(StateDictError, match=text):
                pipe.load_optimizer_states(wrong)
        for name, state in pipe.optimizer_states().items():
            assert all(torch.equal(value, before[name][key]) for key, value in state.items())
        pipe.load_optimizer_states(plain.state_dict())
        for number, state in enumerate(pipe.optimizer_states().values()):
            assert all(torch.equal(value, plain.state_dict()["state"][number][key]) for key, value in state.items())
