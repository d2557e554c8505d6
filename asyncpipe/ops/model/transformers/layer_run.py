"""Some layers of one trunk, with what comes before and behind them where the stage has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from asyncpipe.ops.model.transformers.families import Trunk
from asyncpipe.ops.model.transformers.generation import CacheTurn
from asyncpipe.ops.model.transformers.image import Image, make_image
from asyncpipe.ops.model.transformers.stand_ins import (
    EmbeddingStandIn,
    Handed,
    KeptLayer,
    PassedOn,
    ResumedLayer,
    Skipped,
    TrunkGate,
    hidden_of,
)

__all__ = ["LayerRange", "LayerRun", "without_cache"]


class LayerRange(NamedTuple):
    """Consecutive layers of a trunk."""

    trunk: int
    """Number of the trunk: 0, or 1 for a decoder behind an encoder."""
    has_first: bool
    """Whether what comes before the layers is with them."""
    begin: int
    end: int
    has_last: bool
    """Whether what comes behind the layers is with them; with the last trunk's, also the heads."""


class LayerRun(nn.Module):
    """Calls an image of the trunk, or of the whole model where the heads are in it."""

    def __init__(
        self,
        model: nn.Module,
        trunks: Sequence[Trunk],
        layers: LayerRange,
        images: list[Image],
        *,
        has_gate: bool = False,
    ) -> None:
        """``has_gate``: whether heads are called apart from the trunk, or with what routers in all stages return."""
        super().__init__()
        self.has_first, self.has_last = layers.has_first, layers.has_last
        self.is_decoder = layers.trunk == 1
        self.has_heads = layers.has_last and layers.trunk == len(trunks) - 1
        trunk = trunks[layers.trunk]
        self._handed = Handed()
        self._embeds = not layers.has_first
        self._layers = range(layers.begin, layers.end)
        self._kept = layers.end > layers.begin
        parts: dict[str, nn.Module | None] = _replaced(trunk, layers, self._handed)
        self._gate = ""
        """The name of the trunk, if there is a gate around it."""
        if self.has_heads:
            if has_gate:
                self._gate = trunk.path
                parts = {trunk.path: TrunkGate(self._handed, make_image(trunk.module, parts, images))}
            else:
                parts = {trunk.named(name): part for name, part in parts.items()}
            if len(trunks) > 1:
                # They are called with what the encoder has made.
                parts[trunks[0].path] = None
                parts.update({name: None for name, _ in model.named_modules() if name.split(".")[-1] == "shared"})
        self.image = make_image(model if self.has_heads else trunk.module, parts, images)
        accepted = signature(self.image.forward).parameters
        self._fixed = without_cache(self.image)
        self._names = _names(len(trunks), layers.trunk, self.has_heads)
        self._ids, self._hidden = "input_ids", "inputs_embeds"
        if self.is_decoder and self.has_heads:
            self._ids, self._hidden = "decoder_input_ids", "decoder_inputs_embeds"
        elif "inputs_embeds" not in accepted:
            self._hidden = trunk.module.main_input_name  # type: ignore[assignment]
        self._dropped = {"encoder_attention_mask"} - accepted.keys()

    def forward(
        self,
        given: Mapping[str, Any],
        received: Any,
        encoded: Any,
        *,
        is_apart: bool = False,
        turn: CacheTurn | None = None,
        routers: Sequence[Tensor] | None = None,
    ) -> tuple[Any, Any]:
        """What the image returns, and what its last layer has returned, from the caller's arguments.

        ``received``: what the layer before has returned. ``encoded``: the hidden states of the encoder. ``is_apart``:
        whether the heads, if it has them, are called later: ``logits`` takes what is then returned in their place.
        ``turn`` if tokens are generated.
        ``routers``: what those of earlier stages have returned, if heads make a loss of it.
        """
        arguments = self._names(given) | self._fixed
        if turn is not None:
            if not self.has_heads:
                arguments.pop("logits_to_keep", None)
            if turn.cache is not None:
                arguments |= {"past_key_values": turn.view(self._layers), "use_cache": True}
        for name in self._dropped:
            arguments.pop(name, None)
        handed = self._handed
        before = handed.received, handed.sent
        handed.received, handed.sent = received, None
        handed.is_apart, handed.routers = is_apart, routers
        if self._embeds and not arguments.keys() & {self._ids, self._hidden}:
            arguments[self._hidden] = hidden_of(received).detach()
        if encoded is not None and self.is_decoder:
            arguments.update({"encoder_outputs": (encoded,)} if self.has_heads else {"encoder_hidden_states": encoded})
        try:
            output = self.image(**arguments)
            if is_apart:
                call = type(handed.trunk), arguments
                return {"hidden": handed.trunk[0], "head": self, "call": call, "aux_loss": output.get("aux_loss")}, None
            sent = handed.sent if self._kept else output[0]
            # Where the heads are and nothing was received, all layers are the stage's own.
            if turn is not None and turn.cache is not None and not (self.has_heads and received is None):
                turn.seen(self._layers, hidden_of(sent if received is None else received))
            return output, sent
        finally:
            handed.received, handed.sent = before
            handed.is_apart, handed.trunk, handed.routers = False, None, None

    def logits(self, hidden: Tensor, call: tuple[type[Any], Mapping[str, Any]]) -> Tensor:
        """A row for each of these tokens. The model's own ``forward`` calls the heads, as it was called before.

        So scales, biases, soft caps and adapters are those of the unsplit model.
        """
        output, arguments = call
        self._handed.trunk = output(last_hidden_state=hidden[None])
        try:
            logits: Tensor = self.image(**arguments).logits[0]
            return logits
        finally:
            self._handed.trunk = None

    def head_parameters(self) -> list[nn.Parameter]:
        """Those that ``logits`` uses."""
        trunk = self._gate.partition(".")[0]
        apart = [child for name, child in self.image._modules.items() if child is not None and name != trunk]
        own = [each for each in self.image._parameters.values() if each is not None]
        return list(dict.fromkeys([*own, *(each for child in apart for each in child.parameters())]))


def without_cache(model: nn.Module) -> dict[str, Any]:
    """What to call ``model`` with so that it makes no cache: nobody would read it, and packed texts would be one."""
    base = signature(getattr(model, "base_model", model).forward).parameters
    own = signature(model.forward).parameters
    passes_on = any(each.kind is Parameter.VAR_KEYWORD for each in own.values())
    return {"use_cache": False} if "use_cache" in own or (passes_on and "use_cache" in base) else {}


def _replaced(trunk: Trunk, layers: LayerRange, handed: Handed) -> dict[str, nn.Module | None]:
    """What takes the places of the parts of ``trunk`` that are elsewhere, by name."""
    family = trunk.family
    parts: dict[str, nn.Module | None] = {}
    needed = {*(family.first if layers.has_first else ()), *(family.last if layers.has_last else ())}
    for name in {*family.first, *family.last} - needed:
        module = trunk.part(name)
        if module is not None:
            parts[name] = EmbeddingStandIn(handed, module, family.read) if name in family.first else PassedOn()
    own = list(trunk.layers)
    if not layers.has_last:
        own = own[: layers.end]
        if layers.end > layers.begin:
            own[-1] = KeptLayer(handed, own[-1])
    if not layers.has_first and layers.begin == 0 and own:
        own[0] = ResumedLayer(handed, own[0])
    own[: layers.begin] = [Skipped(handed, layer) for layer in own[: layers.begin]]
    parts[family.layers] = nn.ModuleList(own)
    return parts


def _names(trunks: int, trunk: int, has_heads: bool) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What makes the arguments of a trunk, or of the model where the heads are, from those of the caller."""
    if trunks == 1:
        return dict
    if trunk == 0:
        return _of_encoder
    return _of_decoder_with_heads if has_heads else _of_decoder


def _of_encoder(given: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input_ids", "inputs_embeds", "input_features", "attention_mask")
    return {name: value for name, value in given.items() if name in names}


def _of_decoder(given: Mapping[str, Any]) -> dict[str, Any]:
    own = {name.removeprefix("decoder_"): value for name, value in given.items() if name.startswith("decoder_")}
    return {**own, "encoder_attention_mask": given.get("attention_mask")}


def _of_decoder_with_heads(given: Mapping[str, Any]) -> dict[str, Any]:
    encoded = ("input_ids", "inputs_embeds", "input_features")
    return {name: value for name, value in given.items() if name not in encoded}
