"""Models of transformers, from small configs."""

from __future__ import annotations

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

Built = tuple[nn.Module, dict[str, Any]]


def _text(labels: str = "words") -> dict[str, Tensor]:
    """Sentences, a third of them padded at the right, with labels for each word or each sentence."""
    ids = numbers(WORDS, LENGTH)
    mask = torch.ones_like(ids)
    mask[::3, LENGTH - 3 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if labels == "words":
        batch["labels"] = ids.clone()
    elif labels == "sentence":
        batch["labels"] = numbers(3)
    return batch


def _language_model(config: str, model: str, options: dict[str, Any], labels: str = "words") -> Built:
    import transformers

    made = getattr(transformers, config)(**{"use_cache": False, **options})
    return getattr(transformers, model)(made), _text(labels)


def _images(config: str, model: str, options: dict[str, Any], side: int = 32) -> Built:
    import transformers

    made = getattr(transformers, config)(**options, num_labels=3)
    return getattr(transformers, model)(made), {"pixel_values": floats(3, side, side), "labels": numbers(3)}


_DEBERTA = DECODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
_OPT = {"vocab_size": WORDS, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_OPT |= {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "pad_token_id": 0}
_DISTILBERT = {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
# The eager experts branch on values, and grouped products know no float64.
_MIXTRAL = GROUPED | {"num_local_experts": 3, "experts_implementation": "batched_mm"}

LANGUAGE_MODELS: dict[str, tuple[Any, ...]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 6}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "bert": ("BertConfig", "BertForMaskedLM", DECODER),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", DECODER | {"num_labels": 3}, "sentence"),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", _DISTILBERT | {"max_position_embeddings": 32}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", DECODER | {"embedding_size": 16}),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", _DEBERTA),
    # Its loss branches on how many labels there are, which a trace cannot follow.
    "deberta_classes": ("DebertaV2Config", "DebertaV2ForSequenceClassification", _DEBERTA, "sentence"),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", DECODER | {"embedding_size": 16}),
    "xlm_roberta": ("XLMRobertaConfig", "XLMRobertaForTokenClassification", DECODER | {"num_labels": WORDS}),
    "opt": ("OPTConfig", "OPTForCausalLM", _OPT),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", DECODER),
    "falcon": ("FalconConfig", "FalconForCausalLM", ENCODER),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL),
    "mamba": (
        *("MambaConfig", "MambaForCausalLM"),
        {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
    ),
}
"""By name: the classes of config and model, the config, and what has labels."""
for _name, _row in LANGUAGE_MODELS.items():
    entry("transformers", name=_name)(partial(_language_model, *_row))


def _sides(layers: int) -> dict[str, int]:
    """A config of an encoder and a decoder."""
    sizes = {"layers": layers, "ffn_dim": 48, "attention_heads": 4}
    return {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes.items()}


@entry("transformers")
def t5() -> Built:
    import transformers

    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config), _text()


@entry("transformers")
def bart() -> Built:
    import transformers

    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, max_position_embeddings=32, use_cache=False, **_sides(3)
    )
    return transformers.BartForConditionalGeneration(config), _text()


@entry("transformers")
def whisper() -> Built:
    import transformers

    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        use_cache=False,
        **_sides(2),
        **ends,
    )
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": floats(8, 24),
        "labels": numbers(WORDS, LENGTH),
    }


@entry("transformers")
def wav2vec2() -> Built:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config), {
        "input_values": floats(400),
        "labels": torch.randint(0, 2, (SAMPLES,)),
    }


@entry("transformers", mixes=True)
def clip() -> Built:
    import transformers

    text = ENCODER | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16)
    return transformers.CLIPModel(config), {**_text(""), "pixel_values": floats(3, 32, 32)}


@entry("transformers")
def clip_vision() -> Built:
    import transformers

    config = transformers.CLIPVisionConfig(**IMAGE, projection_dim=16)
    return transformers.CLIPVisionModelWithProjection(config), {"pixel_values": floats(3, 32, 32)}


_DINO = {key: value for key, value in IMAGE.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_CONVNEXT = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
for _name, _row in {
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", _DINO),
    "swin": ("SwinConfig", "SwinForImageClassification", _SWIN),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", _CONVNEXT, 64),
}.items():
    entry("transformers", name=_name)(partial(_images, *_row))


@entry("transformers")
def segformer() -> Built:
    import transformers

    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        num_labels=3,
    )
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": floats(3, 64, 64)}
