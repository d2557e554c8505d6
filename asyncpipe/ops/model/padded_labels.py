"""Finds batches whose padding makes a loss another mean than that of the unsplit model, and warns once.

A mean over the labels that are not ignored (-100, as in ``cross_entropy`` and in Hugging Face's models) is right for
each micro-batch. But micro-batches count by their samples, so the step's mean is another one if they hold different
numbers of such labels a sample. Only a loss function that returns its count can tell.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asyncpipe.errors import PaddedLabelsWarning
from asyncpipe.ops.model.microbatch import Arguments

__all__ = ["PaddedLabels"]

_IGNORED = -100


class PaddedLabels:
    """Looks at the labels of each step until it has warned; a pipeline has one."""

    def __init__(self) -> None:
        self._has_looked = False
        self._has_warned = False

    def are_uneven(self, pieces: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Whether the mean over all labels is another one than that of the micro-batches ``pieces`` by ``sizes``.

        ``pieces`` are arguments among which ``labels`` are, or labels themselves. Labels on an accelerator are looked
        at in the first step only, since the host waits for them.
        """
        if self._has_warned or len(sizes) < 2:
            return False
        labels: list[Tensor] = []
        for piece in pieces:
            if (found := _labels(piece)) is None or (self._has_looked and not found.is_cpu):
                return False
            labels.append(found)
        self._has_looked = True
        if len(labels) < len(sizes) or not any(int(each.min()) == _IGNORED for each in labels if each.numel()):
            return False
        # A causal language model takes no loss of the first label.
        return _is_uneven(labels, sizes) or (
            labels[0].dim() > 1 and _is_uneven([each[:, 1:] for each in labels], sizes)
        )

    def warn(self) -> None:
        """Warn, the first time."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the micro-batches hold different numbers of labels that are not ignored ({_IGNORED}), but count by "
                "their samples, so loss and gradients are another mean than the unsplit model's; give step a loss_fn "
                "that returns (mean loss, number of labels), or give pipe(x) no labels and compute the loss yourself",
                PaddedLabelsWarning,
                stacklevel=2,
            )


def _labels(piece: Any) -> Tensor | None:
    """The labels among the arguments ``piece``, or that it is."""
    arguments = Arguments.wrap(piece)
    found = arguments.kwargs.get("labels")
    if found is None and len(arguments.args) == 1:
        (found,) = arguments.args
        if isinstance(found, dict | UserDict):
            found = found.get("labels")
    is_labels = isinstance(found, Tensor) and not (found.is_floating_point() or found.is_complex()) and found.dim() > 0
    return found if is_labels else None


def _is_uneven(labels: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    counts = [int((each != _IGNORED).sum()) for each in labels]
    return any(count * sum(sizes) != size * sum(counts) for count, size in zip(counts, sizes, strict=True))
