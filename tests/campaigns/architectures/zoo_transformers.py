"""Models of transformers, from small configs."""

from __future__ import annotations

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


@entry("transformers")
def gpt2() -> Built:
    options = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
    return _language_model("GPT2Config", "GPT2LMHeadModel", options)


@entry("transformers")
def llama() -> Built:
    return _language_model("LlamaConfig", "LlamaForCausalLM", GROUPED)


@entry("transformers")
def mistral() -> Built:
    return _language_model("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 6})


@entry("transformers")
def qwen2() -> Built:
    return _language_model("Qwen2Config", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True})


@entry("transformers")
def qwen3() -> Built:
    return _language_model("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": 8})


@entry("transformers")
def gemma() -> Built:
    return _language_model("GemmaConfig", "GemmaForCausalLM", GROUPED | {"head_dim": 8})


@entry("transformers")
def gemma2() -> Built:
    return _language_model("Gemma2Config", "Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 6})


@entry("transformers")
def bert() -> Built:
    return _language_model("BertConfig", "BertForMaskedLM", DECODER)


@entry("transformers")
def roberta() -> Built:
    return _language_model("RobertaConfig", "RobertaForSequenceClassification", DECODER | {"num_labels": 3}, "sentence")


@entry("transformers")
def distilbert() -> Built:
    options = {
        "vocab_size": WORDS,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 32,
    }
    return _language_model("DistilBertConfig", "DistilBertForMaskedLM", options)


@entry("transformers")
def albert() -> Built:
    return _language_model("AlbertConfig", "AlbertForMaskedLM", DECODER | {"embedding_size": 16})


@entry("transformers")
def deberta() -> Built:
    return _language_model("DebertaV2Config", "DebertaV2ForMaskedLM", _DEBERTA)


@entry("transformers")
def deberta_classes() -> Built:
    """Its loss branches on how many labels there are, which a trace cannot follow."""
    options = _DEBERTA | {"num_labels": 3}
    return _language_model("DebertaV2Config", "DebertaV2ForSequenceClassification", options, "sentence")


@entry("transformers")
def electra() -> Built:
    return _language_model("ElectraConfig", "ElectraForMaskedLM", DECODER | {"embedding_size": 16})


@entry("transformers")
def xlm_roberta() -> Built:
    return _language_model("XLMRobertaConfig", "XLMRobertaForTokenClassification", DECODER | {"num_labels": WORDS})


@entry("transformers")
def opt() -> Built:
    options = {"vocab_size": WORDS, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    options |= {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "pad_token_id": 0}
    return _language_model("OPTConfig", "OPTForCausalLM", options)


@entry("transformers")
def bloom() -> Built:
    return _language_model(
        "BloomConfig", "BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}
    )


@entry("transformers")
def gpt_neox() -> Built:
    return _language_model("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER)


@entry("transformers")
def gptj() -> Built:
    options = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4}
    return _language_model("GPTJConfig", "GPTJForCausalLM", options)


@entry("transformers")
def phi() -> Built:
    return _language_model("PhiConfig", "PhiForCausalLM", DECODER)


@entry("transformers")
def falcon() -> Built:
    options = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _language_model("FalconConfig", "FalconForCausalLM", options | {"max_position_embeddings": 32})


@entry("transformers")
def mixtral() -> Built:
    # The eager experts branch on values, and grouped products know no float64.
    options = GROUPED | {"num_local_experts": 3, "experts_implementation": "batched_mm"}
    return _language_model("MixtralConfig", "MixtralForCausalLM", options)


@entry("transformers")
def mamba() -> Built:
    options = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}
    return _language_model("MambaConfig", "MambaForCausalLM", options)


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

    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 3), ("ffn_dim", 48), ("attention_heads", 4))
    }
    config = transformers.BartConfig(vocab_size=WORDS, d_model=32, max_position_embeddings=32, use_cache=False, **sides)
    return transformers.BartForConditionalGeneration(config), _text()


@entry("transformers")
def whisper() -> Built:
    import transformers

    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
    }
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        use_cache=False,
        **sides,
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


@entry("transformers")
def vit() -> Built:
    return _images("ViTConfig", "ViTForImageClassification", IMAGE)


@entry("transformers")
def deit() -> Built:
    return _images("DeiTConfig", "DeiTForImageClassification", IMAGE)


@entry("transformers")
def dinov2() -> Built:
    options = IMAGE | {"mlp_ratio": 2}
    options.pop("intermediate_size")
    return _images("Dinov2Config", "Dinov2ForImageClassification", options)


@entry("transformers")
def swin() -> Built:
    options = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    return _images("SwinConfig", "SwinForImageClassification", options)


@entry("transformers")
def convnext() -> Built:
    options = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
    return _images("ConvNextConfig", "ConvNextForImageClassification", options, side=64)


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
