"""A model that accelerate has dispatched becomes a pipeline: hooks off, the device map as the cut, weights in place."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncpipe
from asyncpipe.errors import OptionError

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from transformers_models import make_batch, make_model  # noqa: E402

LLAMA = {
    "model.embed_tokens": "cpu:0",
    "model.rotary_emb": "cpu:0",
    "model.layers.0": "cpu:0",
    "model.layers.1": "cpu:1",
    "model.layers.2": "cpu:1",
    "model.norm": "cpu:1",
    "lm_head": "cpu:1",
}
GPT2 = {
    "transformer.wte": "cpu:0",
    "transformer.wpe": "cpu:0",
    "transformer.h.0": "cpu:0",
    "transformer.h.1": "cpu:0",
    "transformer.h.2": "cpu:1",
    "transformer.ln_f": "cpu:1",
    "lm_head": "cpu:0",
}

BACK = {**LLAMA, "model.norm": "cpu:0", "lm_head": "cpu:0"}


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library computes norms and losses in float32; here it stays in float64, where sums can be compared."""
    to = Tensor.to

    def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lowers = tensor.dtype is torch.float64 and args[:1] == (torch.float32,)
        return tensor if lowers else to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", kept)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.manual_seed(0)


def dispatched(model: nn.Module, device_map: dict[str, str]) -> Any:
    """``model`` with accelerate's hooks. They know of one CPU; the map tells of more."""
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    model.hf_device_map = device_map
    return model


def layers_of(model: nn.Module, stage: nn.Module) -> list[int]:
    """The numbers of the layers that the stage has."""
    own = {id(parameter) for parameter in stage.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    return sorted({int(found[1]) for name in names if (found := re.search(r"\.(?:layers|h)\.(\d+)\.", name))})


def with_adapters(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


@pytest.mark.promise(
    "Right results",
    "A model that accelerate has dispatched is cut where its map says; adapters of quantized layers train there.",
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    ("name", "device_map", "wrap", "options", "cut"),
    [
        ("LlamaForCausalLM", LLAMA, None, {}, [("cpu:0", [0]), ("cpu:1", [1, 2])]),
        ("GPT2LMHeadModel", GPT2, None, {}, [("cpu:0", [0, 1]), ("cpu:1", [2])]),
        ("LlamaForCausalLM", LLAMA, with_adapters, {}, [("cpu:0", [0]), ("cpu:1", [1, 2])]),
        ("LlamaForCausalLM", BACK, None, {}, [("cpu:0", [0]), ("cpu:1", [1, 2]), ("cpu:0#1", [])]),
        ("LlamaForCausalLM", LLAMA, None, {"balance": [2, 1]}, [("cpu:0", [0, 1]), ("cpu:1", [2])]),
        ("LlamaForCausalLM", LLAMA, None, {"devices": ["cpu:2", "cpu:3"]}, [("cpu:2", [0, 1]), ("cpu:3", [2])]),
    ],
    ids=["two devices", "tied head", "adapters", "a device twice", "cut again", "other devices"],
)
def test_the_device_map_is_the_cut(
    name: str, device_map: dict[str, str], wrap: Any, options: Any, cut: list[tuple[str, list[int]]]
) -> None:
    bare, batch = make_model(name), make_batch(name)
    model = dispatched(bare, device_map)
    model = model if wrap is None else wrap(model)
    reference = deepcopy(model)
    expected = reference(**batch).loss
    expected.backward()
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with asyncpipe.from_transformers(model, batch, microbatches=2, **options).sync() as pipe:
        assert [(stage.device.name, layers_of(model, stage.module)) for stage in pipe.stages] == cut
        assert pipe.step(batch).loss.item() == pytest.approx(expected.item(), abs=1e-10)
    assert not [name for name, part in model.named_modules() if hasattr(part, "_hf_hook") or "forward" in vars(part)]
    for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.data_ptr() == weights[name]
        assert (parameter.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=0, atol=1e-10, msg=name)
    model(**batch).loss.backward()  # Without the hooks the model is itself.


def offloaded(model: nn.Module) -> None:
    accelerate.cpu_offload(model, "cpu")


def with_another_hook(model: nn.Module) -> None:
    accelerate.hooks.add_hook_to_module(model.model.layers[0], accelerate.hooks.ModelHook())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (offloaded, "'model.embed_tokens' is offloaded to the CPU or the disk"),
        (with_another_hook, "has a ModelHook of accelerate"),
        (lambda model: None, "without a device_map"),
        (lambda model: dispatched(model, {"": "cpu:0"}), "on cpu:0 alone"),
    ],
    ids=["offloaded", "another hook", "no map", "one device"],
)
def test_what_says_of_no_cut_is_refused(prepare: Any, says: str) -> None:
    model = make_model("LlamaForCausalLM")
    prepare(model)
    with pytest.raises(OptionError, match=says):
        asyncpipe.from_transformers(model, make_batch("LlamaForCausalLM"), microbatches=2)


@pytest.mark.promise(
    "Right results",
    "A model that accelerate has dispatched is cut where its map says; adapters of quantized layers train there.",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_layers_train_their_adapters_where_they_are(bits: int, tmp_path: Path) -> None:
    """QLoRA as peft prepares it, with its gradient checkpointing, against the unsplit quantized model."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    model, batch = make_model("LlamaForCausalLM", hidden_size=64, intermediate_size=64), make_batch("LlamaForCausalLM")
    model.float().save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, bnb_4bit_quant_type="nf4")
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config, device_map="cpu", dtype=torch.float32)
    dispatched(loaded, LLAMA)
    loaded = peft.prepare_model_for_kbit_training(loaded, gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(loaded, lora).train()
    expected = adapted(**batch).loss
    expected.backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
    adapted.zero_grad()
    weights = {name: (type(p), p.data_ptr()) for name, p in adapted.named_parameters()}
    with asyncpipe.from_transformers(adapted, batch, microbatches=2, checkpoint="never").sync() as pipe:
        assert layers_of(adapted, pipe.stages[0].module) == [0]
        assert pipe.step(batch).loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert {name: (type(p), p.data_ptr()) for name, p in adapted.named_parameters()} == weights
    assert gradients.keys() == {name for name, p in adapted.named_parameters() if p.grad is not None}
    for name, parameter in adapted.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="workers='threads'"):
        asyncpipe.from_transformers(adapted, batch, microbatches=2, workers="processes", optimizer=torch.optim.SGD)
