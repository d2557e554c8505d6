"""Images of a model: modules of the same classes and attributes, in which some of the parts are others."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import NamedTuple

from torch import nn

from asyncpipe.ops.torch_internals import non_persistent_buffers

__all__ = ["Image", "make_image"]


class Image(NamedTuple):
    """An image of one module."""

    copy: nn.Module
    original: nn.Module

    def refresh(self) -> None:
        """Copy to the image what was changed on its original: training mode, settings, the type of own buffers."""
        kept = self.copy._modules
        self.copy.__dict__.update(self.original.__dict__)
        self.copy._modules = kept
        for name, part in kept.items():
            original = self.original._modules.get(name)
            if part is not None and original is not None and type(part) is type(original) and _is_table(original):
                _follow(part, original)


def make_image(module: nn.Module, replaced: Mapping[str, nn.Module | None], images: list[Image]) -> nn.Module:
    """``module`` with ``replaced`` in the places of its submodules of these names; all else is shared.

    Modules that have buffers alone (rotary embeddings) are copied: the stages of an image are on different devices.
    Each module on the way to a replaced one is an image, which is added to ``images``.
    """
    inside: dict[str, dict[str, nn.Module | None]] = {}
    for name, part in replaced.items():
        first, _, rest = name.partition(".")
        inside.setdefault(first, {})[rest] = part
    copy: nn.Module = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy._modules = {}
    for name, child in module._modules.items():
        below = inside.get(name)
        if below is None:
            copy._modules[name] = deepcopy(child) if child is not None and _is_table(child) else child
        elif "" in below:
            copy._modules[name] = below[""]
        else:
            assert child is not None
            copy._modules[name] = make_image(child, below, images)
    images.append(Image(copy, module))
    return copy


def _is_table(module: nn.Module) -> bool:
    """Whether all it has are buffers that the state of the model leaves out."""
    tables = list(module.modules())
    buffers = any(part._buffers.keys() - non_persistent_buffers(part) for part in tables)
    return not buffers and not any(part._parameters for part in tables) and any(part._buffers for part in tables)


def _follow(part: nn.Module, original: nn.Module) -> None:
    for mine, theirs in zip(part.modules(), original.modules(), strict=True):
        mine.training = theirs.training
        for name, buffer in mine._buffers.items():
            other = theirs._buffers.get(name)
            if buffer is not None and other is not None and buffer.dtype != other.dtype:
                mine._buffers[name] = other.to(buffer.device)
