"""A model that accelerate has dispatched over the CPU and the accelerator, with its own hooks.

Attention needs more operators than the accelerator has; a step of a dispatched model is tested on CPUs.
"""

import pytest
import torch

import asyncpipe

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def test_a_dispatched_model_keeps_its_weights_where_they_are():
    torch.manual_seed(0)
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 48}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens))
    first, last = ("wte", "wpe", "h.0"), ("h.1", "h.2", "ln_f")
    device_map = {f"transformer.{name}": where for names, where in ((first, "cpu"), (last, "emu:0")) for name in names}
    accelerate.dispatch_model(model, {**device_map, "lm_head": "emu:0"}, main_device="cpu")
    assert any("_hf_hook" in vars(part) for part in model.modules())
    weights = {name: (parameter.device, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    pipe = asyncpipe.from_transformers(model, None, microbatches=2)
    assert [stage.device.name for stage in pipe.stages] == ["cpu", "emu:0"]
    assert {name: (p.device, p.data_ptr()) for name, p in model.named_parameters()} == weights
    assert {p.device.type for p in pipe.stages[1].module.parameters()} == {"emu"}
    assert not any("_hf_hook" in vars(part) or "forward" in vars(part) for part in model.modules())
    other = asyncpipe.from_transformers(model, None, devices=["emu:0", "cpu"], microbatches=2)
    assert {p.device.type for p in other.stages[0].module.parameters()} == {"emu"}
