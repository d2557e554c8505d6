"""Weights in files that others read: safetensors under the unsplit model's names, or what ``save_pretrained`` writes.

Imports safetensors where it is used: it is optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["SAFETENSORS", "safe_file", "write_weights"]

SAFETENSORS: Final = ".safetensors"


def safe_file(path: Path) -> Any:
    """A file of safetensors to read from, as a context."""
    from safetensors import safe_open

    return safe_open(path, "pt")


def write_weights(module: nn.Module, folder: Path, state: Mapping[str, Any]) -> set[str]:
    """Write a copy of the ``state`` of ``module``; the names that the files have bit by bit. Blocks.

    A model of transformers, or with adapters of peft, writes it by its own ``save_pretrained``, under names of its own.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if (write := getattr(module, "save_pretrained", None)) is None:
        from safetensors.torch import save_file

        save_file(_apart(tensors), folder / f"model{SAFETENSORS}", {"format": "pt"})
        return set(tensors)
    write(folder, state_dict=dict(state))
    found: set[str] = set()
    for path in folder.glob(f"*{SAFETENSORS}"):
        with safe_file(path) as file:
            names = tensors.keys() & set(file.keys())
            found |= {name for name in names if _is_same(file.get_tensor(name), tensors[name])}
    return found


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own, as a file of safetensors has them."""
    found, taken = {}, set()
    for name, value in tensors.items():
        place = value.untyped_storage().data_ptr()
        found[name] = value.clone(memory_format=torch.contiguous_format) if place in taken else value.contiguous()
        taken.add(place)
    return found


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
