"""Batches of keyword arguments, as a tokenizer makes them, for models that compute their loss; and uneven padding."""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from asyncpipe import Arguments, Pipeline, trace
from asyncpipe.errors import PaddedLabelsWarning

MODES = ("always", "except_last", "selective", "never")
WORDS = 7


class BatchEncoding(UserDict[str, Any]):
    """As a Hugging Face tokenizer returns it."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(self.embedding(input_ids)).tanh() * attention_mask.unsqueeze(-1)
        logits = self.head(hidden)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


class First(nn.Module):
    """The model as stages: the first takes keyword arguments, the last returns a dataclass."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding, self.body = model.embedding, model.body

    def forward(self, *, input_ids, attention_mask, labels):
        return self.body(self.embedding(input_ids)).tanh() * attention_mask.unsqueeze(-1), labels


class Last(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head = model.head

    def forward(self, given):
        logits = self.head(given[0])
        return Output(cross_entropy(logits.flatten(0, 1), given[1].flatten()), logits)


def model() -> Model:
    torch.manual_seed(1)
    return Model().double()


def batch(samples: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(WORDS, (samples, 4))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)}


def pipeline(staged, **options):
    options = {"microbatches": 2, "schedule": "gpipe", "loss_fn": lambda output: output["loss"]} | options
    return Pipeline(staged, ["cpu:0", "cpu:1"], **options)


def traced(bare: Model):
    return trace(bare, Arguments.of(**batch()), split=["head"])


def staged(bare: Model):
    return [First(bare), Last(bare)]


def loss_of(output: Any) -> Tensor:
    return output.loss if isinstance(output, Output) else output["loss"]


def assert_trained(ours: Model) -> None:
    bare = model()
    bare(**batch())["loss"].backward()
    for mine, theirs in zip(ours.parameters(), bare.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() < 1e-10


@pytest.mark.promise(
    "Right results", "The scalar losses of the micro-batches become one number, weighted by their samples or added."
)
@pytest.mark.parametrize(
    ("make", "kind", "mode"),
    [*((staged, BatchEncoding, mode) for mode in MODES), (traced, dict, "except_last"), (staged, dict, "never")],
)
def test_the_loss_of_a_call_with_keyword_arguments(make, kind, mode):
    """``pipe(**batch).loss.backward()``, with micro-batches of 3 and 2 samples."""
    ours = model()
    with pipeline(make(ours), checkpoint=mode).sync() as pipe:
        output = pipe(**kind(batch()))
        loss_of(output).backward()
    assert abs(float(loss_of(output).detach() - model()(**batch())["loss"].detach())) < 1e-10
    assert_trained(ours)


@pytest.mark.promise(
    "Right results",
    "A tokenizer's batch stands for keyword arguments; any other dict for a model of stages is its first argument.",
)
@pytest.mark.parametrize("make", [traced, staged])
def test_a_step_with_a_batch_of_a_tokenizer(make):
    """It stands for keyword arguments, in a step and in a call."""
    ours = model()
    with pipeline(make(ours), loss_fn=loss_of).sync() as pipe:
        result = pipe.step(BatchEncoding(batch()))
        assert abs(float(result.loss - model()(**batch())["loss"].detach())) < 1e-10
        assert abs(float(loss_of(result.outputs) - result.loss)) < 1e-10
        assert torch.equal(loss_of(pipe(BatchEncoding(batch()))), loss_of(result.outputs))
    assert_trained(ours)


@pytest.mark.promise(
    "Right results",
    "A tokenizer's batch stands for keyword arguments; any other dict for a model of stages is its first argument.",
)
def test_a_step_of_a_traced_model_with_a_dict():
    ours = model()
    with pipeline(traced(ours)).sync() as pipe:
        pipe.step(batch())
    assert_trained(ours)


@pytest.mark.promise(
    "Right results",
    "A tokenizer's batch stands for keyword arguments; any other dict for a model of stages is its first argument.",
)
def test_a_dict_for_a_model_of_stages_is_its_first_argument():
    """As in ``model(batch)``; keyword arguments are ``Arguments.of(**batch)``."""
    ours = model()

    class TakesDict(First):
        def forward(self, given):
            return super().forward(**given)

    with pipeline([TakesDict(ours), Last(ours)], loss_fn=loss_of).sync() as pipe:
        pipe.step(batch())
        assert_trained(ours)
    ours = model()
    with pipeline(staged(ours), loss_fn=loss_of).sync() as pipe:
        pipe.step(Arguments.of(**batch()))
    assert_trained(ours)


@pytest.mark.promise(
    "Right results", "The scalar losses of the micro-batches become one number, weighted by their samples or added."
)
def test_a_sum_of_losses_is_a_sum():
    with pipeline(staged(model()), loss_reduction="sum").sync() as pipe, torch.no_grad():
        whole = pipe(**batch(4)).loss
    parts = [{name: value[k : k + 2] for name, value in batch(4).items()} for k in (0, 2)]
    assert abs(float(whole - sum(model()(**part)["loss"].detach() for part in parts))) < 1e-10


# Padding


def padded(rows: int = 1) -> BatchEncoding:
    """The first ``rows`` samples have one label each, the others four."""
    made = batch(4)
    made["labels"][:rows, 1:] = -100
    return BatchEncoding(made)


@pytest.mark.promise(
    "Reported, not silent",
    "A mean over unevenly padded micro-batches is warned about once; the warning says what to write.",
)
def test_uneven_padding_inside_the_model_warns_once():
    with pipeline(staged(model()), loss_fn=loss_of).sync() as pipe:
        with pytest.warns(PaddedLabelsWarning) as caught:
            pipe.step(padded())
        assert str(caught[0].message) == (
            "the micro-batches hold different numbers of labels that are not ignored (-100), but count by their "
            "samples, so loss and gradients are another mean than the unsplit model's; give step a loss_fn that "
            "returns (mean loss, number of labels), or give pipe(x) no labels and compute the loss yourself"
        )
        pipe.step(padded())
        pipe(**padded())
    with pipeline(staged(model())).sync() as pipe, pytest.warns(PaddedLabelsWarning):
        pipe(**padded())


@pytest.mark.promise(
    "Reported, not silent",
    "A mean over unevenly padded micro-batches is warned about once; the warning says what to write.",
)
def test_uneven_padding_of_targets_warns():
    made = padded()
    layers = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))
    with (
        pipeline(layers, loss_fn=lambda out, to: cross_entropy(out.flatten(0, 1), to.flatten())).sync() as pipe,
        pytest.warns(PaddedLabelsWarning),
    ):
        pipe.step(made["input_ids"], made["labels"])


@pytest.mark.promise(
    "Reported, not silent",
    "A mean over unevenly padded micro-batches is warned about once; the warning says what to write.",
)
def test_what_the_warning_says_to_write_is_right():
    """Warnings are errors here."""
    ours, bare, given = model(), model(), padded()
    bare(**given)["loss"].backward()
    with pipeline(staged(ours), loss_fn=lambda output, to: (output.loss, (to != -100).sum())).sync() as pipe:
        assert abs(float(pipe.step(given, given["labels"]).loss - bare(**given)["loss"].detach())) < 1e-10
    for mine, theirs in zip(ours.parameters(), bare.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() < 1e-10


@pytest.mark.promise("Reported, not silent", "No warning about padding appears where the mean is right.")
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (BatchEncoding(batch()), {}),
        (padded(4), {}),
        (padded(), {"microbatches": 1}),
        (padded(), {"loss_reduction": "sum"}),
    ],
    ids=["not padded", "evenly", "one micro-batch", "sum"],
)
def test_no_warning_where_the_mean_is_right(given, options):
    with pipeline(staged(model()), loss_fn=loss_of, **options).sync() as pipe:
        pipe.step(given)
        pipe(**given)


def test_a_warning_that_is_an_error_leaves_the_gradients():
    ours = model()
    with pipeline(staged(ours), loss_fn=loss_of).sync() as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PaddedLabelsWarning):
            pipe.step(padded())
    assert all(parameter.grad is None for parameter in ours.parameters())
