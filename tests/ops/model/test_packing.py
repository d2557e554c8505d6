"""``pack``: rows without padding, whose loss and gradients are those of the sequences one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import asyncpipe
from asyncpipe.errors import BatchError
from asyncpipe.ops.model.packing import IGNORED, pack
from tests.campaigns.architectures.in_float64 import in_float64
from tests.support.transformers_models import VOCABULARY, make_model

LENGTH = 8


def draw_samples(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (size,), generator=generator) for size in sizes]


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=30))
def test_every_sample_is_once_in_a_row_and_few_places_are_left(sizes: list[int]) -> None:
    samples = draw_samples(sizes)
    batch = pack(samples, LENGTH, pad=0)
    found = []
    for ids, positions, labels in zip(*batch.values(), strict=True):
        begins = [k for k in range(LENGTH) if positions[k] == 0]
        for begin, end in zip(begins, [*begins[1:], LENGTH], strict=True):
            assert positions[begin:end].tolist() == list(range(end - begin))
            assert labels[begin] == IGNORED
            if ids[begin]:
                found.append(ids[begin:end].tolist())
                assert labels[begin + 1 : end].tolist() == ids[begin + 1 : end].tolist()
            else:
                assert (ids[begin:] == 0).all()
                assert (labels[begin:] == IGNORED).all()
    assert sorted(found) == sorted(sample.tolist() for sample in samples)
    # Two rows that fit in one would have been one: more than half of all rows but one is full.
    assert len(batch["labels"]) <= 2 * sum(sizes) / LENGTH + 1


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "no sample"),
        ([torch.ones(LENGTH + 1)], "cut longer ones"),
        ([torch.ones(1, 2)], "in one dimension"),
        ([torch.ones(0)], "sample 0"),
    ],
    ids=["none", "long", "flat", "empty"],
)
def test_what_does_not_fit_is_refused(samples: list[Tensor], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        pack(samples, LENGTH)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_are_those_of_the_sequences_one_by_one(name: str, attention: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    with in_float64():
        _compare(name, attention)


def _compare(name: str, attention: str) -> None:
    model = make_model(name, attn_implementation=attention)
    samples = draw_samples([8, 5, 3, 2, 6, 4, 4, 1])
    losses = [model(input_ids=sample[None]).logits[0, :-1] for sample in samples]
    targets = torch.cat([sample[1:] for sample in samples])
    loss = torch.nn.functional.cross_entropy(torch.cat(losses), targets)
    loss.backward()
    expected = {key: value.grad.clone() for key, value in model.named_parameters()}
    model.zero_grad()
    batch = pack(samples, LENGTH)
    with asyncpipe.from_transformers(model, batch, devices=["cpu:0", "cpu:1"], microbatches=2).sync() as pipe:
        assert pipe.step(batch).loss.item() == pytest.approx(loss.item(), abs=1e-10)
    for key, value in model.named_parameters():
        assert (value.grad - expected[key]).abs().max() < 1e-10, key


def test_rows_that_flash_attention_would_mix_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model = make_model("LlamaForCausalLM").eval()
    batch = pack(draw_samples([5, 3, 4, 4]), LENGTH)
    with asyncpipe.from_transformers(model, batch, devices=["cpu:0", "cpu:1"], microbatches=1).sync() as pipe:
        pipe.step(batch)
        monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        with pytest.raises(BatchError, match="as many micro-batches as rows"):
            pipe.step(batch)
