"""What foreign code does in stages and around steps: as in the unsplit model, or it is refused."""

from __future__ import annotations

import contextvars
import copy
import functools
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from asyncpipe import Pipeline, TaskError
from asyncpipe.errors import ArgumentTypeError, BackwardError, BatchError, LossError, OptionError, StageError

mse = nn.functional.mse_loss
DEVICES = ["cpu:0", "cpu:1"]
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGET = torch.zeros(8, 6, dtype=torch.float64)
MODES = ("never", "always", "except_last", "selective")


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *more, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def check(model: nn.Module, x: torch.Tensor = X, **options) -> None:
    """One step has the gradients of the unsplit model."""
    bare = copy.deepcopy(model)
    mse(bare(x), TARGET).backward()
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, **options).sync() as pipe:
        pipe.step(x, TARGET)
    for mine, theirs in zip(gradients(model), gradients(bare), strict=True):
        assert (mine - theirs).abs().max() < 1e-10


class Marked(torch.Tensor):
    """A subclass, whose functions return it."""


@pytest.mark.promise("Right results", "Mini-batches and outputs of stages may be of a subclass of `Tensor`.")
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zbv", "v-half", "v-min", "interleaved-zb", "dualpipev"])
def test_subclasses_of_tensor_have_their_gradients_in_split_backwards(schedule):
    torch.manual_seed(0)
    many = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))).double()
    check(many, X.as_subclass(Marked), schedule=schedule)


class Reversed(nn.Module):
    """Reverses and halves the gradient of what it receives, by a hook."""

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * -0.5)
        return x * 2


@pytest.mark.promise(
    "Your own program", "A hook that a stage registers on its input runs once in every recomputation mode."
)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_hook_of_what_a_stage_receives_runs_once(schedule, checkpoint):
    # Behind a border: the second stage begins with it.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Reversed(), nn.Linear(6, 6)).double()
    check(model, balance=[1, 2], schedule=schedule, checkpoint=checkpoint)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Cached(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with parametrize.cached():
            return self.inner(self.inner(x))


def parametrized() -> nn.Linear:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


@pytest.mark.promise(
    "Refused, not wrong",
    "`torch.nn.utils.parametrize.cached()` around a step or in a stage is refused before a wrong gradient is made.",
)
@pytest.mark.parametrize("checkpoint", MODES)
def test_cached_parametrizations_are_refused(checkpoint):
    check(layers(parametrized()), checkpoint=checkpoint)
    model = layers(Cached(parametrized()))
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, checkpoint=checkpoint).sync() as pipe:
        with pytest.raises(TaskError) as caught:
            pipe.step(X, TARGET)
        assert isinstance(caught.value.__cause__, StageError)
        assert "leave cached() out of the forward" in str(caught.value.__cause__)
    with Pipeline(layers(parametrized()), DEVICES, microbatches=4, loss_fn=mse).sync() as pipe:
        with parametrize.cached(), pytest.raises(OptionError, match="leave it before the call"):
            pipe.step(X, TARGET)
        pipe.step(X, TARGET)


@pytest.mark.promise(
    "Refused, not wrong",
    "An input or parameter that is overwritten before the backward needs it is refused, as torch refuses it.",
)
@pytest.mark.parametrize("checkpoint", MODES)
def test_an_input_that_is_overwritten_before_the_backward_is_refused_as_torch_does(checkpoint):
    with Pipeline(layers(), DEVICES, microbatches=4, checkpoint=checkpoint).sync() as pipe:
        x = X.clone()
        loss = pipe(x).sum()
        x.mul_(2)
        with pytest.raises(BackwardError, match=r"a tensor given to pipe\(x\), of shape \(2, 6\), was overwritten"):
            loss.backward()
        assert all(gradient is None for gradient in gradients(pipe.module))


@pytest.mark.promise(
    "Refused, not wrong",
    "An input or parameter that is overwritten before the backward needs it is refused, as torch refuses it.",
)
@pytest.mark.parametrize("checkpoint", MODES)
def test_weights_that_are_updated_before_the_backward_are_refused_as_torch_does(checkpoint):
    with Pipeline(layers(), DEVICES, microbatches=4, checkpoint=checkpoint).sync() as pipe:
        loss = pipe(X).sum()
        with torch.no_grad():
            for parameter in pipe.module.parameters():
                parameter.mul_(1 + 1e-6)
        with pytest.raises((BackwardError, TaskError)):
            loss.backward()


@pytest.mark.promise(
    "Refused, not wrong", "A layer that was replaced, added or removed after the pipeline was made is refused."
)
def test_a_layer_that_is_replaced_after_the_pipeline_was_made_is_refused():
    model = layers()
    with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse).sync() as pipe:
        pipe.step(X, TARGET)
        old = model[2]
        model[2] = nn.Linear(6, 6).double()
        for call in (lambda: pipe.step(X, TARGET), lambda: pipe(X)):
            with pytest.raises(OptionError, match="make the pipeline again"):
                call()
        model[2] = old
        pipe.step(X, TARGET)


def _partial(x):
    return functools.partial(torch.mul, x)


def _closure(x):
    return lambda y: x * y


def _method(x):
    return x.mul


class Gives(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return x, self.make(x)


class Calls(nn.Module):
    def forward(self, pair):
        return pair[1](pair[0])


@pytest.mark.promise("Refused, not wrong", "An object that hides tensors is refused by the name of its class.")
@pytest.mark.parametrize("make", [_partial, _closure, _method])
def test_tensors_inside_functions_between_stages_are_refused(make):
    model = nn.Sequential(nn.Linear(6, 6), Gives(make), Calls()).double()
    with (
        Pipeline(model, DEVICES, microbatches=4, balance=[2, 1], loss_fn=mse).sync() as pipe,
        pytest.raises(TaskError, match="holds tensors that a pipeline cannot see"),
    ):
        pipe.step(X, TARGET)


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generators = [torch.Generator().manual_seed(5)]

    def forward(self, x):
        return x * torch.randn(x.shape, dtype=x.dtype, generator=self.generators[0])


@pytest.mark.promise(
    "Bit-identical results", "The numbers of a `torch.Generator` that a module holds are replayed by a recomputation."
)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_generator_of_a_module_is_replayed_in_a_recomputation(checkpoint):
    def trained(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Noise(), nn.Linear(6, 6), Noise()).double()
        options = {"schedule": "gpipe", "checkpoint": mode, "balance": [2, 2]}
        with Pipeline(model, DEVICES, microbatches=4, loss_fn=mse, **options).sync() as pipe:
            losses = [pipe.step(X, TARGET).loss for _ in range(2)]
        return [*losses, *gradients(model), *(layer.generators[0].get_state() for layer in (model[1], model[3]))]

    assert all(map(torch.equal, trained("never"), trained(checkpoint)))


REQUEST = contextvars.ContextVar("request", default="none")


class Asks(nn.Module):
    seen: ClassVar[list[str]] = []

    def forward(self, x):
        self.seen.append(REQUEST.get())
        return x + torch.zeros(()).to(x)


@pytest.mark.promise("Your own program", "Context variables of the caller have their values in its tasks on threads.")
def test_context_variables_of_the_caller_reach_its_tasks():
    Asks.seen = []
    with Pipeline(layers(Asks()), DEVICES, microbatches=2, loss_fn=mse, checkpoint="always").sync() as pipe:
        for name in ("one", "two"):
            token = REQUEST.set(name)
            pipe.step(X, TARGET)
            REQUEST.reset(token)
        pipe.step(X, TARGET)
        contextvars.copy_context().run(lambda: (REQUEST.set("call"), pipe(X).sum().backward()))
    assert Asks.seen == ["one"] * 4 + ["two"] * 4 + ["none"] * 4 + ["call"] * 4


class Makes(nn.Module):
    devices: ClassVar[set[str]] = set()

    def forward(self, x):
        self.devices.add(torch.empty(1).device.type)
        return x


@pytest.mark.promise("Your own program", "The default device of the caller holds in its tasks.")
def test_the_default_device_of_the_caller_reaches_its_tasks():
    Makes.devices = set()
    with Pipeline(layers(Makes()), DEVICES, microbatches=2, loss_fn=mse).sync() as pipe, torch.device("meta"):
        pipe.step(X, TARGET)
    assert Makes.devices == {"meta"}


class Loud(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.promise("Refused, not wrong", "A step inside a mode of torch that would not see other threads is refused.")
@pytest.mark.parametrize("mode", [Loud, lambda: FlopCounterMode(display=False)], ids=["functions", "dispatch"])
def test_modes_of_the_caller_are_refused(mode):
    with Pipeline(layers(), DEVICES, microbatches=2, loss_fn=mse).sync() as pipe:
        for call in (lambda: pipe.step(X, TARGET), lambda: pipe(X)):
            with mode(), pytest.raises(OptionError, match="is active on the thread that called"):
                call()
        pipe.step(X, TARGET)


# Mistakes


def test_mistakes_of_newcomers_are_told_with_what_to_write(caplog):
    model = layers()
    options = {"microbatches": 4, "loss_fn": mse}
    with pytest.raises(ArgumentTypeError, match=r"use 'with pipe.sync\(\) as pipe:'"):
        Pipeline(model, DEVICES, **options).__enter__()
    with pytest.raises(ArgumentTypeError, match=r"has no argument 'microbatch'; did you mean 'microbatches'\?"):
        Pipeline(model, DEVICES, microbatch=4)
    with pytest.raises(ArgumentTypeError, match=r"has no argument 'loss'; did you mean 'loss_fn'\?"):
        Pipeline(model, DEVICES, microbatches=4, loss=mse)
    with pytest.raises(ArgumentTypeError, match=r"has no argument 'hang'; did you mean 'hang_seconds'\?"):
        Pipeline(model, DEVICES, microbatches=4, hang=5)
    with pytest.raises(ArgumentTypeError, match="missing a required argument: 'microbatches'"):
        Pipeline(model, DEVICES)
    with pytest.raises(OptionError, match=r"give optimizer=lambda parameters: torch.optim.SGD\(parameters, ...\)"):
        Pipeline(model, DEVICES, **options, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with Pipeline(model, DEVICES, **options).sync() as pipe:
        with pytest.raises(BatchError, match=r"give step\(x, target\)"):
            pipe.step(X)
        assert not caplog.records
        for _ in range(2):
            pipe.step(X[:3], TARGET[:3])
        assert [record.message.partition(",")[0] for record in caplog.records] == [
            "a mini-batch of 3 samples makes 3 micro-batches where microbatches=4"
        ]


async def test_a_pipeline_without_await_is_not_opened_with_await():
    with pytest.raises(ArgumentTypeError, match="use 'with', or 'async with' the pipeline itself"):
        async with Pipeline(layers(), DEVICES, microbatches=4, loss_fn=mse).sync():
            pass


@pytest.mark.promise(
    "Reported, not silent",
    "A loss that is not a number is logged once, raised as a `LossError`, or ignored, as you choose.",
)
@pytest.mark.parametrize("workers", ["threads", "processes"])
async def test_a_loss_that_is_not_a_number_is_told_once_or_raised_or_ignored(caplog, workers):
    bad = torch.full_like(X, torch.nan)
    options = {"microbatches": 4, "loss_fn": mse, "workers": workers}
    if workers == "processes":
        options["optimizer"] = torch.optim.SGD
    told = {}
    for on_nan in ("warn", "ignore"):
        async with Pipeline(layers(), DEVICES, **options, on_nan=on_nan) as pipe:
            await pipe.step(X, TARGET)
            caplog.clear()
            for _ in range(2):
                assert (await pipe.step(bad, TARGET)).loss.isnan()
            told[on_nan] = len([record for record in caplog.records if "not a number" in record.message])
    assert told == {"warn": 1, "ignore": 0}
    async with Pipeline(layers(), DEVICES, **options, on_nan="raise") as pipe:
        with pytest.raises(LossError, match="not a number"):
            await pipe.step(bad, TARGET)
        if workers == "threads":
            assert all(gradient is None for gradient in gradients(pipe.module))
