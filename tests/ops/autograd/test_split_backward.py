"""The split backward: on any graph I and W together give the gradients of one ordinary backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncpipe.ops.autograd.split_backward import SplitBackward, _tell_once

Outputs = Sequence[Tensor]
Function = Callable[..., "Tensor | Outputs"]

pytestmark = pytest.mark.usefixtures("seeded")


def assert_close(ours: Tensor | None, wanted: Tensor | None) -> None:
    assert (ours is None) == (wanted is None)
    if ours is not None:
        torch.testing.assert_close(ours.to_dense(), wanted.to_dense(), rtol=0, atol=1e-10, check_stride=False)


def run(function: Function, inputs: Sequence[Tensor], split: bool, skip: Sequence[int] = ()) -> list[Tensor | None]:
    """The gradients of ``inputs``, after a backward in two halves or in one, from the same random gradients."""
    torch.manual_seed(1)
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    returned = function(*leaves)
    outputs = [returned] if isinstance(returned, Tensor) else list(returned)
    gradients = [None if k in skip else torch.randn_like(out.float()).to(out) for k, out in enumerate(outputs)]
    if split:
        backward = SplitBackward(outputs, gradients, leaves)
        del returned, outputs
        found = backward.input_gradients()
        assert all(leaf.grad is None for leaf in leaves)
        backward.weight_gradients()
        return found
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    return [leaf.grad for leaf in leaves]


def check(function: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor], skip: Sequence[int] = ()) -> None:
    """Fails unless both ways give the same gradients, also on top of earlier ones."""
    found = []
    for split in (False, True):
        for parameter in parameters:
            parameter.grad = None
        gradients = run(function, inputs, split, skip)
        first = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        run(function, inputs, split, skip)
        found.append([*gradients, *first, *(parameter.grad for parameter in parameters)])
    for wanted, ours in zip(*found, strict=True):
        assert_close(ours, wanted)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Both(torch.autograd.Function):
    """Two outputs, two parameters' worth of gradients at once, an argument that is no tensor, an integer output."""

    materialize = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int, weight: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(Both.materialize)
        ctx.factor = factor
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(largest := x.argmax())
        return x * weight * factor, x + weight, largest

    @staticmethod
    def backward(ctx: Any, left: Tensor | None, right: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        assert Both.materialize == (left is not None and right is not None)
        left = torch.zeros_like(x) if left is None else left * ctx.factor
        right = torch.zeros_like(x) if right is None else right
        return left * weight + right, None, left * x + right, None


@pytest.mark.parametrize("materialize", [True, False])
def test_a_custom_function(monkeypatch: pytest.MonkeyPatch, materialize: bool) -> None:
    monkeypatch.setattr(Both, "materialize", materialize)
    weight, bias = parameter(3), parameter(3)

    def function(x: Tensor) -> Tensor:
        left, _, _ = Both.apply(torch.tanh(x * bias), 2, weight, torch.ones(1))
        return (left * weight).exp()

    check(function, [torch.randn(3, requires_grad=True)], [weight, bias])


def on_view(x: Tensor, matrix: Tensor, vector: Tensor) -> Tensor:
    y = x.clone()
    y[0] = vector * 2
    y[1].mul_(vector)
    y[:, 1:].add_((y.clone() @ matrix)[:, 1:].tanh())
    y[2:].copy_((vector.exp() * matrix)[:1])
    return y.sin()


def twice(x: Tensor, matrix: Tensor, vector: Tensor) -> Tensor:
    y = x @ matrix + vector
    return torch.tanh(y) @ (matrix * vector) + vector


def outside(x: Tensor, matrix: Tensor, vector: Tensor) -> Outputs:
    scale = (matrix @ vector).tanh()
    return x @ matrix * scale, scale.exp(), matrix, vector


FUNCTIONS: dict[str, Function] = {
    "writes into views": on_view,
    "parameters used twice": twice,
    "outputs of parameters alone": outside,
    "a leaf that is an output": lambda x, m, v: (x, x @ m, x),
    "an output twice": lambda x, m, v: [y := x @ m + v, y, y * 2],
    "views of one tensor": lambda x, m, v: (x @ m + v).chunk(2),
    "an output that needs no gradient": lambda x, m, v: (x.detach() * 3, x * v),
    "an unused leaf": lambda x, m, v: (m @ v).sin(),
    "broadcasts": lambda x, m, v: (x[:, None] + v) * v[:1] + v.sum(),
    "a concatenation": lambda x, m, v: torch.cat([x, m, x @ m, v[None]]) * v,
    "another type": lambda x, m, v: (x.float() * v) @ m.float().double() + v.to(torch.complex128).real,
    "complex numbers": lambda x, m, v: torch.view_as_real((x.to(torch.complex128) * v) @ m.to(torch.complex128)),
    "a leaf into itself": lambda x, m, v: x * x @ m @ x[:4].T * v[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("skip", [(), (0,), (1,)], ids=["all", "not the first", "not the second"])
@pytest.mark.parametrize("wanted", [True, False], ids=["inputs", "no inputs"])
def test_functions(name: str, skip: tuple[int, ...], wanted: bool) -> None:
    matrix, vector = parameter(4, 4), parameter(4)
    x = torch.randn(5, 4, requires_grad=wanted)
    check(lambda x: FUNCTIONS[name](x, matrix, vector), [x], [matrix, vector], skip)


def test_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).float()
    tied = nn.Sequential(*model, nn.ReLU(), model[0])

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tied(x)

    check(function, [torch.randn(3, 4).float().requires_grad_()], [*model.parameters()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_inside(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    last = nn.Linear(4, 4)
    runs = []

    def block(x: Tensor, y: Tensor) -> Tensor:
        runs.append(1)
        return model(x) * y

    def function(x: Tensor) -> Tensor:
        return last(checkpoint(block, last(x), last.bias * 2, use_reentrant=reentrant)).tanh()

    check(function, [torch.randn(2, 4, requires_grad=True)], [*model.parameters(), *last.parameters()])
    runs.clear()
    run(function, [torch.randn(2, 4, requires_grad=True)], split=True)
    assert len(runs) == (2 if reentrant else 3), "the forward, and once for each half"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own, while it compiles
def test_a_compiled_part_beside_others() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid())
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    part = torch.compile(inner, backend="aot_eager")
    check(
        lambda x: last(part(first(x))),
        [torch.randn(2, 4, requires_grad=True)],
        [*first.parameters(), *inner.parameters(), *last.parameters()],
    )


def test_a_backward_that_cannot_be_split_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _tell_once.cache_clear()  # private: the process has told it already if another test came first
    layer = nn.Linear(4, 4)
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        run(lambda x: checkpoint(layer, x, use_reentrant=True), [x], split=True)
    (record,) = caplog.records
    assert "CheckpointFunctionBackward cannot compute a part of its gradients" in record.message


# Hooks


def test_tensor_hooks_fire_once_and_count_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    calls: list[str] = []
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        hidden = first(x)
        hidden.register_hook(lambda gradient: calls.append("hidden") or gradient * 3)
        hidden.retain_grad()
        seen.append(hidden)
        return second(hidden.tanh())

    x = torch.randn(2, 4, requires_grad=True)
    check(function, [x], [*first.parameters(), *second.parameters()])
    assert len(calls) == 4
    assert_close(seen[2].grad, seen[0].grad)


@pytest.mark.parametrize("kind", ["hook", "accumulated"])
@pytest.mark.parametrize("shared", ["layer", "bias"])
def test_parameter_hooks_see_one_whole_gradient(kind: str, shared: str) -> None:
    norm = nn.LayerNorm(4)
    other = norm if shared == "layer" else nn.LayerNorm(4)
    other.bias = norm.bias
    seen: list[Tensor] = []
    if kind == "hook":
        norm.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    else:
        norm.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.clone()))
    model = nn.Sequential(norm, nn.Tanh(), other, nn.Tanh(), norm)
    x = torch.randn(2, 4, requires_grad=True)
    run(model, [x], split=False)
    norm.bias.grad = None
    run(model, [x], split=True)
    assert len(seen) == 2
    assert_close(seen[1], seen[0])


# Random graphs


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[str, int, int, int]], list[int]]:
    """Lines (operation, two earlier values, parameter), and which values are outputs."""
    kinds = ("linear", "scale", "shift", "tanh", "add", "mul", "both", "write", "clone", "cut", "parameter")
    length = draw(st.integers(1, 12))
    lines = [
        (
            draw(st.sampled_from(kinds)),
            draw(st.integers(0, k + 1)),
            draw(st.integers(0, k + 1)),
            draw(st.integers(0, 2)),
        )
        for k in range(length)
    ]
    return lines, draw(st.lists(st.integers(0, length + 1), min_size=1, max_size=4))


def interpreted(lines: list[tuple[str, int, int, int]], x: Tensor, y: Tensor, parameters: Sequence[Tensor]) -> Outputs:
    values = [x, y]
    for kind, a, b, k in lines:
        left, right, matrix = values[a], values[b], parameters[k]
        match kind:
            case "linear":
                made = nn.functional.linear(left, matrix, parameters[3])
            case "scale":
                made = left * matrix[k]
            case "shift":
                made = matrix.sin() + left
            case "tanh":
                made = left.tanh()
            case "add":
                made = left + right
            case "mul":
                made = left * right
            case "both":
                made = Both.apply(left, 2, right, torch.ones(1))[k % 2]
            case "write":
                made = left.clone()
                made[1:].mul_(right[1:] * matrix[0])
            case "clone":
                made = left.clone(memory_format=torch.contiguous_format)
            case "cut":
                made = left.detach()
            case "parameter":
                made = matrix @ parameters[(k + 1) % 3]
        values.append(made)
    return values


@given(program=programs(), skip=st.lists(st.integers(0, 3), max_size=1), wanted=st.tuples(st.booleans(), st.booleans()))
@settings(max_examples=150, database=None)
def test_random_graphs(program: Any, skip: list[int], wanted: tuple[bool, bool]) -> None:
    lines, outputs = program
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(3)]
    parameters.append(nn.Parameter(torch.randn(3, dtype=torch.float64)))
    inputs = [torch.randn(3, 3, dtype=torch.float64, requires_grad=want) for want in wanted]

    def function(x: Tensor, y: Tensor) -> Outputs:
        values = interpreted(lines, x, y, parameters)
        return [values[k] for k in outputs]

    check(function, inputs, parameters, skip)
