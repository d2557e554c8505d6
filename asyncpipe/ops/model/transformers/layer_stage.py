"""A stage of a model of transformers: some layers of its trunks, and what is before and behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.ops.model.stage import CALLER, LOSS, StageModule
from asyncpipe.ops.model.transformers.families import tell_captures
from asyncpipe.ops.model.transformers.generation import TURN, CacheTurn
from asyncpipe.ops.model.transformers.image import Image
from asyncpipe.ops.model.transformers.layer_run import LayerRun

__all__ = ["LayerStage", "StageLinks"]


class StageLinks(NamedTuple):
    """Whom a stage exchanges values with."""

    sources: tuple[int, ...]
    next: int
    """The next stage, or the caller."""
    encoded: tuple[int, ...] = ()
    """Who gets the hidden states of the encoder, if this stage has its end."""


class LayerStage(StageModule):
    """Runs of layers, one after the other: an encoder's before a decoder's."""

    def __init__(
        self,
        runs: Sequence[LayerRun],
        images: Sequence[Image],
        links: StageLinks,
        *,
        splits_head: bool = False,
        has_pair: bool = False,
        has_routers: bool = False,
    ) -> None:
        """``splits_head``: whether the last run can call its heads apart. ``has_pair``: whether encoders are apart.

        ``has_routers``: as ``has_router_loss``.
        """
        super().__init__()
        self.splits_head = splits_head
        self._has_routers = has_routers
        self.runs = nn.ModuleList(runs)
        self._images = tuple(images)
        self._links = links
        self._has_pair = has_pair

    def forward(self, received: Mapping[int, Any]) -> dict[int, Any]:
        """What the last layer has returned, and the hidden states of an encoder; or what the model returns."""
        given: dict[str, Any] = dict(received.get(CALLER, {}))
        turn: CacheTurn | None = CacheTurn.of(given.pop(TURN)) if TURN in given else None
        brought: dict[str, Any] = {}
        for source in self._links.sources:
            brought.update(received[source])
        layers, encoded = brought.get("layers"), given.pop("encoded", brought.get("encoded"))
        routers = brought.get("routers", ()) if self._has_routers else None
        sent: dict[int, dict[str, Any]] = {}
        runs = [run for run in self.runs if turn is None or not self._has_pair or run.is_decoder != turn.encodes]
        for run in runs:
            before = None if run.has_first else layers
            output, layers = run(given, before, encoded, is_apart=LOSS in received, turn=turn, routers=routers)
            if run.has_heads:
                return {CALLER: output if LOSS in received else _result(output)}
            if routers is not None:
                routers = (*routers, *output.router_logits)
            if run.has_last:
                layers, encoded = None, output[0]
                sent = {user: {"encoded": encoded} for user in self._links.encoded}
        if turn is not None and turn.encodes and encoded is not None:
            if self._links.next == CALLER:
                return {CALLER: {"last_hidden_state": encoded}}
            layers = encoded
        elif turn is not None and (self._links.encoded or not runs):
            # The encoder has run before: what its links carry is nothing.
            nothing = torch.empty(1, device=next(self.parameters()).device)
            sent = {user: {"encoded": nothing} for user in self._links.encoded}
            layers = layers if runs else nothing
        if layers is not None:
            sent[self._links.next] = {**sent.get(self._links.next, {}), "layers": layers}
        if routers:
            sent[self._links.next]["routers"] = routers
        return sent

    def function(self) -> Callable[[Mapping[int, Any]], Mapping[int, Any]]:
        """As ``StageModule.function``; the images follow what was changed on the model."""
        for image in self._images:
            image.refresh()
            if self._has_routers:
                tell_captures(image.copy)
        return super().function()


def _result(output: Any) -> Any:
    """The model's output with its own tensors: not what an encoder has made of the same batch, and no cache."""
    kept = {
        name: value
        for name, value in output.items()
        if isinstance(value, Tensor) and not name.startswith(("encoder_", "decoder_"))
    }
    return type(output)(**kept)
