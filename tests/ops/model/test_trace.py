"""Models cut by tracing: the stages, run in order, compute what the model does, for other sizes and in both modes."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.nn import functional

from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import StagedModel
from asyncpipe.ops.model.trace.trace import trace

Run = Callable[[StagedModel, Arguments], Any]
Check = Callable[[nn.Module, StagedModel, Arguments], Any]

pytestmark = pytest.mark.usefixtures("seeded")


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
    """Like language models on the Hub: it makes masks and positions, returns a dict, and has tied embeddings."""

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


@pytest.mark.parametrize("split", [1, 2, 3, ["third"], {"first": SplitPoint.END}])
def test_a_residual_that_spans_stages(split: Any, check: Check) -> None:
    model = Residual()
    staged = trace(model, Arguments.of(torch.randn(3, 4)), split)
    for samples in (3, 5, 1):
        check(model, staged, Arguments.of(torch.randn(samples, 4)))


NAMES = ("blocks.0", "blocks.1.attention", "norm")


@pytest.fixture(scope="module")
def transformer(doubles: None) -> Callable[[int | tuple[str, ...]], StagedModel]:
    """A function for a Transformer cut by ``split``, which is traced once: that takes a second."""
    return functools.cache(lambda split: trace(Transformer(), sentences(3, 4), split))


@pytest.mark.parametrize("split", [2, NAMES])
def test_a_transformer(split: Any, transformer: Callable[[Any], StagedModel], check: Check) -> None:
    staged = transformer(split)
    for training, samples, length in ((False, 4, 3), (True, 3, 4), (True, 2, 5)):
        staged.module.train(training)
        output = check(staged.module, staged, sentences(samples, length))
        assert output["logits"].shape == (samples, length, 11)
    assert output["length"] == 5
    assert output["loss"] is None


class Fan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.a(x)
        return self.d(self.c(self.b(shared) * shared) + shared) * shared


def test_a_value_goes_straight_to_each_of_its_users(check: Check) -> None:
    model = Fan()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), ["b", "c", "d"])
    assert staged.links == ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3))
    assert list(staged.caller_values(Arguments.of(torch.randn(2, 3)))) == [0]
    check(model, staged, Arguments.of(torch.randn(4, 3)))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(3, 3), nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, left: Tensor, *, right: Tensor) -> tuple[Tensor, ...]:
        x, y = self.left(left), self.right(right)
        return self.top(x * y), y, right, left


def test_inputs_go_to_the_stages_that_use_them(check: Check) -> None:
    model = Towers()
    left, right = torch.randn(3, 3), torch.randn(3, 2)
    staged = trace(model, Arguments.of(left, right=right), ["right", "top"])
    assert staged.links == ((0, 1), (1, 2))
    caller_values = staged.caller_values(Arguments.of(left, right=right))
    assert {stage: [id(value) for value in values] for stage, values in caller_values.items()} == {
        0: [id(left)],
        1: [id(right)],
        2: [id(left), id(right)],
    }
    output = check(model, staged, Arguments.of(left, right=right))
    assert output[3] is left


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        count = (x > 0).nonzero().shape[0]
        return self.b(self.a(x)) * count, count


def test_sizes_that_depend_on_values_travel_as_numbers(check: Check, run_stages: Run) -> None:
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


def test_a_submodule_that_is_called_twice_is_split_at_its_first_call(check: Check) -> None:
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


@pytest.mark.parametrize("split", [["b"], 3])
def test_grad_modes_and_autocast_inside(split: Any, check: Check, run_stages: Run) -> None:
    model = Regions()
    staged = trace(model, Arguments.of(torch.randn(2, 3)), split)
    for training in (True, False):
        model.train(training)
        check(model, staged, Arguments.of(torch.randn(4, 3)))
    copies = pickle.loads(pickle.dumps(list(staged.stages)))
    assert (
        run_stages(StagedModel(model, copies, staged.links, staged.caller_values), Arguments.of(torch.randn(4, 3)))
        is not None
    )
