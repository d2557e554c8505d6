"""Tiny models of transformers, made from configs, and batches with padding and labels that are ignored."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, LABELS = 48, 7, 3
_SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
_DECODER = {"vocab_size": VOCABULARY, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "num_labels": LABELS}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": LABELS}
_BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, **_NO_DROPOUT}
_CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2": {
        "vocab_size": VOCABULARY,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "num_labels": LABELS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    **{name: {**_SIZES, **_DECODER} for name in ("Llama", "Mistral", "Gemma2", "Gemma", "Qwen2", "Qwen3")},
    **{name: {**_SIZES, **_BERT} for name in ("Bert", "Roberta")},
    "ViT": {**_SIZES, **_NO_DROPOUT, "image_size": 8, "patch_size": 4},
    "T5": {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
}
_CONFIGS["Mistral"]["sliding_window"] = 4
_CONFIGS["Qwen2"] |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def make_model(name: str, **options: Any) -> nn.Module:
    """The model of this class, in float64; ``options`` are of its config. Draws from the default generator."""
    import transformers

    family = next(family for family in _CONFIGS if name.startswith(family))
    config = getattr(transformers, f"{family}Config")(**{**_CONFIGS[family], **options})
    return getattr(transformers, name)(config).double()


def make_batch(name: str, samples: int = 5, *, seed: int = 1) -> dict[str, Tensor]:
    """A batch for a model of this class; no two samples have as many tokens or labels."""
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("ViT"):
        pixels = torch.rand(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(LABELS, (samples,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)
    lengths = LENGTH - torch.arange(samples) * 3 % LENGTH
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100)
    if "MaskedLM" in name:
        labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, -100)
    if "TokenClassification" in name:
        labels = labels.where(labels < 0, labels % LABELS)
    if "SequenceClassification" in name:
        labels = torch.randint(LABELS, (samples,), generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name.startswith("Bert"):
        batch["token_type_ids"] = (torch.arange(LENGTH) > 2).long().repeat(samples, 1)
    return batch


def unsplit(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor | None]]:
    """What the model itself returns for the whole batch, and its gradients."""
    reference = deepcopy(model)
    output = reference(**batch)
    output.loss.backward()
    return output, {name: parameter.grad for name, parameter in reference.named_parameters()}


def check(model: nn.Module, gradients: dict[str, Tensor | None], apart: float = 1e-10) -> None:
    for name, parameter in model.named_parameters():
        expected = gradients[name]
        if expected is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=apart, msg=name)
