"""Where each family of models has its embeddings, its layers, and what follows them.

A *trunk* is the module whose ``forward`` has the loop over the layers, a decoder or an encoder. It is known by the name
of its class. To add a family, add a row, and its model to the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch import nn

__all__ = ["Family", "Trunk", "find_trunks"]


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a trunk's parts, from the trunk."""

    layers: str
    first: tuple[str, ...]
    """What comes before the layers. Later stages have stand-ins, unless the part is also in ``last``."""
    last: tuple[str, ...]
    """What comes behind them."""
    read: str = ""
    """A tensor inside the first part whose type the trunk reads in every stage."""


_LLAMA = Family("layers", ("embed_tokens",), ("norm",))
_BERT = Family("encoder.layer", ("embeddings",), ("pooler",))
_VIT_READS = "patch_embeddings.projection.weight"
_T5 = Family("block", ("embed_tokens", "dropout"), ("final_layer_norm", "dropout"))

_FAMILIES: dict[str, tuple[Family, ...]] = {
    "GPT2Model": (Family("h", ("wte", "wpe", "drop"), ("ln_f",)),),
    **dict.fromkeys(("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GemmaModel"), (_LLAMA,)),
    **dict.fromkeys(("BertModel", "RobertaModel"), (_BERT,)),
    # Until version 5 its layers are in an encoder.
    "ViTModel": (
        Family("layers", ("embeddings",), ("layernorm", "pooler"), _VIT_READS),
        Family("encoder.layer", ("embeddings",), ("layernorm", "pooler"), _VIT_READS),
    ),
    "T5Stack": (_T5,),
}
"""By class of the trunk: its parts, in each form that it has in different versions of the library."""

_PAIRS = ("T5Model", "T5ForConditionalGeneration")
"""Models with an encoder and a decoder, which are called with ``encoder_outputs`` where the encoder has run."""


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

    def named(self, name: str) -> str:
        """The name in the model of what the trunk calls ``name``."""
        return f"{self.path}.{name}" if self.path else name


def find_trunks(model: nn.Module) -> tuple[Trunk, ...]:
    """The trunk of ``model``, or its encoder and its decoder; none if its family is not known."""
    prefix = getattr(model, "base_model_prefix", "")
    if type(model).__name__ in _PAIRS:
        paths: tuple[str, ...] = ("encoder", "decoder")
    elif prefix and isinstance(getattr(model, prefix, None), nn.Module):
        paths = (prefix,)
    else:
        paths = ("",)
    trunks = [_trunk(model, path) for path in paths]
    return tuple(trunk for trunk in trunks if trunk is not None) if all(trunks) else ()


def _trunk(model: nn.Module, path: str) -> Trunk | None:
    module = model.get_submodule(path)
    for family in _FAMILIES.get(type(module).__name__, ()):
        try:
            layers = module.get_submodule(family.layers)
            parts = [attrgetter(name)(module) for name in (*family.first, *family.last)]
        except AttributeError:
            continue
        is_first_there = all(isinstance(part, nn.Module) for part in parts[: len(family.first)])
        if isinstance(layers, nn.ModuleList) and len(layers) and is_first_there:
            return Trunk(path, module, family)
    return None
