"""Where a traced model is cut, and the errors for splits, models and arguments that do not fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from asyncpipe.errors import BatchError, OptionError, StageError, TraceError
from asyncpipe.ops.model.batchnorm import convert_deferred_batch_norm
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.trace import trace

Check = Callable[[nn.Module, StagedModel, Arguments], Any]

pytestmark = pytest.mark.usefixtures("seeded")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


# Splits


def test_parameters_are_spread_evenly_at_the_borders_of_blocks() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)))
    staged = trace(model, Arguments.of(torch.randn(2, 8)), 2)
    names = [list(dict(stage.named_parameters())) for stage in staged.stages]
    assert [name[0] for name in names[0]] == ["0"] * 4 + ["1"] * 4
    assert [name[0] for name in names[1]] == ["2"] * 4 + ["3"] * 4


@pytest.mark.parametrize(("stages", "parameters"), [(2, [6, 8]), (3, [4, 4, 6])])
def test_smaller_submodules_are_split_where_the_outer_ones_are_uneven(
    stages: int, parameters: list[int], check: Check
) -> None:
    body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model = nn.Sequential(body, nn.Linear(8, 1))
    staged = trace(model, Arguments.of(torch.randn(2, 8)), stages)
    assert [len(list(stage.parameters())) for stage in staged.stages] == parameters
    check(model, staged, Arguments.of(torch.randn(5, 8)))


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (["secnd"], "no submodule 'secnd' to split at; near it are second; good ones to split at are second, third"),
        (["first"], "nothing is computed between the model's beginning and the beginning of 'first' in train mode"),
        ({"third": SplitPoint.END}, "between the end of 'third' and the model's end"),
        (["second", "second"], "between the beginning of 'second' and the beginning of 'second'"),
        ([""], "no submodule ''"),
        (5, "5 stages need 4 cuts, but the model's submodules begin at only 2 places"),
        (0, "split must be at least 1 stage, got 0"),
        ("second", "split must be a number of stages, a list of submodules' names"),
        ({"second": "END"}, "split must be a number of stages, a list of submodules' names"),
    ],
)
def test_splits_that_cannot_be(split: Any, told: str) -> None:
    with pytest.raises(TraceError) as raised:
        trace(Chain(), Arguments.of(torch.randn(2, 4)), split)
    assert told in str(raised.value)


def test_an_error_lists_where_a_deep_model_is_well_split() -> None:
    deep = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))), nn.Linear(4, 1))
    with pytest.raises(TraceError, match=r"at are 0\.1, 0\.2, 0\.3, 0\.4, 0\.5, 0\.6, 0\.7, 0\.8 and 4 more"):
        trace(deep, Arguments.of(torch.randn(2, 4)), ["nothing"])
    model = Chain()
    model.unused = nn.ReLU()
    with pytest.raises(TraceError, match="submodule 'unused' computes nothing in train mode, so the model cannot be"):
        trace(model, Arguments.of(torch.randn(2, 4)), ["unused"])


# Models


class Replacing(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.a(x)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Vectorized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.vmap(torch.sin)(x)
        return result


@pytest.mark.promise("Refused, not wrong", "Models that cannot be traced are refused.")
@pytest.mark.parametrize(
    ("model", "arguments", "told"),
    [
        (lambda: 3, Arguments.of(1), "the model must be a torch.nn.Module, got int"),
        (Chain, Arguments.of(), "the example does not fit Chain.forward: missing a required argument: 'x'"),
        (Chain, Arguments.of(3), "the example has no tensor"),
        (Branching, Arguments.of(torch.ones(2)), "Branching cannot be traced in train mode: GuardOnDataDependent"),
        (Replacing, Arguments.of(torch.ones(2, 3)), "replaces the buffer 'mean' by another tensor"),
        (Vectorized, Arguments.of(torch.ones(2, 3)), "a transform of torch.func"),
        (
            lambda: convert_deferred_batch_norm(nn.Sequential(nn.BatchNorm1d(3))),
            Arguments.of(torch.ones(2, 3)),
            "deferred batch norms",
        ),
    ],
)
def test_models_that_cannot_be_traced(model: Callable[[], Any], arguments: Arguments, told: str) -> None:
    with pytest.raises(TraceError) as raised:
        trace(model(), arguments, 1)
    assert told in str(raised.value)
    assert ("cannot be traced" in told) == (type(raised.value.__cause__).__name__.startswith("Guard"))


# Arguments that do not fit


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(9, 4)

    def forward(self, batch: dict[str, Any], mask: Tensor | None = None, kind: str = "sum", factor: int = 2) -> Tensor:
        x = self.a(batch["ids"]) * factor
        return x + mask[:, None, None] if mask is not None else x.view(batch["ids"].shape[0], 12)


IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.fixture(scope="module")
def picky(doubles: None) -> StagedModel:
    return trace(Picky(), Arguments.of({"ids": IDS}), 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (Arguments.of(), "do not fit Picky.forward: missing a required argument: 'batch'"),
        (Arguments.of({"ids": IDS}, other=3), "got an unexpected keyword argument 'other'"),
        (Arguments.of({}), "missing batch['ids']"),
        (Arguments.of({"ids": IDS, "more": [1]}), "extra batch['more'][0]"),
        (Arguments.of({"id": IDS}), "missing batch['ids'] and extra batch['id']"),
        (Arguments.of({"ids": IDS}, torch.ones(2)), "mask is a tensor, but was traced as None"),
        (Arguments.of({"ids": 3}), "batch['ids'] is 3, but was traced as a tensor"),
        (Arguments.of({"ids": IDS}, kind="mean"), "kind is 'mean', but was traced as 'sum'"),
        (Arguments.of({"ids": IDS}, factor=2.0), "factor is 2.0, but was traced as 2"),
        (Arguments.of({"ids": IDS.int()}), "batch['ids'] is a tensor of torch.int32 with 2 dimensions, but was traced"),
        (Arguments.of({"ids": IDS[0]}), "batch['ids'] is a tensor of torch.int64 with 1 dimensions"),
        (Arguments.of({"ids": IDS[:, :2]}), "the micro-batch has sizes that the trace is not for, which is for"),
    ],
)
def test_arguments_that_do_not_fit_the_trace(arguments: Arguments, told: str, picky: StagedModel) -> None:
    with pytest.raises(BatchError) as raised:
        picky.caller_values(arguments)
    assert told in str(raised.value)
    picky.caller_values(Arguments.of(kind="sum", batch={"ids": IDS.repeat(2, 1)}, factor=2, mask=None))


@pytest.mark.promise(
    "Refused, not wrong",
    "A trace takes any number of samples; sizes for which it is not valid are refused with the broken condition.",
)
def test_images_keep_their_sides_unless_all_sizes_may_differ() -> None:
    model, bigger = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), Arguments.of(torch.randn(3, 2, 7, 6))
    staged = trace(model, Arguments.of(torch.randn(2, 2, 6, 6)), 2)
    staged.caller_values(Arguments.of(torch.randn(5, 2, 6, 6)))
    with pytest.raises(BatchError, match=r"input.size\(\)\[2\] == 6; trace .* or with dynamic='all'"):
        staged.caller_values(bigger)
    trace(model, Arguments.of(torch.randn(2, 2, 6, 6)), 2, dynamic="all").caller_values(bigger)


@pytest.mark.promise(
    "Refused, not wrong",
    "A trace takes any number of samples; sizes for which it is not valid are refused with the broken condition.",
)
def test_with_a_batch_only_the_number_of_samples_may_differ() -> None:
    staged = trace(
        nn.Sequential(nn.Tanh(), nn.ReLU()), Arguments.of(torch.randn(5, 2)), 2, dynamic="batch", batch_dim=1
    )
    staged.caller_values(Arguments.of(torch.randn(5, 3)))
    with pytest.raises(BatchError, match=r"input.size\(\)\[0\] == 5"):
        staged.caller_values(Arguments.of(torch.randn(4, 3)))
    with pytest.raises(OptionError, match="dynamic must be"):
        trace(nn.Tanh(), Arguments.of(torch.randn(5, 2)), 1, dynamic="none")  # type: ignore[arg-type]


# What a trace would drop

HOOKS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "forward": (lambda module: module.register_forward_hook(lambda *_: None), "forward"),
    "before the backward": (lambda module: module.register_full_backward_pre_hook(lambda *_: None), "backward"),
}


@pytest.mark.promise(
    "Refused, not wrong",
    "A trace refuses hooks of modules; a hook that is registered after the trace is refused at the next step.",
)
@pytest.mark.parametrize(("register", "kind"), HOOKS.values(), ids=HOOKS.keys())
def test_hooks_of_modules_are_refused(register: Callable[[nn.Module], Any], kind: str) -> None:
    model = Chain()
    register(model.second)
    with pytest.raises(TraceError, match=f"submodule 'second' has a {kind} hook, which the stages of a trace would"):
        trace(model, Arguments.of(torch.randn(2, 4)), ["second"])


@pytest.mark.promise("Right results", "A trace contains the effect of torch's own hooks.")
@pytest.mark.filterwarnings("ignore:The tensor attribute self.model.second.weight was assigned")
def test_hooks_of_torch_are_traced(check: Check) -> None:
    model = Chain()
    nn.utils.spectral_norm(model.second)
    staged = trace(model, Arguments.of(torch.randn(2, 4)), ["second"])
    check(model, staged, Arguments.of(torch.randn(2, 4)))


@pytest.mark.promise(
    "Refused, not wrong",
    "A trace refuses hooks of modules; a hook that is registered after the trace is refused at the next step.",
)
def test_a_hook_that_is_registered_later_is_refused() -> None:
    model = Chain()
    staged = trace(model, Arguments.of(torch.randn(2, 4)), ["second"])
    arguments = Arguments.of(torch.randn(3, 4))
    staged.caller_values(arguments)
    handle = model.second.register_forward_hook(lambda *_: None)
    with pytest.raises(StageError, match="submodule 'second' got a hook after the model was traced, which its stages"):
        staged.caller_values(arguments)
    handle.remove()
    staged.caller_values(arguments)


@pytest.mark.promise(
    "Refused, not wrong",
    "A trace refuses hooks of modules; a hook that is registered after the trace is refused at the next step.",
)
def test_hooks_of_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(TraceError, match="a hook of all modules"):
            trace(Chain(), Arguments.of(torch.randn(2, 4)), ["second"])
    finally:
        handle.remove()


DRAWS: dict[str, tuple[Callable[[Any], float], str]] = {
    "random": (lambda _: random.random(), "Python's random module"),
    "numpy": (lambda _: float(numpy.random.uniform()), "numpy.random"),
    "the module's own": (lambda own: own.random(), "its generator"),
    "the module's own of numpy": (lambda own: float(own.random()), "its generator"),
}


@pytest.mark.promise(
    "Refused, not wrong",
    "A model whose forward draws from `random` or numpy is not traced: the trace would freeze the numbers.",
)
@pytest.mark.parametrize(("draw", "told"), DRAWS.values(), ids=DRAWS.keys())
def test_draws_of_python_are_refused(draw: Callable[[Any], float], told: str) -> None:
    class Draws(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.generator = numpy.random.default_rng(1) if "numpy" in draws else random.Random(1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + draw(self.generator) if self.training else 1)

    draws = next(name for name, (one, _) in DRAWS.items() if one is draw)
    with pytest.raises(TraceError, match=f"the forward draws random numbers from {told} in train mode, which would"):
        trace(Draws(), Arguments.of(torch.randn(2, 4)), 2)


@pytest.mark.promise("Refused, not wrong", "A trace refuses hooks of tensors.")
def test_hooks_of_tensors_are_refused() -> None:
    class Hooked(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y.register_hook(lambda gradient: 2 * gradient)
            return self.third(self.second(y))

    with pytest.raises(TraceError, match="submodule '1' registers a hook on a tensor, which a trace would drop"):
        trace(nn.Sequential(nn.Linear(4, 4), Hooked()), Arguments.of(torch.randn(2, 4)), ["1"])
