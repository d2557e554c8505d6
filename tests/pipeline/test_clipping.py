"""Clipping, learning rate schedules and parameter groups: torch's own on the unsplit model, and what is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from asyncpipe import DevicePool, LearningRates, Pipeline, StageFactory
from asyncpipe.core.kinds import TaskKind
from asyncpipe.errors import OptionError, StateDictError, TaskError
from tests.campaigns.clipping import CAMPAIGN, Case, differ, reference, trained
from tests.campaigns.harness import in_short

MSE = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.5)
CASES = {
    "gpipe": Case(schedule="gpipe", checkpoint="always", rates="lambda"),
    "1f1b, the first stage has no optimizer": Case(frozen=True, ahead=1),
    "interleaved": Case(schedule="interleaved", devices=2, ahead=2, loss="sum"),
    "zb-h1, counted": Case(schedule="zb-h1", loss="counted", checkpoint="never"),
    "zbv": Case(schedule="zbv", devices=2, rates="by step"),
    "a rule": Case(schedule="backward-first", optimizer="momentum"),
    "tied": Case(tie=True, rates="by step", groups=False),
    "by value": Case(clip="value", most=0.01, ahead=1),
    "replicas": Case(devices=2, replicas=2, loss="counted"),
    "shards": Case(devices=2, replicas=2, shards=True, rates="by step"),
}


@pytest.mark.promise(
    "Right results",
    "Clipping, learning rates and parameter groups inside the step give the numbers of torch on the unsplit model.",
)
@pytest.mark.parametrize("name", CASES)
async def test_norms_rates_and_weights_are_those_of_the_unsplit_model(name):
    case = CASES[name]
    case = replace(case, updates=(True,) * 3) if case.ahead is not None else case
    assert not differ(await trained(case), reference(case))


@pytest.mark.promise(
    "Right results",
    "Clipping, learning rates and parameter groups inside the step give the numbers of torch on the unsplit model.",
)
@pytest.mark.parametrize("name", ["1f1b, the first stage has no optimizer", "tied", "by value", "shards"])
async def test_workers_send_numbers(name):
    case = CASES[name]
    case = replace(case, updates=(True,) * 3) if case.ahead is not None else case
    workers = {f"cpu:{number}": "abc"[number % 3] for number in range(4)}
    async with DevicePool(workers=workers) as pool:
        assert not differ(await trained(case, pool=pool), reference(case))


@pytest.mark.timeout(120)
def test_random_cases_in_short():
    report = in_short(CAMPAIGN, cases=4, here=True)
    assert not report.findings, report


def layers(devices=("cpu:0", "cpu:1"), **options):
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    return Pipeline(model, devices, **{"microbatches": 2, "loss_fn": MSE, "optimizer": SGD, **options})


X, TARGET = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


async def test_norms_of_stages_are_those_before_clipping():
    async with layers(clip_grad_norm=1e-3, gradient_norms=True) as pipe:
        result = await pipe.step(X, TARGET)
        assert result.gradient_norms.keys() == {0, 1}
        torch.testing.assert_close(result.gradient_norm, nn.utils.get_total_norm(list(result.gradient_norms.values())))
        assert result.gradient_norm > 0.1
        accumulated = await pipe.step(X, TARGET, update=False)
        assert (accumulated.gradient_norm, accumulated.learning_rate) == (None, None)
        assert [task for task in accumulated.record.graph.tasks if task.kind is TaskKind.NORM] == []


@pytest.mark.promise(
    "Bit-identical results",
    "On CPUs the gradient norm is bit-identical to that of `clip_grad_norm_`, wherever the model is cut.",
)
@pytest.mark.parametrize("balance", [[2, 2], [1, 3], [1, 1, 1, 1]])
async def test_the_norm_has_the_bits_of_torch_wherever_the_model_is_cut(balance):
    devices = [f"cpu:{stage}" for stage in range(len(balance))]
    async with layers(devices=devices, balance=balance, parameter_groups=decayed, clip_grad_norm=1e-3) as pipe:
        norms = [(await pipe.step(X * scale, TARGET)).gradient_norm for scale in range(1, 9)]
        clipped = pipe.state_dict()
    async with layers(optimizer=None) as pipe:
        biases = [parameter for parameter in pipe.parameters() if parameter.ndim < 2]
        weights = [parameter for parameter in pipe.parameters() if parameter.ndim > 1]
        optimizer = SGD([{"params": biases}, {"params": weights, "weight_decay": 0.1}])
        for scale, norm in enumerate(norms, 1):
            await pipe.step(X * scale, TARGET)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3))
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, pipe.state_dict().values(), clipped.values()))


async def test_a_norm_that_is_not_finite_makes_weights_nan_as_in_torch():
    async with layers(clip_grad_norm=1.0, on_nan="ignore") as pipe:
        result = await pipe.step(X * torch.inf, TARGET)
        assert result.gradient_norm.isnan()
        assert all(value.isnan().all() for value in pipe.state_dict().values())


@pytest.mark.promise(
    "A step that fails",
    "If a step fails after some gradient norms were computed, gradients stay as they were before the step.",
)
@pytest.mark.parametrize("undo_updates", [False, True])
@pytest.mark.parametrize("kind", [TaskKind.NORM, TaskKind.UPDATE])
async def test_a_step_that_fails_behind_a_norm_leaves_earlier_gradients(before_task, kind, undo_updates):
    """The norm of one stage is taken, and its gradients are complete, when the other stage fails."""
    stepped = threading.Event()

    def halved(step):
        if step:  # The other stage is updated, and its schedule goes on.
            stepped.set()
        return 0.5**step

    options = {"undo_updates": undo_updates, "lr_schedule": partial(LambdaLR, lr_lambda=halved)}
    async with layers(clip_grad_norm=1e-3, **options) as pipe, layers(clip_grad_norm=1e-3, **options) as other:
        for each in (pipe, other):
            await each.step(X, TARGET, update=False)
        before = [parameter.grad.clone() for parameter in pipe.parameters()]

        def fail(task):
            if task.kind is kind and task.stage == 0:
                assert kind is TaskKind.NORM or stepped.wait(30)
                raise ValueError("no")

        before_task(fail)
        with pytest.raises(TaskError):
            await pipe.step(X * 2, TARGET)
        updated = kind is TaskKind.UPDATE and not undo_updates
        assert pipe.optimizers[1].param_groups[0]["lr"] == (0.25 if updated else 0.5)
        assert all(map(torch.equal, pipe.state_dict().values(), other.state_dict().values())) is not updated
        after = [parameter.grad for parameter in pipe.parameters()]
        assert all(map(torch.equal, before[:4], after[:4]))
        if kind is TaskKind.NORM:
            assert all(map(torch.equal, before, after))
            before_task(lambda _: None)
            rates = [(await each.step(X, TARGET)).learning_rate for each in (pipe, other)]
            assert rates == [0.5, 0.5]
            assert all(map(torch.equal, pipe.state_dict().values(), other.state_dict().values()))


def onecycle(optimizer):
    return OneCycleLR(optimizer, max_lr=[0.3] * len(optimizer.param_groups), total_steps=20)


def decayed(name, parameter):
    return {"weight_decay": 0.0} if name.endswith("bias") else {"weight_decay": 0.1}


@pytest.mark.promise(
    "Killed and resumed", "The state of a learning-rate schedule can be loaded into another split of the model."
)
@pytest.mark.parametrize("workers", [("threads", "threads"), ("processes", "threads"), ("threads", "processes")])
async def test_the_state_of_schedules_goes_on_with_another_cut(workers):
    """Momentum, too, which this scheduler changes; a stage without parameters of a group has the group."""
    options = {"lr_schedule": onecycle, "parameter_groups": decayed, "optimizer": partial(SGD, momentum=0.9)}
    rates, weights, state = [], [], []
    for steps, cuts in ((4, [([2, 2], "threads")]), (2, [([2, 2], workers[0]), ([1, 3], workers[1])])):
        state = []
        for balance, where in cuts:
            async with layers(balance=balance, workers=where, **options) as pipe:
                for load, value in zip((pipe.load_state_dict, pipe.load_optimizer_states), state[:2], strict=False):
                    load(value)
                if state:
                    pipe.load_schedule_states(state[2])
                rates += [(await pipe.step(X, TARGET)).learning_rate for _ in range(steps)]
                state = [pipe.state_dict(), pipe.optimizer_states(), pipe.schedule_states()]
        weights.append({name: value.clone() for name, value in state[0].items()})
    assert rates[:4] == rates[4:]
    assert len(set(rates)) == 4
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    async with layers() as pipe:
        assert pipe.schedule_states() == {}
        with pytest.raises(StateDictError, match="has no lr_schedule, as the state has"):
            pipe.load_schedule_states(state[2])
    async with layers(lr_schedule=onecycle) as pipe:
        with pytest.raises(StateDictError, match="not that of a schedule over 1 parameter groups"):
            pipe.load_schedule_states(state[2])


@pytest.mark.parametrize("workers", ["threads", pytest.param("processes", marks=pytest.mark.long)])
async def test_a_scheduler_of_transformers_works_as_it_is(workers):
    transformers = pytest.importorskip("transformers")
    make = partial(transformers.get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=5)
    optimizer, rates = SGD([nn.Parameter(torch.ones(1))]), []
    schedule = make(optimizer)
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    async with layers(lr_schedule=make, workers=workers) as pipe:
        assert [result.learning_rate async for result in pipe.steps([(X, TARGET)] * 4)] == rates


async def test_a_schedule_is_chosen_by_measuring_with_all_of_it():
    options = {"schedule": "auto", "sample": (X, TARGET), "clip_grad_norm": 1.0, "parameter_groups": decayed}
    async with layers(**options, lr_schedule=onecycle) as pipe:
        assert (await pipe.step(X, TARGET)).gradient_norm > 0


def make_stage(stage):
    return nn.Sequential(nn.Linear(4, 4).double(), nn.Identity() if stage else nn.LayerNorm(4).double())


async def test_stages_that_workers_build_have_the_same_groups():
    """Each worker knows the other stages' names and shapes."""
    factory = StageFactory(make_stage, stages=2, seed=3)
    options = {"microbatches": 2, "loss_fn": MSE, "optimizer": SGD, "parameter_groups": decayed}
    states = []
    for workers in ("threads", "processes"):
        async with Pipeline(factory, ["cpu:0", "cpu:1"], workers=workers, clip_grad_norm=0.1, **options) as pipe:
            results = [await pipe.step(X, TARGET) for _ in range(2)]
            states.append([*pipe.state_dict().values(), *(result.gradient_norm for result in results)])
    assert all(map(torch.equal, *states))


async def test_optimizers_get_groups_with_names():
    async with layers(parameter_groups=lambda name, _: {"lr": 0.1} if name == "3.bias" else {}) as pipe:
        for stage, names in ((0, [["0.weight", "0.bias", "1.weight", "1.bias"], []]), (1, None)):
            groups = pipe.optimizers[stage].param_groups
            assert [group["lr"] for group in groups] == [0.5, 0.1]
            assert names is None or [group["param_names"] for group in groups] == names
        await pipe.step(X, TARGET, learning_rate=0.05)
        assert [group["lr"] for group in pipe.optimizers[1].param_groups] == pytest.approx([0.05, 0.01])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_grad_norm": 1.0, "optimizer": None}, "clip_grad_norm is for the pipeline's own optimizers"),
        ({"lr_schedule": onecycle, "optimizer": None}, "lr_schedule is for the pipeline's own optimizers"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be a positive number, got 0.0"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "give one of them"),
        ({"lr_schedule": 0.1}, "lr_schedule must be a function, which is called where the stages are, got float"),
        ({"lr_schedule": lambda step: 0.1}, "from an optimizer to a torch scheduler.*; it returned float"),
        ({"lr_schedule": lambda step: 0.1 / step}, "; it raised TypeError"),
        ({"lr_schedule": ReduceLROnPlateau}, "ReduceLROnPlateau needs a figure that no stage has"),
        ({"parameter_groups": lambda name, _: 0.1}, "must return a dict .* returned 0.1 for '0.weight'"),
    ],
)
def test_what_is_refused_when_a_pipeline_is_made(options, message):
    with pytest.raises(OptionError, match=message):
        layers(**options)


@pytest.mark.parametrize(
    ("step", "message"),
    [({"learning_rate": 0.1}, "that of the pipeline's lr_schedule"), ({"scaler": "cpu"}, "give update=False")],
)
async def test_what_is_refused_of_a_step(step, message):
    step = {key: torch.amp.GradScaler(value) if key == "scaler" else value for key, value in step.items()}
    async with layers(lr_schedule=LearningRates(lambda _: 0.1)) as pipe:
        with pytest.raises(OptionError, match=message):
            await pipe.step(X, TARGET, **step)
