"""How much a step computes: its tokens, and the floating-point operations of the model, which an MFU is the share of.

An MFU (model FLOPs utilization) counts what the model needs forward and backward, three times its forward, and no
recomputation: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from asyncpipe.errors import BatchError
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.model.evaluation import evaluating
from asyncpipe.ops.model.microbatch import Arguments, keywords
from asyncpipe.ops.model.nested import flatten, rebuild

__all__ = ["FlopCount", "count_flops", "peak_flops", "token_count"]

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""By a part of the device's name, the first that fits: dense operations a second in 16 bits, by the makers' sheets."""


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating-point operations of a model forward and backward, for each token or each sample."""

    per_token: float = 0.0
    per_sample: float = 0.0

    def of(self, samples: int, tokens: int) -> float:
        """Those of a mini-batch."""
        return self.per_token * tokens + self.per_sample * samples


def count_flops(model: nn.Module, batch: Any) -> FlopCount:
    """Count the floating-point operations of ``model`` by a forward of ``batch``, with torch's ``FlopCounterMode``.

    ``batch`` is a mini-batch as a step gets it, with sizes as in training: attention grows with the length. The forward
    computes nothing where the model can run on ``meta`` tensors; a model that looks at values runs where it is, without
    gradients. Changes nothing but, in the second case, what the model itself changes in evaluation mode.
    """
    batch = keywords(batch)
    if isinstance(batch, Mapping):
        batch = Arguments((), dict(batch))
    leaves, structure = flatten(Arguments.wrap(batch))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise BatchError("the batch has no tensor; give what a step gets")
    with evaluating(model), torch.no_grad():
        try:
            meta = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            state = {name: value.to("meta") for name, value in _values(model)}
            count = _counted(model, state, rebuild(structure, meta))
        except (RuntimeError, NotImplementedError, ValueError):  # It looks at values.
            count = _counted(model, {}, rebuild(structure, leaves))
    tokens = token_count([batch])
    return FlopCount(per_token=3 * count / tokens) if tokens else FlopCount(per_sample=3 * count / len(tensors[0]))


def _values(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _counted(model: nn.Module, state: dict[str, Tensor], arguments: Arguments) -> int:
    with FlopCounterMode(display=False) as counter:
        functional_call(model, state, arguments.args, arguments.kwargs)
    return int(counter.get_total_flops())


def token_count(pieces: Sequence[Any]) -> int:
    """How many tokens micro-batches have, padding included: the elements of their ids, integers of two dimensions."""
    count = 0
    for piece in pieces:
        args, kwargs = Arguments.wrap(piece)
        first = args[0] if args else None
        named = first if isinstance(first, Mapping) else kwargs
        ids = named.get("input_ids", first)
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.dtype.is_floating_point and not ids.dtype.is_complex:
            count += ids.numel()
    return count


def peak_flops(devices: Sequence[Device]) -> float:
    """The most operations a second of all ``devices`` together, in 16 bits; 0 where that of one is not known."""
    physical = list(dict.fromkeys(device.physical for device in devices))
    peaks = [_peak(device) for device in physical]
    return sum(peaks) if all(peaks) else 0.0


@cache
def _peak(device: torch.device) -> float:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), 0.0)
