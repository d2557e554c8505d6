"""Traced stages: run one after the other they are the model, for other sizes too, in both modes; cuts are checked."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from asyncpipe.errors import BatchError, TraceError
from asyncpipe.ops import trace_stage
from asyncpipe.ops.batchnorm import convert_deferred_batch_norm
from asyncpipe.ops.microbatch import Arguments
from asyncpipe.ops.random import RandomStream
from asyncpipe.ops.stage import CALLER, StagedModel
from asyncpipe.ops.trace import trace


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    # pytest would collect it, which takes longer than all that is tested here.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def run_stages(staged: StagedModel, arguments: Arguments) -> Any:
    """The output of the stages, run in order; what travels is checked against the links."""
    takes = staged.takes(arguments)
    received: dict[int, dict[int, Any]] = {stage: {CALLER: values} for stage, values in takes.items()}
    last = len(staged.stages) - 1
    for index, stage in enumerate(staged.stages):
        sent = stage(received.pop(index, {}))
        targets = {user for source, user in staged.links if source == index}
        assert set(sent) == targets | ({CALLER} if index == last else set())
        for user in targets:
            received.setdefault(user, {})[index] = sent[user]
    assert not received
    return sent[CALLER]


def check(model: nn.Module, staged: StagedModel, arguments: Arguments) -> Any:
    """The stages give the outputs, the gradients and the buffers of a copy of the model; returns the output."""
    bare = copy.deepcopy(model)
    model.zero_grad()
    torch.manual_seed(1)
    expected, spec = tree_flatten(bare(*arguments.args, **arguments.kwargs))
    torch.manual_seed(1)
    output = run_stages(staged, arguments)
    actual, actual_spec = tree_flatten(output)
    assert actual_spec == spec
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == theirs if not isinstance(theirs, Tensor) else torch.allclose(ours, theirs, atol=1e-10, rtol=0)
    for leaves in (actual, expected):
        sum(leaf.sin().sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad).backward()
    for (name, ours), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-10, rtol=0), name
    for (name, ours), theirs in zip(model.named_buffers(), bare.buffers(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=0), name
    return output


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.third(x + self.second(x).relu())


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, angles: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.mix(x).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v, attn_mask=mask)
        return self.out(x.transpose(1, 2).reshape(samples, length, width))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor, angles: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x), mask, angles))
        return x + self.narrow(functional.gelu(self.wide(x)))


class Transformer(nn.Module):
    """As language models on the Hub are written: masks and positions made inside, a dict out, tied embeddings."""

    causal: Tensor
    frequencies: Tensor

    def __init__(self, width: int = 8, heads: int = 2, tokens: int = 11, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("frequencies", torch.logspace(0, -2, width // heads // 2))

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, hidden: bool = True
    ) -> dict[str, Any]:
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)
        mask = self.causal[:length, :length]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        angles = torch.outer(positions, self.frequencies)
        x = self.tokens(ids) + self.positions(positions)
        states = [x]
        for block in self.blocks:
            x = block(x, mask, angles)
            states.append(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "hidden": states if hidden else None, "loss": loss, "length": length}


def sentences(samples: int, length: int) -> Arguments:
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return Arguments.of(torch.randint(0, 11, (samples, length)), attention_mask=mask)


# The stages are the model


@pytest.mark.parametrize("split", [1, 2, 3, ["second"], ["second", "third"], ["third"], {"first": SplitPoint.END}])
def test_a_residual_that_spans_stages(split: Any) -> None:
    model = Residual()
    staged = trace(model, Arguments.of(torch.randn(3, 4)), split)
    for samples in (3, 5, 2, 1):
        check(model, staged, Arguments.of(torch.randn(samples, 4)))


@pytest.mark.parametrize("split", [1, 2, 3, 4])
def test_a_transformer(split: int) -> None:
    model = Transformer()
    staged = trace(model, sentences(3, 4), split)
    for training in (True, False):
        model.train(training)
        for samples, length in ((3, 4), (5, 7), (2, 9)):
            output = check(model, staged, sentences(samples, length))
            assert output["logits"].shape == (samples, length, 11)
    assert output["length"] == 9
    assert output["loss"] is None


def test_tied_parameters_stay_one_object() -> None:
    model = Transformer()
    staged = trace(model, sentences(2, 4), ["blocks.0", "blocks.1.attention", "norm"])
    check(model, staged, sentences(4, 3))
    names = [dict(stage.named_parameters()) for stage in staged.stages]
    assert names[0]["tokens.weight"] is names[3]["tokens.weight"] is model.tokens.weight
    assert set().union(*names) == set(dict(model.named_parameters()))
    assert all(tensor is model.get_parameter(name) for stage in names for name, tensor in stage.items())
    buffers = dict(staged.stages[0].named_buffers())
    assert buffers["causal"] is model.causal
    assert staged.stages[0].state_dict().keys() == {"tokens.weight", "positions.weight", "frequencies"}


class Fan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.a(x)
        return self.d(self.c(self.b(shared) * shared) + shared) * shared


def test_a_value_goes_straight_to_each_of_its_users() -> None:
    model = Fan()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["b", "c", "d"])
    assert staged.links == ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3))
    assert list(staged.takes(Arguments.of(torch.randn(2, 3)))) == [0]
    check(model, staged, Arguments.of(torch.randn(4, 3)))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(3, 3), nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, left: Tensor, *, right: Tensor) -> tuple[Tensor, ...]:
        x, y = self.left(left), self.right(right)
        return self.top(x * y), y, right, left


def test_inputs_go_to_the_stages_that_use_them() -> None:
    model = Towers()
    left, right = torch.randn(3, 3), torch.randn(3, 2)
    staged = trace(model, Arguments.of(left, right=right), ["right", "top"])
    assert staged.links == ((0, 1), (1, 2))
    takes = staged.takes(Arguments.of(left, right=right))
    assert {stage: [id(value) for value in values] for stage, values in takes.items()} == {
        0: [id(left)],
        1: [id(right)],
        2: [id(left), id(right)],
    }
    output = check(model, staged, Arguments.of(left, right=right))
    assert output[3] is left


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, batch: dict[str, Any], *more: Tensor, scale: float = 2.0, bias: Any = None, **rest: Any) -> Any:
        x = self.a(batch["x"]) * scale
        for other in more:
            x = x + other
        y = self.b(x) if bias is None else self.b(x) + bias["value"][0]
        return {"y": y, "rest": [rest["z"] * 2, batch["name"], None, (y.shape[0], slice(3))], "twice": (y, y)}


def test_nested_arguments_and_outputs() -> None:
    model = Nested()

    def arguments(samples: int) -> Arguments:
        x, y, z, bias = (torch.randn(samples, 3) for _ in range(4))
        return Arguments.of({"x": x, "name": "a"}, x, y, z=z, bias={"value": [bias, None]})

    staged = trace(model, arguments(3), ["b"])
    check(model, staged, arguments(5))
    given = arguments(2)
    batch = {"name": "a", "x": given.args[0]["x"]}
    swapped = Arguments.of(batch, *given.args[1:], bias=given.kwargs["bias"], scale=2.0, z=given.kwargs["z"])
    check(model, staged, swapped)


def test_the_same_tensor_twice_in_the_example() -> None:
    model = Towers()
    model.right = nn.Linear(3, 3)
    x = torch.randn(4, 6)[:, ::2]
    staged = trace(model, Arguments.of(x, right=x), ["right"])
    check(model, staged, Arguments.of(right=torch.randn(2, 3), left=torch.randn(3, 2).T))


class Constants(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mask", torch.rand(3), persistent=False)
        self.plain, self.listed = torch.rand(3), [torch.rand(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.tensor([1.0, 2.0, 3.0] if self.training else [4.0, 5.0, 6.0])
        return self.b(x * self.mask) * self.plain + self.listed[0] + torch.tensor(3.0)


def test_buffers_and_constants() -> None:
    model = Constants()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["b"])
    for training in (True, False):
        model.train(training)
        check(model, staged, Arguments.of(torch.randn(4, 3)))
    assert dict(staged.stages[1].named_buffers())["plain"] is model.plain
    assert staged.stages[1].state_dict().keys() == {"b.weight", "b.bias"}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        count = (x > 0).nonzero().shape[0]
        return self.b(self.a(x)) * count, count


def test_sizes_that_depend_on_values_travel_as_numbers() -> None:
    model = Counting()
    staged = trace(model, Arguments.of(torch.randn(3, 3)), ["b"])
    check(model, staged, Arguments.of(torch.rand(5, 3)))
    assert run_stages(staged, Arguments.of(torch.rand(4, 3)))[1] == 12


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(self.b(x).tanh())))


def test_a_submodule_that_is_called_twice_is_split_at_its_first_call() -> None:
    model = Twice()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["a"])
    assert [set(dict(stage.named_parameters())) for stage in staged.stages] == [
        {"b.weight", "b.bias"},
        {"a.weight", "a.bias", "b.weight", "b.bias"},
    ]
    check(model, staged, Arguments.of(torch.randn(3, 3)))
    staged = trace(model, Arguments.of(torch.randn(2, 3)), {"b": SplitPoint.END, "a": SplitPoint.END})
    assert len(staged.stages) == 3
    check(model, staged, Arguments.of(torch.randn(3, 3)))


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3).float(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = functional.dropout(self.a(x) + torch.ones(3), 0.5, self.training)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b((x + y).float())
            assert z.dtype is torch.bfloat16
        return self.c(z.double()) + y.detach()


@pytest.mark.parametrize("split", [["b"], ["c"], 3])
def test_grad_modes_and_autocast_inside(split: Any) -> None:
    model = Regions()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), split)
    for training in (True, False):
        model.train(training)
        check(model, staged, Arguments.of(torch.randn(4, 3)))
    copies = pickle.loads(pickle.dumps(list(staged.stages)))
    assert (
        run_stages(StagedModel(model, copies, staged.links, staged.takes), Arguments.of(torch.randn(4, 3))) is not None
    )


def test_autocast_inside_is_for_the_stages_device(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = trace(Regions(), Arguments.of(torch.randn(2, 3)), 1)
    stage = staged.stages[0].to("meta")
    seen: list[str] = []

    def autocast(device_type: str, **options: Any) -> Any:
        seen.append(device_type)
        return nullcontext()

    monkeypatch.setattr(torch, "autocast", autocast)
    stage({CALLER: staged.takes(Arguments.of(torch.randn(2, 3, device="meta")))[0]})
    assert seen == ["meta"]


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(3, dtype=self.a(x).dtype)


def test_autocast_outside() -> None:
    model = Residual().float()
    x = torch.randn(3, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        staged = trace(model, Arguments.of(x), 2)
        expected = model(x)
        assert expected.dtype is torch.bfloat16
        assert torch.equal(run_stages(staged, Arguments.of(x)), expected)
        typed = trace(Typed().float(), Arguments.of(x), 1)
    assert torch.equal(run_stages(staged, Arguments.of(x)), model(x))
    assert run_stages(typed, Arguments.of(x)).dtype is torch.float32


# Modes


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.relu(self.norm(self.conv(x))).mean((2, 3))))


@pytest.mark.parametrize("split", [3, ["norm", "head"], ["relu"]])
def test_batch_norm_and_dropout_in_both_modes(split: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Normed()
    staged = trace(model, Arguments.of(torch.randn(2, 2, 5, 5)), split)
    check(model, staged, Arguments.of(torch.randn(4, 2, 6, 5)))
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(model.norm.running_mean, torch.zeros(3))
    model.eval()
    x = torch.randn(3, 2, 5, 6)
    assert torch.equal(check(model, staged, Arguments.of(x)), run_stages(staged, Arguments.of(x)))
    model.train()
    assert not torch.equal(run_stages(staged, Arguments.of(x)), run_stages(staged, Arguments.of(x)))
    before = copy.deepcopy(dict(model.named_buffers()))
    monkeypatch.setattr(trace_stage, "is_recomputing", lambda: True)
    run_stages(staged, Arguments.of(x))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.aux = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.a(x)
        output = {"y": self.c(self.b(x))}
        if self.training:
            output["aux"] = self.aux(x)
        return output


def test_a_link_that_one_mode_needs_is_empty_in_the_other() -> None:
    model = Auxiliary()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["b", "c"])
    assert staged.links == ((0, 1), (0, 2), (1, 2))
    check(model, staged, Arguments.of(torch.randn(3, 3)))
    model.eval()
    assert set(check(model, staged, Arguments.of(torch.randn(3, 3)))) == {"y"}
    sent = staged.stages[0](dict.fromkeys([CALLER], staged.takes(Arguments.of(torch.randn(3, 3)))[0]))
    assert sent[2] == ()
    with pytest.raises(TraceError, match="'aux' computes nothing in eval mode"):
        trace(model, Arguments.of(torch.randn(2, 3)), ["aux"])


def test_modes_of_submodules_are_kept() -> None:
    model = Normed()
    model.norm.eval()
    staged = trace(model, Arguments.of(torch.randn(2, 2, 5, 5)), ["norm"])
    assert model.training
    assert not model.norm.training
    assert all(module.training for module in model.modules() if module is not model.norm)
    check(model, staged, Arguments.of(torch.randn(2, 2, 5, 5)))
    assert model.norm.num_batches_tracked == 0
    model.eval()
    assert not any(stage.training for stage in trace(model, Arguments.of(torch.randn(2, 2, 5, 5)), ["head"]).stages)


def test_tracing_leaves_the_model_and_the_generators_alone() -> None:
    model = Normed()
    state, attributes = copy.deepcopy(model.state_dict()), {name: set(vars(m)) for name, m in model.named_modules()}
    generator = torch.get_rng_state()
    trace(model, Arguments.of(torch.randn(2, 2, 5, 5, generator=torch.Generator())), 2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.unused(x)
        return self.a(x)


def test_what_a_forward_leaves_behind_is_neither_kept_nor_computed() -> None:
    model = Remembering()
    with pytest.warns(UserWarning, match=r"self\.model\.last was assigned during export"):
        staged = trace(model, Arguments.of(torch.randn(2, 3)), 1)
    assert not hasattr(model, "last")
    assert set(dict(staged.stages[0].named_parameters())) == {"a.weight", "a.bias"}


def test_recurrent_layers_are_traced_and_work_afterwards() -> None:
    model = nn.Sequential(nn.LSTM(3, 3, batch_first=True), Unpacked(), nn.Linear(3, 2))
    staged = trace(model, Arguments.of(torch.randn(2, 4, 3)), ["2"])
    check(model, staged, Arguments.of(torch.randn(5, 4, 3)))


class Unpacked(nn.Module):
    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        return pair[0]


# Random numbers


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.dropout = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        q = x[:, None]
        x = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)[:, 0] + torch.rand(4)
        with torch.no_grad():
            noise = functional.dropout1d(torch.bernoulli(torch.full((4, 4), 0.5)), 0.1)
        return self.dropout(x) + noise


def test_a_function_mode_sees_what_draws() -> None:
    staged = trace(Drawing(), Arguments.of(torch.randn(2, 4, 4)), 1)
    received = {CALLER: staged.takes(Arguments.of(torch.randn(3, 4, 4)))[0]}
    with Names() as names:
        staged.stages[0](received)
    drawing = ["lstm.input", "scaled_dot_product_attention.default", "rand.generator", "bernoulli.default"]
    assert [name for name in names.seen if name in drawing or "dropout" in name] == [
        *drawing,
        "feature_dropout.default",
        "dropout.default",
    ]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(x.shape),
        lambda x: torch.randn(x.shape),
        lambda x: torch.randint(9, (4,)),
        lambda x: torch.randint(2, 9, (4,)),
        lambda x: torch.randperm(x.shape[0]),
        lambda x: functional.dropout(x, 0.5),
    ],
)
def test_a_random_stream_repeats_what_a_stage_draws(draw: Callable[[Tensor], Tensor]) -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x * 2)

    staged = trace(Draws(), Arguments.of(torch.ones(5, 2)), 1)
    x = Arguments.of(torch.ones(8, 2))
    with RandomStream(1, 2, 3, torch.device("cpu")):
        first = run_stages(staged, x)
    state = torch.get_rng_state()
    with RandomStream(1, 2, 3, torch.device("cpu")):
        assert torch.equal(run_stages(staged, x), first)
    assert torch.equal(torch.get_rng_state(), state)


# Placement and copies


class Factories(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = x + torch.arange(x.shape[1], device=x.device) + torch.full((x.shape[0], 3), math.pi, dtype=x.dtype)
        with torch.no_grad():
            y = torch.ones(3).to(x.device)
        x = (x * 2).float().double()
        return self.norm(self.a(x)) + torch.tensor([1.0, 2.0, 3.0]) + y


def test_what_the_forward_makes_is_on_the_stages_device() -> None:
    model = Factories()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["a"])
    for stage in staged.stages:
        stage.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert dict(staged.stages[1].named_buffers())["norm.running_mean"] is model.norm.running_mean
    assert dict(staged.stages[0].named_buffers())["steps"] is model.steps
    output = run_stages(staged, Arguments.of(torch.randn(4, 3, device="meta")))
    assert output.is_meta
    assert output.shape == (4, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda stages: pickle.loads(pickle.dumps(stages))])
def test_stages_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    model = Normed()
    staged = trace(model, Arguments.of(torch.randn(2, 2, 5, 5)), ["norm", "head"])
    copies = StagedModel(model, duplicate(list(staged.stages)), staged.links, staged.takes)
    assert not {id(p) for stage in copies.stages for p in stage.parameters()} & {id(p) for p in model.parameters()}
    arguments = Arguments.of(torch.randn(3, 2, 6, 6))
    torch.manual_seed(2)
    expected = run_stages(staged, arguments)
    torch.manual_seed(2)
    assert torch.equal(run_stages(copies, arguments), expected)
    copies.stages[1].to("meta")
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_the_example_is_not_kept() -> None:
    x = torch.randn(2, 4)
    alive = weakref.ref(x)
    storage = weakref.ref(x.untyped_storage())
    staged = trace(Residual(), Arguments.of(x), 2)
    del x
    gc.collect()
    assert alive() is None
    assert storage() is None
    assert len(staged.stages) == 2


# In place


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.a(x))
        return self.b(self.relu(y[:, :].view(-1, 4)))


def test_a_stage_that_overwrites_what_it_receives_says_so() -> None:
    model = InPlace()
    x = Arguments.of(torch.randn(2, 4))
    assert [stage.overwrites_input for stage in trace(model, x, ["relu"]).stages] == [False, True]
    assert [stage.overwrites_input for stage in trace(model, x, ["dropout"]).stages] == [False, True]
    staged = trace(model, x, ["b"])
    assert [stage.overwrites_input for stage in staged.stages] == [False, False]
    check(model, staged, Arguments.of(torch.randn(3, 4)))


class Stale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h[:, :2]
        y = self.b(x)
        h.mul_(2)
        return self.c(y).sum() + view.sum() + h.sum()


@pytest.mark.parametrize("split", [["b"], ["b", "c"]])
def test_another_view_of_what_a_stage_overwrites(split: list[str]) -> None:
    with pytest.raises(TraceError, match=r"stage 1 overwrites in place .* a value that it received"):
        trace(Stale(), Arguments.of(torch.randn(2, 4)), split)


def test_views_within_a_stage_follow_its_change() -> None:
    model = Stale()
    check(model, trace(model, Arguments.of(torch.randn(2, 4)), ["c"]), Arguments.of(torch.randn(3, 4)))


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.1), nn.Linear(3, 3)
        self.norm.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


def test_a_buffer_that_several_stages_change() -> None:
    with pytest.raises(TraceError, match=r"'norm\.running_mean' is overwritten by stage 0 and used by stages 0, 1"):
        trace(SharedNorm(), Arguments.of(torch.randn(2, 3)), ["b"])
    model = SharedNorm()
    check(model, trace(model, Arguments.of(torch.randn(2, 3)), 1), Arguments.of(torch.randn(4, 3)))


class Replacing(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.a(x)


# Splits


def test_parameters_are_spread_evenly_at_the_borders_of_blocks() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)))
    staged = trace(model, Arguments.of(torch.randn(2, 8)), 2)
    names = [list(dict(stage.named_parameters())) for stage in staged.stages]
    assert [name[0] for name in names[0]] == ["0"] * 4 + ["1"] * 4
    assert [name[0] for name in names[1]] == ["2"] * 4 + ["3"] * 4


@pytest.mark.parametrize(("stages", "parameters"), [(2, [6, 8]), (3, [4, 4, 6])])
def test_smaller_submodules_are_split_where_the_outer_ones_are_uneven(stages: int, parameters: list[int]) -> None:
    body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model = nn.Sequential(body, nn.Linear(8, 1))
    staged = trace(model, Arguments.of(torch.randn(2, 8)), stages)
    assert [len(list(stage.parameters())) for stage in staged.stages] == parameters
    check(model, staged, Arguments.of(torch.randn(5, 8)))


def test_the_end_of_a_submodule_is_that_of_what_it_calls() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1))
    staged = trace(model, Arguments.of(torch.randn(2, 3)), {"0": SplitPoint.END})
    assert [len(list(stage.parameters())) for stage in staged.stages] == [4, 2]
    assert "tanh" in staged.stages[1]._pieces[True].graph.code


def test_submodules_that_begin_together_are_one_place_to_cut() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert len(trace(model, Arguments.of(torch.randn(2, 3)), 3).stages) == 3
    with pytest.raises(TraceError, match=r"4 stages need 3 cuts, .* begin at only 2 places"):
        trace(model, Arguments.of(torch.randn(2, 3)), 4)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (["secnd"], "no submodule 'secnd' to split at; near it are second"),
        (["first"], "nothing is computed between the model's beginning and the beginning of 'first' in train mode"),
        ({"third": SplitPoint.END}, "between the end of 'third' and the model's end"),
        (["second", "second"], "between the beginning of 'second' and the beginning of 'second'"),
        ([""], "no submodule ''"),
        (5, "5 stages need 4 cuts, but the model's submodules begin at only 2 places"),
        (0, "split must be at least 1 stage, got 0"),
        (True, "split must be a number of stages, a list of submodules' names"),
        ("second", "split must be a number of stages, a list of submodules' names"),
        ({"second": "END"}, "split must be a number of stages, a list of submodules' names"),
        (None, "split must be a number of stages, a list of submodules' names"),
    ],
)
def test_splits_that_cannot_be(split: Any, told: str) -> None:
    with pytest.raises(TraceError) as raised:
        trace(Residual(), Arguments.of(torch.randn(2, 4)), split)
    assert told in str(raised.value)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "arguments", "told"),
    [
        (lambda: 3, Arguments.of(1), "the model must be a torch.nn.Module, got int"),
        (Residual, Arguments.of(), "the example does not fit Residual.forward: missing a required argument: 'x'"),
        (Residual, Arguments.of(3), "the example has no tensor"),
        (Branching, Arguments.of(torch.ones(2)), "Branching cannot be traced in train mode: GuardOnDataDependent"),
        (Replacing, Arguments.of(torch.ones(2, 3)), "replaces the buffer 'mean' by another tensor"),
        (lambda: convert_deferred_batch_norm(Normed()), Arguments.of(torch.ones(2, 2, 5, 5)), "deferred batch norms"),
    ],
)
def test_models_that_cannot_be_traced(model: Callable[[], Any], arguments: Arguments, told: str) -> None:
    with pytest.raises(TraceError) as raised:
        trace(model(), arguments, 1)
    assert told in str(raised.value)
    assert ("cannot be traced" in told) == (type(raised.value.__cause__).__name__.startswith("Guard"))


def test_a_model_without_submodules() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    staged = trace(Bare(), Arguments.of(torch.randn(2)), 1)
    assert torch.equal(run_stages(staged, Arguments.of(torch.zeros(3))), torch.zeros(3))
    staged = trace(nn.Identity(), Arguments.of(torch.randn(2)), 1)
    assert torch.equal(run_stages(staged, Arguments.of(torch.ones(3))), torch.ones(3))


# Arguments that do not fit


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(9, 4)

    def forward(self, batch: dict[str, Any], mask: Tensor | None = None, kind: str = "sum", factor: int = 2) -> Tensor:
        x = self.a(batch["ids"]) * factor
        return x + mask[:, None, None] if mask is not None else x.view(batch["ids"].shape[0], 12)


IDS = torch.zeros(2, 3, dtype=torch.long)


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
def test_arguments_that_do_not_fit_the_trace(arguments: Arguments, told: str) -> None:
    staged = trace(Picky(), Arguments.of({"ids": IDS}), 1)
    with pytest.raises(BatchError) as raised:
        staged.takes(arguments)
    assert told in str(raised.value)
    staged.takes(Arguments.of(kind="sum", batch={"ids": IDS.repeat(2, 1)}, factor=2, mask=None))


def test_an_example_of_one_sample_fixes_the_batch_size() -> None:
    staged = trace(Residual(), Arguments.of(torch.randn(1, 4)), 2)
    with pytest.raises(
        BatchError, match=r"x.size\(\)\[0\] == 1; trace with an example like it, of at least two samples"
    ):
        staged.takes(Arguments.of(torch.randn(2, 4)))
