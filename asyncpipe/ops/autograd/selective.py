"""What a selective recomputation keeps: the outputs of products, convolutions and attention.

They take most of the time and little of the memory. All else is computed again, mostly norms and activations::

    first run     LayerNorm ─▶ mm ─▶ GELU ─▶ mm ─▶ add        kept: both mm
    second run    LayerNorm ─▶ ·· ─▶ GELU ─▶ ·· ─▶ add        with a graph; mm are handed out

The choice of operators is that of selective activation checkpointing in torch and Megatron-LM (Korthikanti et al.,
arXiv 2205.05198), and the mechanism is torch's ``create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing, may_recompute_again

__all__ = ["SelectiveRuns", "is_product"]

_KEPT = frozenset(
    "mm addmm bmm baddbmm _scaled_mm _grouped_mm _scaled_grouped_mm convolution "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward".split()
)
"""Operators of torch by name."""
_UNFIT = ("cached during selective activation", "encountered during backward", "TorchScript interpreter")
"""In errors of torch where what is kept cannot be handed out. TorchScript loses the message."""


class SelectiveRuns:
    """Contexts for the runs of one forward: the first keeps what ``_KEPT`` names, the second is handed that."""

    def __init__(self) -> None:
        self._second: AbstractContextManager[Any] | None = None

    def run(self) -> AbstractContextManager[object]:
        """For the run in which this thread is."""
        if is_checkpointing():
            # With a graph, which is dropped: attention computes what its backward needs only for one.
            first, self._second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
            stack = ExitStack()
            stack.enter_context(torch.enable_grad())
            stack.enter_context(first)
            return stack
        if is_recomputing() and self._second is not None and not may_recompute_again():
            second, self._second = self._second, None
            return _handing_out(second)
        return nullcontext()


@contextmanager
def _handing_out(kept: AbstractContextManager[Any]) -> Iterator[None]:
    try:
        with kept:
            yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _UNFIT):
            raise
        raise RecomputeError(
            "what checkpoint='selective' has kept of a stage cannot be used again: what a product has made was "
            "overwritten in place, or other operators run the second time; use operations that are not in place, or "
            "checkpoint='always'"
        ) from error


def _policy(_context: object, operator: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_product(operator: Any) -> bool:
    """Whether what this operator makes is kept."""
    namespace, _, name = str(getattr(operator, "name", lambda: "")()).partition("::")
    return (namespace == "aten" and name.partition(".")[0] in _KEPT) or "flex_attention" in namespace
