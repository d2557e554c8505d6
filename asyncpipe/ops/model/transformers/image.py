"""Images of a model: modules of the same classes and attributes, in which some of the parts are others."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.module_image import ModuleImage
from asyncpipe.ops.torch_internals import hooks_of, non_persistent_buffers

__all__ = ["Image", "make_image"]


class Image(ModuleImage):
    """An image whose children that have buffers alone follow those of the original."""

    def __init__(
        self, original: nn.Module, children: Mapping[str, nn.Module | None], tensors: Mapping[str, Tensor]
    ) -> None:
        """As ``ModuleImage``."""
        self._types: dict[tuple[str, int, str], torch.dtype] = {}
        """Of the original's buffers: a forward of the copy may have given it a buffer of another type."""
        self._is_made = False
        super().__init__(original, children, tensors)
        self._is_made = True

    def refresh(self) -> None:
        """As ``ModuleImage.refresh``; own buffers are cast where those of the original have been.

        Raises ``OptionError`` if a call of the original does more by now: each stage would do that.
        """
        if self._is_made and ("forward" in vars(self.original) or hooks_of(self.original)):
            raise OptionError(
                f"{type(self.original).__name__} has got a hook or another forward since the pipeline was made, and is "
                "in parts on several stages, each of which would call it; change its layers, or the model before"
            )
        super().refresh()
        for name, part in self._children.items():
            original = self.original._modules.get(name)
            if part is not None and original is not None and type(part) is type(original) and _is_table(original):
                self._follow(name, part, original)

    def _follow(self, child: str, part: nn.Module, original: nn.Module) -> None:
        for number, (mine, theirs) in enumerate(zip(part.modules(), original.modules(), strict=True)):
            mine.training = theirs.training
            for name, buffer in mine._buffers.items():
                other = theirs._buffers.get(name)
                if buffer is not None and other is not None:
                    before = self._types.setdefault(key := (child, number, name), other.dtype)
                    if before != other.dtype:
                        mine._buffers[name] = buffer.to(other.dtype)
                        self._types[key] = other.dtype


def make_image(module: nn.Module, replaced: Mapping[str, nn.Module | None], images: list[Image]) -> nn.Module:
    """``module`` with ``replaced`` in the places of its submodules of these names; all else is shared.

    Modules that have buffers alone (rotary embeddings) are copied: the stages of an image are on different devices.
    Each module on the way to a replaced one is an image, which is added to ``images``.
    """
    inside: dict[str, dict[str, nn.Module | None]] = {}
    for name, part in replaced.items():
        first, _, rest = name.partition(".")
        inside.setdefault(first, {})[rest] = part
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        below = inside.get(name)
        if below is not None and "" in below:
            children[name] = below[""]
        elif child is not None and below is not None:
            children[name] = make_image(child, below, images)
        elif child is not None and _is_table(child):
            children[name] = deepcopy(child)
    image = Image(module, children, {})
    images.append(image)
    return image.copy


def _is_table(module: nn.Module) -> bool:
    """Whether all it has are buffers that the state of the model leaves out."""
    tables = list(module.modules())
    buffers = any(part._buffers.keys() - non_persistent_buffers(part) for part in tables)
    return not buffers and not any(part._parameters for part in tables) and any(part._buffers for part in tables)
