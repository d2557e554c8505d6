"""A value that several stages read must not be overwritten by one of them.

In the unsplit model the readers behind the overwriting see the new value. Stages have the old one, or a copy of their
own, or the same memory, as it happens to be on their devices::

    stage 0 ──h──▶ stage 1, which overwrites h in place
       └──h─────────────────▶ stage 2 reads the old h, and the unsplit model the new one

So it is noted, for each value that a stage sends, which later stage reads the same memory too. A stage that overwrites
such a value is refused. Costs nothing where nothing is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from asyncpipe.errors import StageError
from asyncpipe.ops.model.stage import CALLER
from asyncpipe.ops.torch_internals import storage_id, version_of

__all__ = ["NOBODY", "Readers", "as_they_are", "refuse_overwriting", "shared_readers"]

NOBODY = CALLER
"""No stage; the caller reads only what the last stage returns."""

Readers = list[int]
"""For each value on a link: the last stage that reads the same memory by another value, or ``NOBODY``."""


def shared_readers(
    sent: Mapping[int, Sequence[Tensor]], given: Sequence[Tensor] = (), readers: Sequence[int] = ()
) -> dict[int, Readers]:
    """The other readers of what is sent to each user; empty if no memory is shared.

    ``given`` is what the stage that sends got itself, which it may pass on, and ``readers`` the other readers of that.
    """
    flat = [tensor for tensors in sent.values() for tensor in tensors]
    if len(flat) + len(readers) < 2:
        return {}
    if not any(reader != NOBODY for reader in readers) and len({_memory(tensor) for tensor in flat}) == len(flat):
        return {}
    places = [(user, k, tensor) for user, tensors in sent.items() for k, tensor in enumerate(tensors)]
    places += [(reader, -1, tensor) for reader, tensor in zip(readers, given, strict=False) if reader != NOBODY]
    by_memory: dict[int, list[tuple[int, int, Tensor]]] = {}
    for place in places:
        by_memory.setdefault(_memory(place[2]), []).append(place)
    found = {user: [NOBODY] * len(tensors) for user, tensors in sent.items()}
    for same in by_memory.values():
        for (user, k, tensor), (other_user, other_k, other) in combinations(same, 2):
            if _overlap(tensor, other):
                if k >= 0:
                    found[user][k] = max(found[user][k], other_user)
                if other_k >= 0:
                    found[other_user][other_k] = max(found[other_user][other_k], user)
    return found


def as_they_are(given: Sequence[Tensor]) -> list[int | Tensor]:
    """How often each tensor has been changed in place; in inference mode, where torch does not count, a copy."""
    return [tensor.clone() if tensor.is_inference() else version_of(tensor) for tensor in given]


def refuse_overwriting(stage: int, readers: Readers, given: Sequence[Tensor], before: Sequence[int | Tensor]) -> None:
    """Raise ``StageError`` if the stage has overwritten a value that is read elsewhere at the same time or later."""
    for reader, tensor, old in zip(readers, given, before, strict=True):
        if reader < stage:
            continue
        if torch.equal(tensor, old) if isinstance(old, Tensor) else version_of(tensor) == old:
            continue
        where = "by another way" if reader == stage else f"by stage {reader}"
        raise StageError(
            f"stage {stage} overwrites in place a value that it receives, and that is also read {where}, so the result "
            "would depend on the split; overwrite a copy (leave out inplace=True, or clone first), or split elsewhere"
        )


def _memory(tensor: Tensor) -> int:
    """What identifies the memory of ``tensor``; the tensor itself where it has more than one storage."""
    return storage_id(tensor) if tensor.layout is torch.strided else id(tensor)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage may have an element in common: whether their extents meet."""
    if one is other:
        return True
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    begin = int(tensor.storage_offset())
    last = begin + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (last + 1) * tensor.itemsize
