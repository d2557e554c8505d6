"""What a selective recomputation keeps: the outputs of products, convolutions and attention.

They take most of the time and little of the memory. All else is computed again, mostly norms and activations::

    first run     LayerNorm ─▶ mm ─▶ GELU ─▶ mm ─▶ add        kept: both mm
    second run    LayerNorm ─▶ ·· ─▶ GELU ─▶ ·· ─▶ add        with a graph; mm are handed out

The choice of operators is that of selective activation checkpointing in torch and Megatron-LM (Korthikanti et al.,
arXiv 2205.05198), and the mechanism is torch's ``create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from asyncpipe.errors import RecomputeError
from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing, may_recompute_again
from asyncpipe.ops.torch_internals import storage_id, tree_leaves

__all__ = ["SelectiveRuns", "is_product"]

_KEPT = frozenset(
    "mm addmm bmm baddbmm _scaled_mm _grouped_mm _scaled_grouped_mm convolution "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward".split()
)
"""Operators of torch by name."""
_UNFIT = (
    *("cached during selective activation", "encountered during backward"),
    "leaf Variable that requires grad is being used in an in-place operation",
)
"""In errors of torch where what is kept cannot be handed out, or not be made."""
_MESSAGE = (
    "checkpoint='selective' cannot keep what products of this stage have made: that, or what the stage receives, is "
    "overwritten in place (as cells of LSTMs and GRUs do), or other operators run the second time; use operations that "
    "are not in place, or checkpoint='always'"
)

_IN_SCRIPT = "TorchScript interpreter"
_LOST = (
    "TorchScript in a stage failed with checkpoint='selective', under which torch loses its message: it has an error "
    "that checkpoint='never' shows, or it overwrites in place what a product has made; in that case use "
    "checkpoint='always'"
)


class SelectiveRuns:
    """Contexts for the runs of one forward: the first keeps what ``is_product`` names, the second is handed that."""

    def __init__(self) -> None:
        self._second: AbstractContextManager[Any] | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """For the run in which this thread is. Raises ``RecomputeError`` for a stage that this is not right for."""
        second, inside = self._second, ExitStack()
        if is_checkpointing():
            # With a graph, which is dropped: attention computes what its backward needs only for one.
            inside.enter_context(torch.enable_grad())
            policy = _KeepsProducts()
            first, self._second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
            inside.enter_context(first)
        elif is_recomputing() and second is not None and not may_recompute_again():
            self._second = None
            inside.enter_context(second)
        try:
            with inside:
                yield
        except RuntimeError as error:
            if isinstance(error, RecomputeError):
                raise
            if _IN_SCRIPT in str(error):
                raise RecomputeError(_LOST) from error
            if any(text in str(error) for text in _UNFIT):
                raise RecomputeError(_MESSAGE) from error
            raise


class _KeepsProducts:
    """What torch asks about each operator of a first run."""

    def __init__(self) -> None:
        self._kept: set[int] = set()
        """The memory of what is kept."""

    def __call__(self, context: Any, operator: Any, *args: Any, **_: object) -> CheckpointPolicy:
        if is_product(operator):
            self._kept.update(storage_id(made) for made in tree_leaves(context.op_output) if isinstance(made, Tensor))
            return CheckpointPolicy.MUST_SAVE
        if operator in _UNWATCHED and storage_id(args[0]) in self._kept:
            raise RecomputeError(_MESSAGE)
        return CheckpointPolicy.PREFER_RECOMPUTE


_UNWATCHED = (torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)
"""Operators whose outputs are the memory of their input, and may be overwritten without a trace."""


@cache
def is_product(operator: Any) -> bool:
    """Whether what this operator makes is kept."""
    namespace, _, name = str(getattr(operator, "name", lambda: "")()).partition("::")
    return (namespace == "aten" and name.partition(".")[0] in _KEPT) or "flex_attention" in namespace
