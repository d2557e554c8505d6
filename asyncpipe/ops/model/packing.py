"""``pack``: sequences of different lengths as full rows, so that no padding is computed.

::

    samples   aaaaa  bb  cccc  ddd  e       rows of 8   input_ids      a a a a a d d d   c c c c b b e ·
                                                        position_ids   0 1 2 3 4 0 1 2   0 1 2 3 0 1 0 0
                                                        labels         – a a a a – d d   – c c c – b – –
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from asyncpipe.core.checks import check_positive
from asyncpipe.errors import BatchError

__all__ = ["IGNORED", "pack"]

IGNORED = -100
"""The label of what no loss is computed of."""


def pack(samples: Sequence[Tensor], length: int, *, pad: int = 0) -> dict[str, Tensor]:
    """``samples``, token ids of one dimension each, in rows of ``length``: ``input_ids``, ``position_ids``, ``labels``.

    All have the shape (rows, ``length``). Positions begin anew with each sequence, from which causal models of
    transformers make masks between sequences: give them no ``attention_mask``. The first token of a sequence has no
    label, so the loss is that of the sequences one by one. The longest samples are placed first, each in the fullest
    row that it fits in (best-fit decreasing). FlashAttention sees the borders only in rows by themselves: use as many
    micro-batches as rows. Raises ``BatchError`` for samples that are empty, longer than a row, or not of one dimension.
    """
    check_positive("length", length)
    for number, sample in enumerate(samples):
        if sample.dim() != 1 or not 0 < len(sample) <= length:
            raise BatchError(
                f"sample {number} has the shape {tuple(sample.shape)}; a row takes 1 to {length} tokens in "
                "one dimension: cut longer ones"
            )
    if not samples:
        raise BatchError("there is no sample to pack")
    rows: list[list[Tensor]] = []
    room: list[tuple[int, int]] = []
    """(free places, number) of each row, by free places."""
    for sample in sorted(samples, key=len, reverse=True):
        at = bisect_left(room, (len(sample), 0))
        free, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (free - len(sample), row))
    batch = {name: torch.zeros(len(rows), length, dtype=torch.long) for name in ("input_ids", "position_ids")}
    batch["input_ids"].fill_(pad)
    batch["labels"] = torch.full((len(rows), length), IGNORED)
    for row, found in enumerate(rows):
        begin = 0
        for sample in found:
            end = begin + len(sample)
            batch["input_ids"][row, begin:end] = sample
            batch["position_ids"][row, begin:end] = torch.arange(len(sample))
            batch["labels"][row, begin + 1 : end] = sample[1:]
            begin = end
        batch["position_ids"][row, begin:] = torch.arange(length - begin)
    return batch
