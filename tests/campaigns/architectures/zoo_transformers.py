"""Models of transformers, from small configs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.architectures.architecture import SAMPLES, entry, floats, numbers

WORDS, LENGTH = 61, 10
DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = DECODER | {"num_key_value_heads": 2}
ENCODER = {key: value for key, value in DECODER.items() if key != "pad_token_id"}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}

Batch = Callable[[], dict[str, Tensor]]


def _text(labels: str = "words") -> dict[str, Tensor]:
    """Sentences, a third of them padded at the right, with labels for each word or each sentence."""
    ids = numbers(WORDS, LENGTH)
    mask = torch.ones_like(ids)
    mask[::3, LENGTH - 3 :] = 0
    labelled = {"words": lambda: {"labels": ids.clone()}, "sentence": lambda: {"labels": numbers(3)}, "": dict}
    return {"input_ids": ids, "attention_mask": mask, **labelled[labels]()}


def _images(side: int = 32, *, labels: bool = True) -> dict[str, Tensor]:
    return {"pixel_values": floats(3, side, side), **({"labels": numbers(3)} if labels else {})}


def _sentences() -> dict[str, Tensor]:
    return _text("sentence")


def _sides(layers: int) -> dict[str, int]:
    """A config of an encoder and a decoder."""
    sizes = {"layers": layers, "ffn_dim": 48, "attention_heads": 4}
    return {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes.items()}


_DEBERTA = DECODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
_BLOOM = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}
_OPT = {"vocab_size": WORDS, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_OPT |= {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "pad_token_id": 0}
_DISTILBERT = {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
# The eager experts branch on values, and grouped products know no float64.
_MIXTRAL = GROUPED | {"num_local_experts": 3, "experts_implementation": "batched_mm"}
_MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
_BART = {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 32, **_sides(3)}
_WHISPER = {"vocab_size": WORDS, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 12, **_sides(2)}
_WHISPER |= {"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WAV2VEC2 = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_WAV2VEC2 |= {"intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4)}
_WAV2VEC2 |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
_CLIP_TEXT = ENCODER | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
_LABELS = {"num_labels": 3}
_DINO = {key: value for key, value in IMAGE.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_CONVNEXT = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
_SEGFORMER = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4]}

MODELS: dict[str, tuple[str, str, dict[str, Any], Batch]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2, _text),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, _text),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 6}, _text),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}, _text),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8}, _text),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GROUPED | {"head_dim": 8}, _text),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 6}, _text),
    "bert": ("BertConfig", "BertForMaskedLM", DECODER, _text),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", DECODER | _LABELS, _sentences),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", _DISTILBERT | {"max_position_embeddings": 32}, _text),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", DECODER | {"embedding_size": 16}, _text),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", _DEBERTA, _text),
    # Its loss branches on how many labels there are, which a trace cannot follow.
    "deberta_classes": ("DebertaV2Config", "DebertaV2ForSequenceClassification", _DEBERTA | _LABELS, _sentences),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", DECODER | {"embedding_size": 16}, _text),
    "xlm_roberta": ("XLMRobertaConfig", "XLMRobertaForTokenClassification", DECODER | {"num_labels": WORDS}, _text),
    "opt": ("OPTConfig", "OPTForCausalLM", _OPT, _text),
    "bloom": ("BloomConfig", "BloomForCausalLM", _BLOOM, _text),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER, _text),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}, _text),
    "phi": ("PhiConfig", "PhiForCausalLM", DECODER, _text),
    "falcon": ("FalconConfig", "FalconForCausalLM", ENCODER, _text),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL, _text),
    "mamba": ("MambaConfig", "MambaForCausalLM", _MAMBA, _text),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5 | {"decoder_start_token_id": 0}, _text),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART, _text),
    "whisper": (
        *("WhisperConfig", "WhisperForConditionalGeneration", _WHISPER | {"decoder_start_token_id": 1}),
        lambda: {"input_features": floats(8, 24), "labels": numbers(WORDS, LENGTH)},
    ),
    "wav2vec2": (
        *("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification"),
        _WAV2VEC2 | {"apply_spec_augment": False, "layerdrop": 0.0},
        lambda: {"input_values": floats(400), "labels": torch.randint(0, 2, (SAMPLES,))},
    ),
    "clip": (
        *("CLIPConfig", "CLIPModel", {"text_config": _CLIP_TEXT, "vision_config": IMAGE, "projection_dim": 16}),
        lambda: {**_text(""), **_images(labels=False)},
    ),
    "clip_vision": (
        *("CLIPVisionConfig", "CLIPVisionModelWithProjection", IMAGE | {"projection_dim": 16}),
        lambda: _images(labels=False),
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE | _LABELS, _images),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE | _LABELS, _images),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", _DINO | _LABELS, _images),
    "swin": ("SwinConfig", "SwinForImageClassification", _SWIN | _LABELS, _images),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", _CONVNEXT | _LABELS, partial(_images, 64)),
    "segformer": (
        *("SegformerConfig", "SegformerForSemanticSegmentation"),
        _SEGFORMER | {"decoder_hidden_size": 16} | _LABELS,
        lambda: _images(64, labels=False),
    ),
}
"""By name: the classes of config and model, the config, and what makes a batch."""


def _build(config: str, model: str, options: dict[str, Any], batch: Batch) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    made = getattr(transformers, config)(**options)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return getattr(transformers, model)(made), batch()


for _name, _row in MODELS.items():
    entry("transformers", name=_name, mixes=_name == "clip")(partial(_build, *_row))
