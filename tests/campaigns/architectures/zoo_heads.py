"""Families of transformers with each of their heads, and batches for them: padded, and with several texts in a row."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.architectures.architecture import SAMPLES, Architecture, floats, numbers
from tests.campaigns.architectures.zoo_transformers import (
    _BART,
    _BLOOM,
    _CONVNEXT,
    _DEBERTA,
    _DINO,
    _DISTILBERT,
    _GPT2,
    _LABELS,
    _MAMBA,
    _MIXTRAL,
    _OPT,
    _SWIN,
    _T5,
    _WAV2VEC2,
    _WHISPER,
    DECODER,
    ENCODER,
    GROUPED,
    IMAGE,
    LENGTH,
    WORDS,
)

__all__ = ["HEADS", "layouts"]

_HEADED = GROUPED | {"head_dim": 8}
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
_MOE = _MIXTRAL | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
_LATENT = DECODER | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_LATENT |= {"moe_intermediate_size": 16, "first_k_dense_replace": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
_LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "experts_implementation": "batched_mm"}
_OSS = _HEADED | _WINDOW | {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_LLAMA4 = _HEADED | {"num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0, 1, 0]}
_MODERN = ENCODER | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_LISTENING = {"apply_spec_augment": False, "layerdrop": 0.0}
_ALBERT = DECODER | {"embedding_size": 16}
_FALCON = ENCODER | {"pad_token_id": 0}

CAUSAL, CLASSES, WORDWISE, ANSWERS = "CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"
MASKED, PAIR, PICTURE = "MaskedLM", "ConditionalGeneration", "ImageClassification"

_FAMILIES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("GPT2", _GPT2 | {"pad_token_id": 0}, (CAUSAL, CLASSES, WORDWISE, ANSWERS)),
    ("Llama", GROUPED, (CAUSAL, CLASSES, WORDWISE, ANSWERS)),
    ("Mistral", GROUPED | {"sliding_window": 6}, (CAUSAL, CLASSES)),
    ("Qwen2", GROUPED | {"tie_word_embeddings": True}, (CAUSAL, CLASSES)),
    ("Qwen3", _HEADED, (CAUSAL, WORDWISE)),
    ("Gemma", _HEADED, (CAUSAL,)),
    ("Gemma2", _HEADED | _WINDOW, (CAUSAL, CLASSES)),
    ("Gemma3", _HEADED | _WINDOW, (CAUSAL,)),
    ("Mixtral", _MIXTRAL, (CAUSAL, CLASSES)),
    ("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 16}, (CAUSAL,)),
    ("Qwen3Moe", _MOE | {"head_dim": 8}, (CAUSAL, CLASSES)),
    ("DeepseekV3", _LATENT, (CAUSAL,)),
    ("GptOss", _OSS, (CAUSAL,)),
    ("Llama4", _LLAMA4, (CAUSAL,)),
    ("Phi", DECODER, (CAUSAL,)),
    ("Phi3", GROUPED, (CAUSAL, CLASSES)),
    ("Olmo", GROUPED, (CAUSAL,)),
    ("Olmo2", GROUPED, (CAUSAL,)),
    ("SmolLM3", GROUPED | {"no_rope_layers": [1, 0, 1, 0]}, (CAUSAL,)),
    ("Granite", GROUPED | _MULTIPLIERS, (CAUSAL,)),
    ("Cohere", GROUPED, (CAUSAL,)),
    ("StableLm", GROUPED, (CAUSAL,)),
    ("Starcoder2", GROUPED, (CAUSAL,)),
    ("Nemotron", GROUPED, (CAUSAL,)),
    ("Glm", _HEADED, (CAUSAL,)),
    ("GPTNeoX", DECODER, (CAUSAL,)),
    ("GPTJ", _GPT2 | {"rotary_dim": 4}, (CAUSAL,)),
    ("OPT", _OPT, (CAUSAL,)),
    ("Bloom", _BLOOM, (CAUSAL,)),
    ("Falcon", _FALCON, (CAUSAL,)),
    ("Mamba", _MAMBA, (CAUSAL,)),
    ("Bert", DECODER, (MASKED, CLASSES, WORDWISE, ANSWERS)),
    ("Roberta", DECODER, (MASKED, CLASSES, WORDWISE)),
    ("XLMRoberta", DECODER, (WORDWISE,)),
    ("DistilBert", _DISTILBERT | {"max_position_embeddings": 32}, (MASKED, CLASSES, ANSWERS)),
    ("Electra", _ALBERT, (MASKED, WORDWISE)),
    ("Albert", _ALBERT, (MASKED, CLASSES)),
    ("DebertaV2", _DEBERTA, (MASKED, CLASSES, WORDWISE)),
    ("ModernBert", _MODERN, (MASKED, CLASSES)),
    ("T5", _T5 | {"decoder_start_token_id": 0, "pad_token_id": 0}, (PAIR,)),
    ("Bart", _BART | {"pad_token_id": 0}, (PAIR,)),
    ("MBart", _BART | {"pad_token_id": 0}, (PAIR,)),
    ("Whisper", _WHISPER | {"decoder_start_token_id": 1}, (PAIR,)),
    ("ViT", IMAGE | {"encoder_stride": 8}, (PICTURE, "MaskedImageModeling")),
    ("DeiT", IMAGE, (PICTURE,)),
    ("Dinov2", _DINO, (PICTURE,)),
    ("Swin", _SWIN, (PICTURE,)),
    ("ConvNext", _CONVNEXT, (PICTURE,)),
    ("Wav2Vec2", _WAV2VEC2 | _LISTENING, (CLASSES, "CTC")),
]


def _build(family: str, config: dict[str, Any], head: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    end = "LMHeadModel" if (family, head) == ("GPT2", CAUSAL) else f"For{head}"
    text = "Text" if family in ("Gemma3", "Llama4") else ""
    labels = _LABELS if head in (CLASSES, WORDWISE, PICTURE) else {}
    made = getattr(transformers, f"{family}{text}Config")(**config, **labels)
    return getattr(transformers, f"{family}{end}")(made), _batch(family, head)


def _batch(family: str, head: str) -> dict[str, Any]:
    if family == "Wav2Vec2":
        return {"input_values": floats(400), "labels": numbers(WORDS, 4) if head == "CTC" else numbers(3)}
    if family == "Whisper":
        return {"input_features": floats(8, 24), "labels": numbers(WORDS, LENGTH)}
    if head == PICTURE:
        return {"pixel_values": floats(3, *([64] * 2 if family == "ConvNext" else [32] * 2)), "labels": numbers(3)}
    if head == "MaskedImageModeling":
        return {"pixel_values": floats(3, 32, 32), "bool_masked_pos": torch.arange(16).expand(SAMPLES, 16) % 3 == 0}
    ids = numbers(WORDS, LENGTH)
    lengths = LENGTH - torch.arange(SAMPLES) % 4
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, **_LABELLED[head](ids.where(mask > 0, -100))}


_LABELLED: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    **dict.fromkeys((CAUSAL, MASKED, PAIR), lambda ids: {"labels": ids}),
    CLASSES: lambda _: {"labels": numbers(3)},
    WORDWISE: lambda ids: {"labels": ids.where(ids < 0, ids % 3)},
    ANSWERS: lambda _: {"start_positions": numbers(3), "end_positions": 2 + numbers(4)},
}


def layouts(model: nn.Module, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The batch, and for causal models of words one with two texts in each row, told apart by their positions."""
    found = {"padding": batch}
    is_causal = type(model).__name__.endswith((CAUSAL, "LMHeadModel")) and "input_ids" in batch
    if is_causal and "position_ids" in signature(model.forward).parameters:
        ids, begins = numbers(WORDS, LENGTH), (torch.arange(SAMPLES) % 3 + 3)[:, None]
        counted = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
        positions = counted.where(counted < begins, counted - begins)
        found["packing"] = {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)}
    return found


HEADS: dict[str, Architecture] = {}
"""By family and head."""

for _family, _config, _heads in _FAMILIES:
    for _head in _heads:

        def _made(parts: tuple[str, dict[str, Any], str] = (_family, _config, _head)) -> Any:
            return _build(*parts)

        HEADS[f"{_family}:{_head}"] = Architecture(f"{_family}:{_head}", "transformers", _made)
