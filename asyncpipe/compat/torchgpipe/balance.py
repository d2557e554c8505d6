"""torchgpipe's functions that find a balance, with torchgpipe's names of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from asyncpipe.core.predict.balance import even_balance
from asyncpipe.ops.model import measure_layers as profile

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: int | str | torch.device | None = None,
) -> list[int]:
    """How many layers each of ``partitions`` stages gets, so that they take about the same time.

    ``timeout``: for how many seconds forwards and backwards are repeated. ``device``: where layers are measured,
    wherever the model is; by default the current CUDA device, or the CPU if there is none. Raises as
    ``asyncpipe.balance_by_time``.
    """
    return profile.balance_by_time(partitions, module, sample, seconds=timeout, device=_device(device))


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002 - torchgpipe's name, which callers may use
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: int | str | torch.device | None = None,
) -> list[int]:
    """How many layers each of ``partitions`` stages gets, so that they need about the same memory.

    ``input``: a mini-batch, which is cut into ``chunks`` micro-batches. ``param_scale``: the memory of a parameter
    with its gradient and the optimizer's state, in multiples of the parameter's size. ``device`` as for
    ``balance_by_time``. Raises as ``asyncpipe.balance_by_size``.
    """
    return profile.balance_by_size(
        partitions, module, input, microbatches=chunks, parameter_scale=param_scale, device=_device(device)
    )


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """How many layers each of ``partitions`` stages gets, from the costs of the layers."""
    return even_balance(cost, partitions)


def _device(device: int | str | torch.device | None) -> str | torch.device:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{device}" if isinstance(device, int) else device
