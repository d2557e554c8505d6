"""Losses of heads: by chunks of tokens, without all logits, and of labels of other kinds."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import asyncpipe
from asyncpipe.core.graph.lower import lower
from asyncpipe.core.predict.memory import peak_memory
from asyncpipe.core.predict.simulate import simulate
from asyncpipe.core.schedules.protocol import Shape
from asyncpipe.core.schedules.registry import find_schedule
from asyncpipe.errors import BatchError, OptionError
from asyncpipe.ops.model.transformers import counted_loss
from asyncpipe.ops.model.transformers.stage_transformers import stage_transformers
from asyncpipe.pipeline import profiling
from benchmarks.byte_counters import ByteMeter, CountedExecutor

transformers = pytest.importorskip("transformers")

from transformers_models import check, make_batch, make_model, unsplit  # noqa: E402

pytestmark = pytest.mark.usefixtures("doubles")

DEVICES = ["cpu:0", "cpu:1"]
ROWS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens at a time."""
    monkeypatch.setattr(counted_loss, "CHUNK", 4 * 48)


def answers() -> tuple[nn.Module, dict[str, Any]]:
    """Of questions; both ends of the last are behind its tokens."""
    batch = make_batch("BertModel")
    del batch["labels"]
    ends = torch.tensor([[0, 2], [1, 1], [3, 6], [2, 4], [7, 9]])
    return make_model("BertForQuestionAnswering", num_labels=2), {
        **batch,
        **dict(zip(("start_positions", "end_positions"), ends.T, strict=True)),
    }


def spoken(reduction: str) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_kernel=(4, 3),
        conv_stride=(2, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        ctc_loss_reduction=reduction,
        **dict.fromkeys(
            (
                "hidden_dropout",
                "attention_dropout",
                "activation_dropout",
                "feat_proj_dropout",
                "final_dropout",
                "layerdrop",
            ),
            0.0,
        ),
        mask_time_prob=0.0,
    )
    lengths = torch.tensor([80, 64, 71, 80])
    mask = (torch.arange(80) < lengths[:, None]).long()
    labels = torch.tensor([[3, 4, 4, 5], [6, 7, -100, -100], [8, 9, 10, -100], [11, 3, -100, -100]])
    sound = torch.randn(4, 80, dtype=torch.float64) * mask
    return transformers.Wav2Vec2ForCTC(config).double(), {
        "input_values": sound,
        "attention_mask": mask,
        "labels": labels,
    }


def masked_images() -> tuple[nn.Module, dict[str, Any]]:
    model = make_model("ViTForMaskedImageModeling", encoder_stride=4)
    mask = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]).bool()
    return model, {"pixel_values": make_batch("ViTModel", 4)["pixel_values"], "bool_masked_pos": mask}


def next_sentences() -> tuple[nn.Module, dict[str, Any]]:
    batch = make_batch("BertModel")
    return make_model("BertForNextSentencePrediction"), {**batch, "labels": torch.tensor([0, 1, 1, 0, 1])}


def dictated() -> tuple[nn.Module, dict[str, Any]]:
    """With labels alone, which the decoder's input follows from."""
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=48, max_target_positions=16, dropout=0.0, **sizes, **heads, **ends)
    labels = make_batch("GPT2LMHeadModel", 4)["labels"]
    return transformers.WhisperForConditionalGeneration(config).double(), {
        "input_features": torch.randn(4, 8, 16, dtype=torch.float64),
        "labels": labels,
    }


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (answers, {"checkpoint": "always"}),
        (answers, {"schedule": "zb-h1", "microbatches": 5}),  # One micro-batch has no answer.
        (partial(spoken, "sum"), {"balance": [1, 1]}),
        (partial(spoken, "mean"), {"balance": [1, 1], "schedule": "zb-h1"}),
        (masked_images, {"balance": [1, 2], "microbatches": 2}),
        (next_sentences, {}),
        (dictated, {"schedule": "zb-h1"}),
    ],
    ids=["answers", "answers-zb", "ctc-sum", "ctc-mean", "images", "sentences", "whisper"],
)
def test_labels_of_other_names_and_kinds_reach_their_loss(make: Any, options: dict[str, Any]) -> None:
    model, batch = make()
    expected, gradients = unsplit(model, batch)
    with asyncpipe.from_transformers(model, batch, **{"devices": DEVICES, "microbatches": 3, **options}).sync() as pipe:
        result = pipe.step(batch)
        # The model adds 1e-5 to a count of masked pixels.
        apart = 1e-6 if make is masked_images else 1e-10
        torch.testing.assert_close(result.loss, expected.loss.detach(), rtol=0, atol=apart)
        check(model, gradients, apart)
        called = pipe.eval()(**batch)
    torch.testing.assert_close(called.loss, expected.loss.detach(), rtol=0, atol=apart)


def test_answers_of_which_one_end_is_no_label_are_refused() -> None:
    model, batch = answers()
    pipeline = asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2)
    with pipeline.sync() as pipe, pytest.raises(BatchError, match="leaves the answer out"):
        pipe.step({**batch, "end_positions": batch["end_positions"] + 3})


def with_adapter_at_the_head(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    model.config.tie_word_embeddings = False
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    ).double()


@pytest.mark.parametrize(
    ("name", "options", "change"),
    [
        ("LlamaForCausalLM", {}, None),
        ("LlamaForCausalLM", {"schedule": "zb-h1", "checkpoint": "always"}, None),
        ("LlamaForCausalLM", {"devices": ROWS, "microbatches": 2}, None),
        ("LlamaForCausalLM", {"schedule": "gpipe"}, None),
        ("LlamaForCausalLM", {"schedule": "zb-h1"}, with_adapter_at_the_head),
        ("GPT2LMHeadModel", {"schedule": "interleaved", "microbatches": 4}, None),
        ("GPT2LMHeadModel", {"microbatches": 5, "checkpoint": "always"}, None),  # One micro-batch has no label.
        ("GemmaForCausalLM", {"schedule": "zb-h1", "balance": [1, 2]}, None),
        ("BertForMaskedLM", {"schedule": "interleaved", "microbatches": 4, "checkpoint": "always"}, None),
        ("T5ForConditionalGeneration", {"schedule": "zb-h1"}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("small_chunks")
def test_a_loss_by_chunks_is_that_of_all_logits(name: str, options: dict[str, Any], change: Any) -> None:
    model, batch = make_model(name), make_batch(name)
    model = model if change is None else change(model)
    expected, gradients = unsplit(model, batch)
    options = {"devices": DEVICES, "microbatches": 3, "loss": "chunked", **options}
    with asyncpipe.from_transformers(model, batch, **options).sync() as pipe:
        result = pipe.step(batch)
        check(model, gradients)
        assert result.outputs is None
        output = pipe.eval().step(batch).outputs
        torch.testing.assert_close(output.logits, expected.logits.detach(), rtol=0, atol=1e-10)
        for loss in (result.loss, pipe.step(batch, return_outputs=False).loss, pipe(**batch).loss.detach()):
            torch.testing.assert_close(loss, expected.loss.detach(), rtol=0, atol=1e-10)


def of_experts(family: str) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "head_dim": 8, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=48, intermediate_size=24, **sizes, **experts, **routers
    )
    config._experts_implementation = "eager"  # The others have no float64.
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Mixtral", {}),
        ("Mixtral", {"loss": "chunked", "schedule": "zb-h1", "checkpoint": "always"}),
        ("Mixtral", {"devices": ROWS, "microbatches": 2}),
        ("Mixtral", {"workers": "processes", "optimizer": partial(torch.optim.SGD, lr=0.1)}),
        ("Qwen3Moe", {"schedule": "interleaved", "microbatches": 4, "loss": "chunked"}),
        ("Qwen3Moe", {"schedule": "zb-h1", "balance": [1, 2]}),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_the_loss_of_routers_is_that_of_each_micro_batch(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = 1e-10
    if "workers" in options:
        # Workers compute norms in float32, as the library does; so does the reference then, and its loss.
        monkeypatch.undo()
        apart = 1e-6
    model, batch = of_experts(family), make_batch("LlamaForCausalLM")
    options = {"devices": DEVICES, "microbatches": 3, **options}
    reference, total, losses = deepcopy(model), (batch["labels"][:, 1:] >= 0).sum(), []
    rows = options["microbatches"] * (2 if options["devices"] is ROWS else 1)
    for piece in zip(*(each.tensor_split(rows) for each in batch.values()), strict=True):
        output = reference(**dict(zip(batch, piece, strict=True)))
        count = (piece[list(batch).index("labels")][:, 1:] >= 0).sum()
        losses.append(output.loss * count / total if count else 0 * output.aux_loss)
    sum(losses).backward()
    before = deepcopy(model.state_dict())
    with asyncpipe.from_transformers(model, batch, **options).sync() as pipe:
        result = pipe.step(batch)
        torch.testing.assert_close(result.loss, sum(losses).detach(), rtol=0, atol=apart, check_dtype=False)
        if "workers" not in options:
            check(model, {name: parameter.grad for name, parameter in reference.named_parameters()})
            with pytest.raises(BatchError, match="routers"):
                pipe(**batch)
        after = pipe.state_dict()
    if "workers" in options:
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(after[name], before[name] - 0.1 * parameter.grad, rtol=0, atol=apart)


@pytest.mark.usefixtures("small_chunks")
def test_hooks_of_the_heads_weight_get_its_whole_gradient_once() -> None:
    model, batch, seen = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM"), []
    _, gradients = unsplit(model, batch)
    model.lm_head.weight.register_hook(seen.append)
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2, loss="chunked").sync() as pipe:
        pipe.step(batch)
    (gradient,) = seen
    torch.testing.assert_close(gradient, gradients["lm_head.weight"], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("small_chunks")
def test_steps_by_chunks_overlap_and_update() -> None:
    batch, losses = make_batch("LlamaForCausalLM"), []
    for loss in (None, "chunked"):
        torch.manual_seed(0)
        model = make_model("LlamaForCausalLM")
        options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss": loss, "schedule": "zb-h1"}
        with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=3, **options).sync() as pipe:
            losses.append([result.loss for result in pipe.steps([batch] * 4, return_outputs=False)])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("BertForTokenClassification", {"loss": "chunked"}, "has another"),
        ("LlamaForCausalLM", {"loss": "chunked", "loss_fn": print}, "without a loss_fn"),
        ("LlamaForCausalLM", {"loss": "whole"}, "must be 'chunked'"),
    ],
)
def test_chunks_are_refused_where_nothing_is_gained(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        asyncpipe.from_transformers(make_model(name), make_batch(name), devices=DEVICES, microbatches=2, **options)


def test_a_head_by_chunks_needs_a_third_of_the_memory_and_it_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, pieces, found = 8_000, 2, {}
    monkeypatch.setattr(profiling, "STEPS", 1)
    monkeypatch.setattr(counted_loss, "CHUNK", 24 * vocabulary)
    ids = torch.randint(vocabulary, (pieces, 192))
    batch = {"input_ids": ids, "labels": ids}
    for form in (None, "chunked"):
        model = make_model("LlamaForCausalLM", vocab_size=vocabulary, num_hidden_layers=1).float()
        staged = stage_transformers(model, batch, loss_form=form).joined([2, 1])
        profile = profiling.measure(staged, DEVICES, profiling.SampleBatch(batch), [pieces], steps=1)
        graph = lower(find_schedule("1f1b"), Shape(2, pieces, 2), wiring=profile.wiring([1, 1]))
        predicted = peak_memory(simulate(graph, profile.costs([1, 1], pieces)), profile.memory([1, 1], pieces))[1]
        meters: dict[str, ByteMeter] = {}

        def executor(device: str, meters: Any = meters, model: Any = model) -> CountedExecutor:
            meters[device] = ByteMeter()
            meters[device].ignore(model.parameters())
            return CountedExecutor(device, meters[device])

        options: dict[str, Any] = {"schedule": "1f1b", "balance": [1, 1], "checkpoint": "never", "executors": executor}
        with asyncpipe.Pipeline(staged, DEVICES, microbatches=pieces, **options).sync() as pipe:
            pipe.step(batch, return_outputs=False)
        weights = sum(parameter.nbytes for parameter in staged.stages[1].parameters())
        found[form] = meters["cpu:1"].peak
        assert found[form] == pytest.approx(predicted - weights, rel=0.1)
    assert found["chunked"] <= found[None] / 3
