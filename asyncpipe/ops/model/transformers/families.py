"""Where each family of models has its embeddings, its layers, and what follows them.

A *trunk* is the module whose ``forward`` has the loop over the layers, a decoder or an encoder. It is known by the name
of its class, or guessed by the names of its parts and then compared. To add a family, add its name or a form, and its
model to the campaign ``heads``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import nn

__all__ = ["Family", "Trunk", "find_trunks", "guess_trunks"]


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a trunk's parts, from the trunk."""

    layers: str
    first: tuple[str, ...]
    """What comes before the layers, where the trunk has it. Later stages have stand-ins."""
    last: tuple[str, ...]
    """What comes behind them, where the trunk has it. A part that is also in ``first`` is used at both ends."""
    read: str = ""
    """A tensor inside the first part whose type the trunk reads in every stage."""


_LLAMA = Family("layers", ("embed_tokens", "embed_dropout"), ("norm", "final_layernorm"))
_GPT2 = Family("h", ("wte", "wpe", "drop"), ("ln_f",))
_NEOX = Family("layers", ("embed_in", "emb_dropout"), ("final_layer_norm",))
_BLOOM = Family("h", ("word_embeddings", "word_embeddings_layernorm"), ("ln_f",))
_OPT = Family(
    "decoder.layers",
    ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
    ("decoder.final_layer_norm", "decoder.project_out"),
)
_BERT = Family("encoder.layer", ("embeddings", "embeddings_project"), ("pooler",))
_DISTILBERT = Family("transformer.layer", ("embeddings",), ())
_MAMBA = Family("layers", ("embeddings",), ("final_norm", "norm_f"))
_VIT_READS = "patch_embeddings.projection.weight"
# Until version 5 its layers are in an encoder.
_VIT = [Family(layers, ("embeddings",), ("layernorm", "pooler"), _VIT_READS) for layers in ("layers", "encoder.layer")]
_DINO = Family("encoder.layer", ("embeddings",), ("layernorm",))
_T5 = Family("block", ("embed_tokens", "dropout"), ("final_layer_norm", "dropout"))
_BART = Family("layers", ("embed_tokens", "embed_positions", "layernorm_embedding"), ("layer_norm",))
_WHISPER = Family("layers", ("conv1", "conv2", "embed_positions"), ("layer_norm",))

_FAMILIES: tuple[tuple[Family, str], ...] = (
    (_LLAMA, "Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Gemma2 Gemma3Text Phi Phi3 Olmo Olmo2 Olmo3"),
    (
        _LLAMA,
        "Olmoe SmolLM3 Granite GraniteMoe DeepseekV3 GptOss Cohere Cohere2 StableLm Starcoder2 Nemotron",
    ),
    (_LLAMA, "Glm Glm4 Llama4Text"),
    (_GPT2, "GPT2 GPTJ GPTNeo GPTBigCode CodeGen"),
    (_NEOX, "GPTNeoX"),
    (_BLOOM, "Bloom Falcon"),
    (_OPT, "OPT"),
    (_BERT, "Bert Roberta XLMRoberta Camembert Electra"),
    (_DISTILBERT, "DistilBert"),
    (_MAMBA, "Mamba Mamba2 FalconMamba ModernBert"),
    *((form, "ViT DeiT") for form in _VIT),
    (_DINO, "Dinov2"),
)
"""Trunks and the names of their families, whose classes end in ``Model``: in each form that versions have."""

_STACKS: dict[str, Family] = {
    **dict.fromkeys(("T5Stack", "MT5Stack", "UMT5Stack"), _T5),
    **{f"{name}{side}": _BART for name in ("Bart", "MBart", "Pegasus", "Marian") for side in ("Encoder", "Decoder")},
    "WhisperEncoder": _WHISPER,
    "WhisperDecoder": _BART,
}
"""By class, encoders and decoders of models that have both."""

_PAIRS = ("Model", "ForConditionalGeneration")
"""Ends of the names of models with an encoder and a decoder that use nothing of the encoder's input behind it."""


@dataclass(frozen=True, slots=True)
class Trunk:
    """A trunk of a model."""

    path: str
    """Its name in the model; empty if it is the model itself."""
    module: nn.Module
    family: Family

    @property
    def layers(self) -> nn.ModuleList:
        """Its layers."""
        layers: nn.ModuleList = self.module.get_submodule(self.family.layers)  # type: ignore[assignment]
        return layers

    def part(self, name: str) -> nn.Module | None:
        """The part of this name, where the trunk has it."""
        part: Any = self.module
        for each in name.split("."):
            part = getattr(part, each, None)
        return part if isinstance(part, nn.Module) else None

    def named(self, name: str) -> str:
        """The name in the model of what the trunk calls ``name``."""
        return f"{self.path}.{name}" if self.path else name


def find_trunks(model: nn.Module) -> tuple[Trunk, ...]:
    """The trunk of ``model``, or its encoder and its decoder; none if its family is not known."""
    paths = [_base_path(model)]
    if type(model).__name__.endswith(_PAIRS) and "encoder_outputs" in signature(model.forward).parameters:
        # They are called with ``encoder_outputs`` where the encoder has run.
        paths = [name for name, part in model.named_modules() if type(part).__name__ in _STACKS]
    trunks = [_trunk(model, path) for path in paths]
    return tuple(trunk for trunk in trunks if trunk is not None) if all(trunks) else ()


def has_router_loss(model: nn.Module) -> bool:
    """Whether ``model`` adds a loss of what all routers of its experts return, and stages can hand that on."""
    config: Any = getattr(model, "config", None)
    asks = getattr(config, "output_router_logits", False) is True and hasattr(config, "router_aux_loss_coef")
    trunks = find_trunks(model) if asks else ()
    return len(trunks) == 1 and trunks[0].path != ""


def forget_captures(model: nn.Module) -> None:
    """Take off the hooks by which the library collects what routers return: none travels to a worker.

    Whatever calls a trunk next puts them on again.
    """
    for part in model.modules():
        vars(part).pop("_output_capturing_hooks_installed", None)
        for key, hook in list(part._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                del part._forward_hooks[key]


def tell_captures(model: nn.Module) -> None:
    """Have the library know what ``model`` can collect: it learns that where a model is made, and workers make none."""
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    if library is not None and hasattr(model, "_can_record_outputs"):
        library._CAN_RECORD_REGISTRY[model] = model._can_record_outputs


def guess_trunks(model: nn.Module) -> tuple[Trunk, ...]:
    """The trunk of a model of a family that is not known, if all of its parts are named as in one that is.

    Whether it is one shows a comparison with the unsplit model.
    """
    path = _base_path(model)
    found = _first(model, path, [family for family, _ in _FAMILIES])
    return (found,) if found is not None and len(found.layers) > 1 and _is_accounted_for(found) else ()


def _base_path(model: nn.Module) -> str:
    # The prefix of a text model is that of the one with images.
    names = (getattr(model, "base_model_prefix", ""), "model")
    return next((name for name in names if name and isinstance(getattr(model, name, None), nn.Module)), "")


def _trunk(model: nn.Module, path: str) -> Trunk | None:
    name = type(model.get_submodule(path)).__name__
    forms = [family for family, names in _FAMILIES if name.removesuffix("Model") in names.split() and "Model" in name]
    return _first(model, path, [_STACKS[name]] if name in _STACKS else forms)


def _first(model: nn.Module, path: str, forms: Sequence[Family]) -> Trunk | None:
    """The trunk at ``path`` in the first form that it has."""
    for family in forms:
        found = Trunk(path, model.get_submodule(path), family)
        layers = found.part(family.layers)
        if isinstance(layers, nn.ModuleList) and len(layers) and found.part(family.first[0]) is not None:
            return found
    return None


def _is_accounted_for(trunk: Trunk) -> bool:
    """Whether each of its parameters and buffers is in a part that the family has, or in a table (rotary)."""
    family = trunk.family
    inside = tuple(f"{name}." for name in (family.layers, *family.first, *family.last))
    return all(name.startswith(inside) for name in trunk.module.state_dict())
