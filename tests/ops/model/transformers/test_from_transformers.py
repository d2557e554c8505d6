"""``from_transformers``: loss and gradients of the whole batch as transformers computes them, whatever the cut."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.errors import BalanceError, BatchError, OptionError
from asyncpipe.ops.model.transformers.counted_loss import CountedLoss, check_loss, loss_kind
from asyncpipe.ops.model.transformers.cut import cut_at_layers
from asyncpipe.ops.model.transformers.families import find_trunks
from asyncpipe.ops.model.transformers.layer_stage import LayerStage
from asyncpipe.ops.model.transformers.stage_transformers import stage_transformers

transformers = pytest.importorskip("transformers")

from transformers_models import check, make_batch, make_model, unsplit  # noqa: E402

pytestmark = pytest.mark.usefixtures("doubles")

DEVICES = ["cpu:0", "cpu:1"]
ROWS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]


@pytest.mark.promise(
    "Right results",
    "A model of transformers has the loss and gradients of the whole batch, however the batch is padded and cut.",
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2LMHeadModel", {"balance": [1, 2], "microbatches": 5}),  # One micro-batch has no label.
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
        ("GPT2LMHeadModel", {"balance": [1, 2], "microbatches": 2, "devices": ROWS}),
        ("BertForTokenClassification", {"schedule": "zb-h1", "devices": ROWS}),
        ("T5ForConditionalGeneration", {"balance": [4, 3], "devices": ROWS, "microbatches": 2}),
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


@pytest.mark.promise(
    "Right results",
    "A model of transformers has the loss and gradients of the whole batch, however the batch is padded and cut.",
)
def test_the_call_returns_the_loss_of_the_whole_batch() -> None:
    model, batch = make_model("GPT2LMHeadModel"), make_batch("GPT2LMHeadModel")
    expected, gradients = unsplit(model, batch)
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=3).sync() as pipe:
        output = pipe(**batch)
        output.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss, rtol=0, atol=1e-10)
        check(model, gradients)
        assert list(pipe(transformers.BatchEncoding(batch))) == ["loss", "logits"]
        assert list(pipe(batch["input_ids"])) == ["logits"]


def test_labels_are_the_target_or_in_the_batch_and_a_loss_of_ones_own_gets_them() -> None:
    model, batch = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM")
    inputs, labels = {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    with torch.no_grad():
        expected = model(**batch).loss.item()
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2).sync() as pipe:
        assert pipe.step(inputs, labels).loss.item() == pytest.approx(expected, abs=1e-10)
        with pytest.raises(BatchError, match="needs labels"):
            pipe.step(inputs)
        pipe.eval()
        assert pipe.step(inputs).loss is None
        assert not any(stage.module.runs[0].image.training for stage in pipe.stages)
        assert pipe.step(batch).loss.item() == pytest.approx(expected, abs=1e-10)
        assert pipe.step(inputs).outputs.logits.shape == (5, 7, 48)
    own = asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2, loss_fn=mean_of_squares)
    with own.sync() as pipe:
        squares = pipe.train().step(batch)
        assert squares.loss.item() == pytest.approx(squares.outputs.logits.square().mean().item(), abs=1e-10)


def mean_of_squares(output: Any, labels: Tensor) -> tuple[Tensor, int]:
    assert labels.dtype is torch.int64
    return output.logits.square().mean(), len(labels)


@pytest.mark.promise(
    "Refused, not wrong", "Options of models and batches of transformers that stages would get wrong are refused."
)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_cache": True}, "no cache"),
        ({"output_attentions": True}, "logits alone"),
        ({"num_items_in_batch": 3}, "argument of the step"),
        ({"input_ids": [[1, 2]] * 5}, "return_tensors"),
    ],
)
def test_what_a_batch_may_not_ask_for(change: dict[str, Any], says: str) -> None:
    model, batch = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM")
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2).sync() as pipe:
        with pytest.raises(BatchError, match=says):
            pipe.step({**batch, **change})
        assert all(parameter.grad is None for parameter in model.parameters())


def reentrant(model: Any) -> None:
    with pytest.warns(FutureWarning) if transformers.__version__ >= "5.20" else pytest.MonkeyPatch.context():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def with_own_loss_function(model: Any) -> None:
    model.loss_function = lambda logits, labels, **_: logits.sum()


@pytest.mark.promise(
    "Refused, not wrong", "Options of models and batches of transformers that stages would get wrong are refused."
)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (reentrant, "checkpoint='always'"),
        (with_own_loss_function, "give loss_fn="),
        (lambda model: model.model.register_forward_hook(lambda *_: None), "submodule 'model' has hooks"),
        (lambda model: setattr(model.config, "output_hidden_states", True), "set it to False"),
        (lambda model: setattr(model.config, "output_router_logits", True), "auxiliary loss"),
        (lambda model: setattr(model.model, "layerdrop", 0.1), "LayerDrop"),
    ],
)
def test_what_stages_would_get_wrong_is_refused(spoil: Any, says: str) -> None:
    model = make_model("LlamaForCausalLM")
    spoil(model)
    with pytest.raises(OptionError, match=says):
        asyncpipe.from_transformers(model, make_batch("LlamaForCausalLM"), devices=DEVICES, microbatches=2)


def test_a_wrong_balance_and_a_plain_pipeline_are_told_of_layers_and_of_from_transformers() -> None:
    model, batch = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM")
    with pytest.raises(BalanceError, match="up to 4, but the model has 3 layers; it must sum up to 3, or to 5 where"):
        asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2, balance=[2, 2])
    with pytest.raises(OptionError, match=r"got LlamaForCausalLM; asyncpipe\.from_transformers\("):
        asyncpipe.Pipeline(model, DEVICES, microbatches=2)


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_what_is_put_on_the_model_later_is_refused_as_well(how: str) -> None:
    """As accelerate's ``prepare`` does: each stage would call what is in parts on all of them."""
    model, batch = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM")
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=2).sync() as pipe:
        pipe.step(batch)
        if how == "hook":
            model.model.register_forward_hook(lambda *_: None)
        else:
            model.forward = functools.partial(model.forward)
        with pytest.raises(OptionError, match="since the pipeline was made"):
            pipe.step(batch)


@pytest.mark.promise(
    "Right results",
    "Adapters, frozen layers, checkpointed layers and tied weights train and are saved as in the unsplit model.",
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_and_checkpointed_layers_train_and_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    base, batch = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM")
    model = peft.get_peft_model(deepcopy(base), config).double()
    model.enable_input_require_grads()
    for layer in model.base_model.model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    expected, gradients = unsplit(model, batch)
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=3).sync() as pipe:
        assert pipe.step(batch).loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
        check(model, gradients)
        assert list(pipe.state_dict()) == list(model.state_dict())
        pipe.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].double(), value, rtol=0, atol=1e-6)


@pytest.mark.promise(
    "Right results",
    "Adapters, frozen layers, checkpointed layers and tied weights train and are saved as in the unsplit model.",
)
@pytest.mark.parametrize("loss", [None, "chunked"])
def test_tied_weights_train_in_workers_and_are_saved(tmp_path: Path, loss: Any) -> None:
    model, batch = make_model("GPT2LMHeadModel"), make_batch("GPT2LMHeadModel")
    expected, gradients = unsplit(model, batch)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for other, tied in model.named_parameters(remove_duplicate=False):
            if tied is parameter:
                trained[other] -= gradients[name]
    pipe = asyncpipe.from_transformers(
        *(model, batch), devices=DEVICES, microbatches=3, workers="processes", optimizer=one_step, loss=loss
    )
    with pipe.sync() as remote:
        assert remote.step(batch).loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
        remote.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, trained[name], rtol=0, atol=1e-10)
    assert loaded.generation_config.eos_token_id == 2


def one_step(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.promise("Right results", "Dynamic rotary embeddings keep the table that a long batch has made.")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 0.0)])
def test_a_table_that_a_forward_has_replaced_stays(dtype: torch.dtype, tolerance: float) -> None:
    """Dynamic rotary embeddings: a long batch makes a table of its own type, which differs from the model's."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_model("LlamaForCausalLM", max_position_embeddings=4, rope_parameters=rope).to(dtype)
    bare = deepcopy(model)
    batch = make_batch("LlamaForCausalLM")
    batches = [batch, {name: value[:, :3] for name, value in batch.items()}, batch]
    with asyncpipe.from_transformers(model, batches[1], devices=DEVICES, microbatches=5).sync() as pipe:
        pipe.step(batch)
        bare(**batch)
        for each in batches:
            found, wanted = pipe.eval().step(each).outputs.logits, bare.eval()(**each).logits
            torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=tolerance)


@pytest.mark.promise(
    "Right results", "The kind of loss is found by one forward of the example, not by the name of the model's class."
)
@pytest.mark.parametrize("name", ["TrOCRForCausalLM", "XLNetLMHeadModel", "BertLMHeadModel"])
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_kind_of_loss_is_the_models_own_whatever_its_class_is_called(name: str, has_labels: bool) -> None:
    configs: dict[str, Any] = {
        "TrOCR": {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24},
        "XLNet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
        "Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    }
    family = next(family for family in configs if name.startswith(family))
    config = getattr(transformers, f"{family}Config")(vocab_size=48, **configs[family])
    model = getattr(transformers, name)(config).double().eval()
    ids = torch.randint(3, 48, (4, 7))
    labels = ids.masked_fill(ids % 5 == 0, -100)
    example = {"input_ids": ids} | ({"labels": labels} if has_labels else {})
    loss = check_loss(model, CountedLoss.of(model, loss_kind(model)), example)
    output = model(input_ids=ids, labels=labels)
    assert loss(output, labels)[0].item() == pytest.approx(output.loss.item(), abs=1e-10)


@pytest.mark.promise("Refused, not wrong", "A model of transformers whose kind of loss is not known is refused.")
def test_a_loss_that_is_of_no_known_kind_is_refused() -> None:
    class OtherForCausalLM(transformers.GPT2LMHeadModel):
        def forward(self, **batch: Any) -> Any:
            output = super().forward(**batch)
            output.loss = output.loss * 2
            return output

    model = OtherForCausalLM(make_model("GPT2LMHeadModel").config)
    with pytest.raises(OptionError, match="give loss_fn=, which gets"):
        asyncpipe.from_transformers(model, make_batch("GPT2LMHeadModel"), devices=DEVICES, microbatches=3)


def test_units_are_joined_also_of_a_copy_and_hooks_of_layers_are_called() -> None:
    model, batch = make_model("GemmaForCausalLM"), make_batch("GemmaForCausalLM")
    finest = stage_transformers(model, batch)
    assert len(finest.stages) == 5
    assert [len(list(unit.parameters())) for unit in finest.joined([2, 2, 1]).joined([2, 1]).stages] == [28, 2]
    assert len(deepcopy(finest).joined([3, 2]).stages) == 2
    seen: list[str] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: seen.append(f"layer {index}"))
    with asyncpipe.from_transformers(model, batch, devices=["cpu"], microbatches=1, balance=[3]).sync() as pipe:
        seen.clear()  # The loss of the example was compared with the model's own.
        pipe.eval().step(batch)
    assert seen == ["layer 0", "layer 1", "layer 2"]


@pytest.mark.promise(
    "Refused, not wrong",
    "A model of an unknown family is accepted only if its stages compute the same example output bit for bit.",
)
@pytest.mark.parametrize(
    ("kind", "classes", "labels"),
    [
        ("causal", 6, torch.tensor([[1, 2, -100, 3], [-100, 5, 0, -100]])),
        ("tokens", 6, torch.tensor([[1, 2, -100, 3], [-100, 5, 0, -100]])),
        ("classes", 6, torch.tensor([1, 3])),
        ("classes", 6, torch.rand(2, 6)),
        ("classes", 1, torch.rand(2)),
    ],
)
def test_each_loss_is_the_librarys(kind: str, classes: int, labels: Tensor) -> None:
    from transformers.loss import loss_utils

    config = transformers.PretrainedConfig(num_labels=classes)
    logits = torch.randn(*labels.shape[: 1 if kind == "classes" else 2], classes)
    expected = {
        "causal": lambda: loss_utils.ForCausalLMLoss(logits, labels, classes),
        "tokens": lambda: loss_utils.ForTokenClassification(logits, labels, config),
        "classes": lambda: loss_utils.ForSequenceClassificationLoss(labels, logits, config),
    }[kind]()
    mean, count = CountedLoss("Model", kind, classes)({"logits": logits}, labels)
    torch.testing.assert_close(mean, expected, check_dtype=False)
    assert count == (labels[..., 1:] != -100).sum() if kind == "causal" else (labels != -100).sum()


@pytest.mark.promise(
    "Refused, not wrong",
    "A model of an unknown family is accepted only if its stages compute the same example output bit for bit.",
)
def test_a_family_that_is_not_known_is_cut_by_structure_if_a_forward_shows_that_it_is_one() -> None:
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    model = transformers.HeliumForCausalLM(transformers.HeliumConfig(**sizes)).double()
    batch = make_batch("LlamaForCausalLM")
    expected, gradients = unsplit(model, batch)
    assert not find_trunks(model)
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=3).sync() as pipe:
        assert {type(stage.module) for stage in pipe.stages} == {LayerStage}
        assert all(module.training for module in model.modules())
        assert pipe.step(batch).loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
    check(model, gradients)


@pytest.mark.promise(
    "Refused, not wrong",
    "A model of an unknown family is accepted only if its stages compute the same example output bit for bit.",
)
def test_a_model_whose_parts_have_the_names_of_a_family_but_that_computes_something_else_is_not_one() -> None:
    class AddsEmbeddings(transformers.LlamaModel):
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
            embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            output = super().forward(inputs_embeds=embedded, **others)
            output.last_hidden_state = output.last_hidden_state + embedded
            return output

    model, batch = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM")
    assert cut_at_layers(model, model, batch, None) is not None
    model.model.__class__ = AddsEmbeddings
    assert cut_at_layers(model, model, {name: batch[name] for name in ("input_ids", "attention_mask")}, None) is None


@pytest.mark.promise(
    "Right results",
    "A model of transformers has the loss and gradients of the whole batch, however the batch is padded and cut.",
)
def test_a_traced_model_takes_other_lengths_and_no_mask_and_needs_no_list_of_layers() -> None:
    sizes = {"vocab_size": 48, "embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    config = transformers.AlbertConfig(**sizes, num_attention_heads=2, hidden_dropout_prob=0.0)
    model = transformers.AlbertForMaskedLM(config).double()
    batch = make_batch("BertForMaskedLM")
    with asyncpipe.from_transformers(model, batch, devices=DEVICES, microbatches=3).sync() as pipe:
        for given in (batch, {name: batch[name][:, :5].contiguous() for name in ("input_ids", "labels")}):
            expected, gradients = unsplit(model, given)
            assert pipe.step(given).loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
            check(model, gradients)
            model.zero_grad()
