"""A transformer as users have it: keyword arguments, masks, tied embeddings, a dict as output; traced and in stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncpipe import Arguments, Microbatches, Pipeline, trace
from asyncpipe.core.graph.task import WHOLE_STEP

WORDS, WIDTH, LONGEST = 13, 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~allowed, -1e9)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.down(functional.gelu(self.up(self.mix(x))))


class Transformer(nn.Module):
    """Called as ``model(input_ids=…, attention_mask=…)``; a language model whose head is its embedding."""

    causal: Tensor

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.register_buffer("causal", torch.ones(LONGEST, LONGEST).tril().bool(), persistent=False)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_hidden: bool = False
    ) -> dict[str, Any]:
        length = input_ids.shape[1]
        hidden = self.embedding(input_ids) + self.positions.weight[:length]
        allowed = self.causal[:length, :length].unsqueeze(0)
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool().unsqueeze(1)
        seen = [hidden]
        for block in self.blocks:
            hidden = block(hidden, allowed)
            seen.append(hidden)
        return {"logits": self.head(self.norm(hidden)), "hidden": tuple(seen) if output_hidden else None}


class First(nn.Module):
    """The first stage of the same model; stages pass a dict to the next one."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding, self.positions = model.embedding, model.positions
        self.register_buffer("causal", model.causal, persistent=False)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, output_hidden: bool) -> dict[str, Any]:
        length = input_ids.shape[1]
        hidden = self.embedding(input_ids) + self.positions.weight[:length]
        allowed = self.causal[:length, :length].unsqueeze(0) & attention_mask.bool().unsqueeze(1)
        return {"hidden": (hidden,), "allowed": allowed}


class Middle(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        seen = value["hidden"]
        return {**value, "hidden": (*seen, self.block(seen[-1], value["allowed"]))}


class Last(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm, self.weight = model.norm, model.embedding.weight

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        seen = value["hidden"]
        return {"logits": self.norm(seen[-1]) @ self.weight.T, "hidden": seen}


def make() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def sentences(samples: int, length: int, seed: int) -> tuple[Arguments, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (samples, length), generator=draw)
    mask = (torch.rand(samples, length, generator=draw) < 0.8).long()
    mask[:, 0] = 1
    target = torch.where(mask.bool(), ids.roll(-1, 1), -100)
    return Arguments.of(input_ids=ids, attention_mask=mask, output_hidden=True), target


def loss_fn(output: dict[str, Any], target: Tensor) -> tuple[Tensor, Tensor]:
    """Over the words that are not masked, with a term of the hidden states, so that they get gradients."""
    counted = (target >= 0).sum()
    mean = functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
    there = (target >= 0).unsqueeze(-1)
    hidden = torch.stack([(state * there).square().sum() for state in output["hidden"]]).sum()
    return mean + 0.01 * hidden / counted, counted


def whole_batch_loss(model: Transformer, microbatches: list[tuple[Arguments, Tensor]]) -> Tensor:
    parts = [loss_fn(model(**given.kwargs), target) for given, target in microbatches]
    total = sum(count for _, count in parts)
    return torch.stack([mean * count / total for mean, count in parts]).sum()


SEVEN = [sentences(samples, length, seed=k) for k, (samples, length) in enumerate(
    [(2, 3), (1, 9), (3, 5), (2, 2), (3, 4), (1, 11), (2, 6)]
)]  # fmt: skip
SPLITS = {1: [], 2: ["blocks.1"], 3: ["blocks.1", "blocks.2"], 4: ["blocks.0", "blocks.2", "norm"]}


def pipelines(stages: int) -> Iterator[tuple[Transformer, Any, dict[str, Any]]]:
    """The model, what to give to a pipeline, and how: traced and in stages."""
    model = make()
    example, _ = sentences(3, 5, seed=99)
    yield model, trace(model, example, split=SPLITS[stages] or 1), {}
    model = make()
    layers = [First(model), *(Middle(block) for block in model.blocks), Last(model)]
    sizes = [len(layers) // stages + (k < len(layers) % stages) for k in range(stages)]
    yield model, layers, {"balance": sizes}


@pytest.mark.parametrize(
    ("stages", "modes"), [(2, [("always", "gpipe")]), (4, [("except_last", "1f1b"), ("never", "gpipe")])]
)
def test_equal_to_the_unsplit_model(stages: int, modes: list[tuple[str, str]]) -> None:
    bare = make()
    loss = whole_batch_loss(bare, SEVEN)
    loss.backward()
    given, targets = Microbatches(g for g, _ in SEVEN), Microbatches(t for _, t in SEVEN)
    expected = [bare(**g.kwargs) for g, _ in SEVEN]
    devices = [f"cpu:{k}" for k in range(stages)]
    for model, cut, how in pipelines(stages):
        for mode, schedule in modes:
            with Pipeline(
                cut, devices, microbatches=1, schedule=schedule, checkpoint=mode, loss_fn=loss_fn, **how
            ).sync() as pipe:
                result = pipe.step(given, targets)
                assert abs(result.loss - loss) < 1e-10
                check(model, bare)
                for ours, theirs in zip(result.outputs, expected, strict=True):
                    assert (ours["logits"] - theirs["logits"]).abs().max() < 1e-10
                    assert len(ours["hidden"]) == len(theirs["hidden"])
                outputs = pipe(given)
                parts = [loss_fn(output, target) for output, (_, target) in zip(outputs, SEVEN, strict=True)]
                total = sum(count for _, count in parts)
                torch.stack([mean * count / total for mean, count in parts]).sum().backward()
                check(model, bare)


def check(model: Transformer, bare: Transformer) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-10, name
        ours.grad = None


def test_one_batch_with_keyword_arguments() -> None:
    bare = make()
    arguments, target = sentences(9, 7, seed=5)
    mean, _ = loss_fn(bare(**arguments.kwargs), target)
    mean.backward()
    for model, cut, how in pipelines(3):
        with Pipeline(cut, ["cpu:0", "cpu:1", "cpu:2"], microbatches=4, loss_fn=loss_fn, **how).sync() as pipe:
            result = pipe.step(arguments, target)
            assert abs(result.loss - mean) < 1e-10
            check(model, bare)
            whole = {task.id for task in result.record.graph.tasks if task.microbatch == WHOLE_STEP}
            assert {"C(0>2)", "C(2>0)", "S(0)"} <= whole, "the embedding is tied by tasks"
            assert model.head.weight is model.embedding.weight
            output = pipe(**arguments.kwargs)
            assert set(output) == {"logits", "hidden"}
            loss_fn(output, target)[0].backward()
            check(model, bare)
