"""``from_transformers``: loss and gradients of the whole batch as transformers computes them, whatever the cut."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe

transformers = pytest.importorskip("transformers")

from transformers_models import make_batch, make_model  # noqa: E402

DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library computes norms and losses in float32; here it stays in float64, where sums can be compared."""
    to = Tensor.to

    def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lowers = tensor.dtype is torch.float64 and args[:1] == (torch.float32,)
        return tensor if lowers else to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", kept)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.manual_seed(0)


def unsplit(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor | None]]:
    """What the model itself returns for the whole batch, and its gradients."""
    reference = deepcopy(model)
    output = reference(**batch)
    output.loss.backward()
    return output, {name: parameter.grad for name, parameter in reference.named_parameters()}


def check(model: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    for name, parameter in model.named_parameters():
        expected = gradients[name]
        if expected is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2LMHeadModel", {"balance": [1, 2]}),
        ("GPT2ForSequenceClassification", {"schedule": "zb-h1"}),
        ("LlamaForCausalLM", {"checkpoint": "always"}),
        ("LlamaForSequenceClassification", {"schedule": "gpipe", "microbatches": 5, "balance": [1, 2]}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"balance": [1, 2, 2], "devices": ["cpu:0", "cpu:1", "cpu:2"]}),
        ("GemmaForCausalLM", {"balance": [1, 3, 1], "devices": ["cpu:0", "cpu:1", "cpu:2"]}),
        ("BertForMaskedLM", {}),
        ("BertForTokenClassification", {}),
        ("RobertaForSequenceClassification", {}),
        ("ViTForImageClassification", {"balance": [1, 2]}),
        ("T5ForConditionalGeneration", {"balance": [2, 3, 1, 1], "devices": [f"cpu:{k}" for k in range(4)]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str, options: dict[str, Any]) -> None:
    model, batch = make_model(name), make_batch(name)
    expected, gradients = unsplit(model, batch)
    options = {"devices": DEVICES, "microbatches": 3, **options}
    with asyncpipe.from_transformers(model, batch, **options).sync() as pipe:
        result = pipe.step(transformers.BatchEncoding(batch))
    assert result.loss is not None
    torch.testing.assert_close(result.loss, expected.loss.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(result.outputs.logits, expected.logits.detach(), rtol=0, atol=1e-10)
    check(model, gradients)
