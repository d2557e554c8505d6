"""A Llama 3 8B on four devices of 24 GB: what its stages need, counted by bytes, and the plans that fit.

The model is fake: its tensors have shapes and no memory. Each layer runs once, forward and backward, as a stage of its
own, so saved, working and travelling bytes are those of transformers' own layers, by the same counters as a profile
has. Seconds are operations over a rate. Then the planner chooses, as ``asyncpipe plan`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown
from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement, Profile, ProfiledLayer
from asyncpipe.core.predict.planner import plan
from asyncpipe.errors import PlanError
from asyncpipe.ops.model import byte_recorder
from asyncpipe.ops.model.byte_recorder import ByteRecorder, parameter_bytes, travelling
from asyncpipe.ops.model.microbatch import Arguments
from asyncpipe.ops.model.stage import CALLER, LOSS
from asyncpipe.ops.model.transformers.stage_transformers import stage_transformers

__all__ = ["LanguageSize", "run", "show"]

GIB = 1 << 30
DEVICES = 4


@dataclass(frozen=True, slots=True)
class LanguageSize:
    """The models, the batch, and the devices."""

    config: tuple[tuple[str, int], ...] = (
        ("vocab_size", 128_256),
        ("hidden_size", 4096),
        ("intermediate_size", 14_336),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 8),
    )
    tokens: int = 4096
    """Of a micro-batch, which is one sequence."""
    microbatches: int = 16
    limit: float = 22.5 * GIB
    """Of 24 GiB, the rest is for contexts and what an allocator keeps."""
    flops: float = 80e12
    """Operations a second: about half of what an RTX 4090 has in bfloat16."""
    bus: float = 20e9
    """Bytes a second between devices, and to the host."""


def run(progress: Progress, *, size: LanguageSize | None = None) -> Figures:
    """The bytes of the head, plain and by chunks; and plans."""
    size = size or LanguageSize()
    heads: list[Figures] = []
    plans = []
    for adapters in (False, True):
        for form in (None, "chunked"):
            progress(f"counting {'adapters' if adapters else 'all weights'}, loss {form}")
            profile = _profile(size, form, adapters=adapters)
            head = profile.measurement(size.microbatches).layers[-1]
            kept, working = head.saved / GIB, head.working / GIB
            trains = "LoRA" if adapters else "all weights"
            heads.append(
                {"trains": trains, "loss": form or "plain", "kept": f"{kept:.2f}", "working": f"{working:.2f}"}
            )
            for where, scale in (("on the devices", 4.0), ("on the host", 2.0)):
                plans.append(_plan_row(size, profile, form, adapters, where, scale))
                progress(str(plans[-1]))
    return {"heads": heads, "plans": plans, "limit": size.limit / GIB, "tokens": size.tokens} | {
        "microbatches": size.microbatches
    }


show = markdown(
    heads="What the head keeps of a micro-batch, and needs besides while it runs, in GiB.",
    plans="Llama 3 8B in bfloat16 on 4 devices of {limit:.4g} GiB, {microbatches} sequences of {tokens} tokens.",
)


@dataclass(frozen=True)
class _FakeStage:
    index: int
    module: nn.Module


def _llama(config: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(use_cache=False, tie_word_embeddings=False, **config))
    return model


@contextmanager
def _fake() -> Iterator[None]:
    """Tensors without memory, which counters tell apart by their storages."""
    address, apply = byte_recorder._address, nn.Module._apply
    nn.Module._apply = lambda self, *_: self  # type: ignore[method-assign]  # They stay what they are.
    byte_recorder._address = lambda tensor: tensor.untyped_storage()._cdata
    mode: Any = FakeTensorMode()
    mode.__deepcopy__ = lambda _: mode  # Images of modules copy buffers.
    try:
        with mode:
            yield
    finally:
        byte_recorder._address = address
        nn.Module._apply = apply  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def _profile(size: LanguageSize, form: str | None, *, adapters: bool) -> Profile:
    """Of one micro-batch; bytes are counted, seconds follow from operations."""
    with _fake():
        torch.set_default_dtype(torch.bfloat16)
        model = _llama(dict(size.config))
        if adapters:
            import peft

            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            adapter = peft.LoraConfig(r=16, target_modules=names)
            model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)
        staged = stage_transformers(model, None, loss_form=form)
        ids = torch.zeros(1, size.tokens, dtype=torch.long)
        stages = [_FakeStage(index, module) for index, module in enumerate(staged.stages)]
        recorder = ByteRecorder()
        loss = recorder.loss(staged.own_loss)  # type: ignore[arg-type]
        received: list[dict[int, Any]] = [{} for _ in stages]
        for index, value in staged.caller_values(Arguments((), {"input_ids": ids})).items():
            received[index][CALLER] = value
        with recorder.watching(stages):  # type: ignore[arg-type]
            for stage in stages:
                if form and stage is stages[-1]:
                    received[stage.index][LOSS] = None
                for user, value in stage.module(received[stage.index]).items():
                    if user == CALLER:
                        loss(value, ids)
                    else:
                        received[user][stage.index] = {k: _leaf(each) for k, each in value.items()}
        counted = [recorder.layers[stage.index] for stage in stages]
        layers, costs = [], []
        for stage, each in zip(stages, counted, strict=True):
            parameters, trained = parameter_bytes(stage.module)
            layers.append(ProfiledLayer(f"unit {stage.index}", parameters, trained, each.inner))
            has_layer = 0 < stage.index < len(stages) - 1
            operations = parameters * size.tokens if stage.index else 0  # Two for each weight, of two bytes.
            attention = 2 * size.tokens**2 * dict(size.config)["hidden_size"] if has_layer else 0
            seconds = (operations + attention) / size.flops
            weights = seconds * trained / parameters
            times = (seconds, seconds, seconds, seconds + weights, seconds, weights)
            costs.append(LayerCosts(*times, each.saved, each.working))
    measured = Measurement(
        tuple(costs),
        dict.fromkeys("FRBIW", 2e-4),
        1e-3,
        2e-5,
        size.bus,
        sent=travelling(counted),
        host_bandwidth=size.bus,
        updating=1e11,
    )
    return Profile(tuple(layers), staged.links, {size.microbatches: measured})


def _leaf(value: Any) -> Any:
    cut = partial(torch.Tensor.detach)
    return cut(value).requires_grad_() if value.is_floating_point() else value


def _balances(stages: int) -> list[list[int]]:
    """With fewer and fewer units at the last stage, which has the head."""
    units = 34
    found = []
    for last in range(units // stages - 5, units // stages + 2):
        size, more = divmod(units - last, stages - 1)
        found.append([size + (stage < more) for stage in range(stages - 1)] + [last])
    return found


def _plan_row(
    size: LanguageSize, profile: Profile, form: str | None, adapters: bool, where: str, scale: float
) -> Figures:
    row = {"trains": "LoRA" if adapters else "all weights", "loss": form or "plain", "states of AdamW": where}
    options: dict[str, Any] = {"schedules": ["1f1b", "zb-h1"], "balances": _balances}
    try:
        best = plan(profile, DEVICES, memory_limit=round(size.limit), offload=True, parameter_scale=scale, **options)[0]
    except PlanError:
        return row | {"plan": "nothing fits", "step": "", "memory": ""}
    memory = " ".join(f"{each / GIB:.1f}" for each in best.memory)
    return row | {"plan": str(best), "step": f"{best.seconds:.2f} s", "memory": f"{memory} GiB"}
