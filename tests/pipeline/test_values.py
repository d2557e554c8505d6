"""Values between stages, and inputs, targets and outputs: dataclasses and named tuples travel like dicts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from asyncpipe import NoChunk, Pipeline, TaskError
from asyncpipe.errors import BatchError, StageError
from asyncpipe.ops.autograd.checkpoint import is_recomputing

MODES = ("always", "except_last", "selective", "never")
mse = nn.functional.mse_loss


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    hidden: Tensor
    step: int = 0


@dataclasses.dataclass
class State:
    inner: Inner
    residual: Tensor
    names: list[str] = dataclasses.field(default_factory=list)
    scale: Tensor | None = None


class Pair(NamedTuple):
    state: State
    rest: Any


class Layer(nn.Module):
    """Takes and returns a value of the class that ``wrap`` makes; both tensors in it get gradients."""

    def __init__(self, wrap, unwrap):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, value):
        hidden, residual = self.unwrap(value)
        return self.wrap((self.linear(hidden) + residual).tanh(), residual * hidden)


def of_state(value):
    return value.inner.hidden, value.residual


KINDS = {
    "dataclass": (lambda a, b: State(Inner(a, 1), b, ["x"]), of_state),
    "named tuple": (lambda a, b: Pair(State(Inner(a), b, scale=b), None), lambda value: of_state(value.state)),
    "dict": (lambda a, b: {"state": State(Inner(a), b)}, lambda value: of_state(value["state"])),
}


def pipeline(model, **options):
    return Pipeline(model, ["cpu:0", "cpu:1", "cpu:2"], **{"microbatches": 3, "schedule": "gpipe"} | options)


def assert_close(ours, theirs):
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine - yours).abs().max() < 1e-10


def loss_of(value, target):
    hidden, residual = value
    return mse(hidden, target.inner.hidden) + mse(residual, target.residual)


@pytest.mark.promise(
    "Right results", "Tensors in containers and dataclasses travel between stages with their gradients."
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("face", ["step", "call"])
def test_gradients_through_dataclasses(mode, kind, face):
    wrap, unwrap = KINDS[kind]
    model = nn.Sequential(*(Layer(wrap, unwrap) for _ in range(3))).double()
    torch.manual_seed(5)
    tensors = [torch.randn(6, 6, dtype=torch.float64) for _ in range(4)]
    value, target = wrap(*tensors[:2]), State(Inner(tensors[2]), tensors[3])
    bare = model(value)
    loss_of(unwrap(bare), target).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with pipeline(model, checkpoint=mode, loss_fn=lambda out, to: loss_of(unwrap(out), to)).sync() as pipe:
        if face == "step":
            outputs = pipe.step(value, target).outputs
        else:
            outputs = pipe(value)
            loss_of(unwrap(outputs), target).backward()
    assert type(outputs) is type(bare)
    assert_close(unwrap(outputs), unwrap(bare))
    assert_close([parameter.grad for parameter in model.parameters()], wanted)


@pytest.mark.promise(
    "Right results", "Tensors in containers and dataclasses travel between stages with their gradients."
)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_inputs_in_a_dataclass(mode):
    made = []
    model = nn.Sequential(*(Layer(*KINDS["dataclass"]) for _ in range(3))).double()
    for split in (True, False):
        a, b, scale = (torch.ones(6, 6, dtype=torch.float64).cumsum(k % 2).requires_grad_() for k in range(3))

        class Scaled(nn.Module):
            def forward(self, state):
                whole = state.scale.tensor if isinstance(state.scale, NoChunk) else state.scale
                return dataclasses.replace(state, residual=state.residual * whole.mean())

        value = State(Inner(a), b, scale=NoChunk(scale))
        with pipeline(nn.Sequential(Scaled(), *model), balance=[2, 1, 1], checkpoint=mode).sync() as pipe:
            output = pipe(value) if split else nn.Sequential(Scaled(), *model)(value)
            output.inner.hidden.square().sum().backward()
        made.append([a.grad, b.grad, scale.grad])
    assert_close(*made)


class Opaque(nn.Module):
    def __init__(self, value_of):
        super().__init__()
        self.linear, self.value_of = nn.Linear(6, 6), value_of

    def forward(self, value):
        return self.value_of(self.linear(getattr(value, "x", value)))


@pytest.mark.promise("Refused, not wrong", "An object that hides tensors is refused by the name of its class.")
@pytest.mark.parametrize("mode", MODES)
def test_an_opaque_object_between_stages_is_refused(mode):
    """At the first forward: gradients would be wrong in some modes, and missing in others."""
    model = nn.Sequential(Opaque(lambda x: SimpleNamespace(x=x)), Opaque(lambda x: x), nn.Identity())
    with pipeline(model, checkpoint=mode).sync() as pipe, pytest.raises(TaskError) as raised:
        pipe(torch.zeros(6, 6))
    assert isinstance(raised.value.__cause__, StageError)
    assert "a value of the class types.SimpleNamespace holds tensors that a pipeline cannot see" in str(raised.value)


@pytest.mark.promise("Refused, not wrong", "An object that hides tensors is refused by the name of its class.")
@pytest.mark.parametrize("place", ["input", "target"])
def test_an_opaque_object_of_the_caller_is_refused_before_anything_runs(place):
    calls = []
    model = nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.Identity())
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    x, hidden = torch.zeros(6, 6), SimpleNamespace(x=torch.zeros(6, 6))
    batch = ((x, hidden), x) if place == "input" else (x, hidden)
    with pipeline(model, loss_fn=mse).sync() as pipe:
        with pytest.raises(BatchError, match=r"types\.SimpleNamespace holds tensors"):
            pipe.step(*batch)
        if place == "input":
            with pytest.raises(BatchError, match="use a dataclass, a named tuple or a dict"):
                pipe(batch[0])
    assert not calls


@pytest.mark.promise("Right results", "Objects without tensors pass from stage to stage as they are.")
def test_an_object_without_tensors_passes_as_it_is():
    """Also one that a stage asks whether it is recomputed."""
    seen, note = [], SimpleNamespace(name="note", sizes=[1, 2])

    class Passes(nn.Module):
        def forward(self, x, given):
            seen.append((given, is_recomputing()))
            return x * 1, given

    class Takes(Passes):
        def forward(self, pair):
            return super().forward(*pair)

    with pipeline(nn.Sequential(Passes(), Takes(), Takes()), checkpoint="always").sync() as pipe:
        x, notes = pipe(torch.ones(3, 6, requires_grad=True), note)
        x.sum().backward()
    assert notes == [note] * 3
    assert all(given is note for given, _ in seen)
    assert sum(again for _, again in seen) == 9


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, labels):
        return self.linear(x), labels


class Margin(nn.Module):
    def forward(self, value):
        return nn.functional.soft_margin_loss(*value, reduction="none")


@pytest.mark.promise(
    "Right results", "A constant that passes through a recomputed stage does not begin to need a gradient."
)
@pytest.mark.parametrize("mode", MODES)
def test_a_constant_that_passes_through_a_stage_needs_no_gradient_behind_it(mode):
    """torch has no gradient for these labels, and refuses labels that require one."""
    torch.manual_seed(0)
    model = nn.Sequential(Labelled(), Margin(), nn.Identity()).double()
    x, labels = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64).sign()
    model[1](model[0](x, labels)).mean().backward()
    wanted = model[0].linear.weight.grad.clone()
    model.zero_grad()
    with pipeline(model, checkpoint=mode).sync() as pipe:
        pipe(x, labels).mean().backward()
    assert_close([model[0].linear.weight.grad], [wanted])
