"""What takes the places of the parts of a model that a stage does not have.

The loop over the layers keeps its length up to the stage's last layer, since models look things up by the number of a
layer. What a layer returns goes to the next stage as it is: a hidden state, or a tuple with position biases that later
layers use (T5). So a stage begins where the one before has ended::

    received ──▶ Handed ──▶ Skipped layers return it ──▶ layer 2 ──▶ KeptLayer(3) ──▶ Handed ──▶ sent
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from threading import local
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EmbeddingStandIn", "Handed", "KeptLayer", "PassedOn", "ResumedLayer", "Skipped", "TrunkGate"]


class Handed(local):
    """What a stage was handed, and what it hands on, while it runs on this thread."""

    def __init__(self) -> None:
        # Set in each thread before the first use: torch's compiler looks at which attributes there are.
        self.received: Any = None
        """What the last layer of the stage before has returned."""
        self.sent: Any = None
        """What the stage's last layer has returned."""
        self.is_apart = False
        """Whether the heads are called later: ``TrunkGate`` then keeps what it passes on."""
        self.trunk: Any = None
        """What the trunk has returned, or is to return, if the heads are called apart from it."""
        self.routers: Sequence[Tensor] | None = None
        """What routers of experts in earlier stages have returned, where the heads make a loss of it."""

    @property
    def hidden(self) -> Tensor:
        """The hidden states of ``received``."""
        hidden: Tensor = hidden_of(self.received)
        return hidden

    def __reduce__(self) -> tuple[Any, ...]:
        return Handed, ()


def _take_attributes(stand_in: nn.Module, module: nn.Module) -> None:
    """Give ``stand_in`` the plain attributes of ``module``, at which a model may look."""
    for name, value in vars(module).items():
        if isinstance(value, str | int | float | tuple) and name not in vars(stand_in):
            setattr(stand_in, name, value)


def hidden_of(returned: Any) -> Any:
    """The hidden states in what a layer has returned."""
    return returned if isinstance(returned, Tensor) else returned[0]


class EmbeddingStandIn(nn.Module):
    """In the place of a module that makes embeddings: hidden states of the same shape, which no layer uses."""

    def __init__(self, handed: Handed, replaced: nn.Module, read: str) -> None:
        """``read``: a tensor in ``replaced`` of which the model looks at the type."""
        super().__init__()
        self.handed = handed
        # A convolution over time has its channels before it.
        self.is_transposed = isinstance(replaced, nn.Conv1d)
        _take_attributes(self, replaced)
        if read:
            *path, last = read.split(".")
            value: Any = torch.empty(0, dtype=attrgetter(read)(replaced).dtype)
            for name in (last, *reversed(path[1:])):
                value = SimpleNamespace(**{name: value})
            setattr(self, path[0], value)

    @property
    def weight(self) -> Tensor:
        """A tensor on the stage's device, for models that look where their embeddings are."""
        return self.handed.hidden

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The hidden states, without their graph."""
        hidden = self.handed.hidden.detach()
        return hidden.transpose(1, 2) if self.is_transposed else hidden


class _LayerStandIn(nn.Module):
    """In the place of a layer, with its plain attributes: a model looks up which mask a layer wants."""

    has_layer = True

    def __init__(self, handed: Handed, layer: nn.Module) -> None:
        super().__init__()
        self.handed = handed
        if self.has_layer:
            self.layer = layer
        _take_attributes(self, layer)


class Skipped(_LayerStandIn):
    """In the place of a layer of an earlier stage: what the last of these has returned."""

    has_layer = False

    def forward(self, *_: Any, **__: Any) -> Any:
        """What the stage has received."""
        return self.handed.received


class ResumedLayer(_LayerStandIn):
    """The model's first layer, where the embeddings are in the stage before: it gets their hidden states."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        return self.layer(self.handed.hidden, *args, **kwargs)


class KeptLayer(_LayerStandIn):
    """The last layer of a stage: what it returns is sent."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        self.handed.sent = returned = self.layer(*args, **kwargs)
        return returned


class PassedOn(nn.Module):
    """In the place of what follows the layers in later stages: passes on what it is given."""

    def forward(self, value: Any, *_: Any, **__: Any) -> Any:
        """Return ``value``."""
        return value


class TrunkGate(nn.Module):
    """Around the trunk of a model whose heads are called apart from it, chunk by chunk (``LayerRun.logits``).

    In a call of the trunk alone, the heads get hidden states of no token; in one of the heads, the trunk is left out.
    Heads that make a loss of what routers return get that of the routers in earlier stages too.
    """

    def __init__(self, handed: Handed, trunk: nn.Module) -> None:
        super().__init__()
        self.handed = handed
        self.trunk = trunk

    def __getattr__(self, name: str) -> Any:
        # What the model reads of its trunk.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("trunk"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the trunk, unless what it returns is known."""
        handed = self.handed
        if handed.trunk is not None:
            return handed.trunk
        output = self.trunk(*args, **kwargs)
        routed: dict[str, Any] = {}
        if handed.routers is not None:
            routed["router_logits"] = output["router_logits"] = (*handed.routers, *output.router_logits)
        if handed.is_apart:
            handed.trunk = output
            return type(output)(last_hidden_state=output[0][:, :0], **routed)
        return output
