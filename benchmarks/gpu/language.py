"""Checks of language models, for which transformers and accelerate are installed."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import torch

from asyncpipe import from_transformers
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcome import Figure, Outcome, at_most, check

__all__: list[str] = []


@check("Does a model with a device_map keep its weights, and train as it does without a pipeline?")
def device_map(machine: Machine) -> Outcome:
    """A small Llama that accelerate has dispatched, on two logical devices; with bitsandbytes and peft in 4 bits."""
    if not (find_spec("transformers") and find_spec("accelerate")):
        return Outcome([], "transformers and accelerate are not installed")
    import accelerate
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
    ids = torch.randint(512, (8, 32), device=machine.device)
    batch = {"input_ids": ids, "labels": ids}
    whole = deepcopy(model).to(machine.device)
    accelerate.dispatch_model(whole, {"": machine.device}, force_hooks=True)
    figures = _trained("in float32", machine, whole, batch)
    if find_spec("bitsandbytes") and find_spec("peft"):
        figures += _trained("in 4 bits", machine, _in_four_bits(model, machine.device), batch)
    return Outcome(figures)


def _trained(name: str, machine: Machine, model: Any, batch: dict[str, torch.Tensor]) -> list[Figure]:
    expected = model(**batch).loss
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    weights = {key: p.data_ptr() for key, p in model.named_parameters()}
    with from_transformers(model, batch, devices=machine.two, microbatches=4).sync() as pipe:
        loss = pipe.step(batch).wait().loss
        assert loss is not None
    apart = [float((p.grad - gradients[key]).abs().max()) for key, p in model.named_parameters() if p.grad is not None]
    moved = sum(p.data_ptr() != weights[key] for key, p in model.named_parameters())
    missing = len(gradients) - len(apart)
    return [
        at_most(f"{name}: loss, off by", abs(float(loss) - float(expected)), 1e-4, promised=True),
        at_most(f"{name}: gradients, off by", max(apart), 1e-3, promised=True),
        at_most(f"{name}: parameters that moved or have no gradient", moved + missing, 0, promised=True),
    ]


def _in_four_bits(model: Any, device: torch.device) -> Any:
    """``model`` with layers of bitsandbytes, as ``from_pretrained`` makes them of a folder, and adapters."""
    from tempfile import TemporaryDirectory

    import peft
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        made = type(model).from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, device_map={"": str(device)}
        )
    kept = {"use_reentrant": False}
    made = peft.prepare_model_for_kbit_training(made, gradient_checkpointing_kwargs=kept)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(made, lora).train()
