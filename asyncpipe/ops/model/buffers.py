"""The buffers of a stage while it runs: a recomputation reads what its forward read, and changes nothing.

A forward may change buffers, such as running statistics, a moving average that it scales by, or the vectors of a
spectral norm. Several micro-batches are under way, so later ones have changed them before the first is recomputed::

    F(0) reads v0, writes v1     F(1) reads v1, writes v2     R(0) reads v0 again, and v2 stays

So a checkpointed forward keeps copies of what it is about to change. A forward whose graph is kept works on copies,
which the graph may save, and then the buffers get their values: the next forward would change what the graph has saved.

Which modules change their buffers is seen, not known. The first forward in each mode (the modules' ``training`` flags)
copies all buffers, later ones only those of modules that have changed one. A change is seen by the identity of the
tensor and by torch's version counter; in that first forward also by value, since batch norms and ``buffer.data`` do not
count their changes. A stage without buffers has nothing of this.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from asyncpipe.errors import RecomputeError, SharedParameterError, StageError
from asyncpipe.ops.autograd.checkpoint import is_checkpointing, is_recomputing, may_recompute_again
from asyncpipe.ops.device.thread_waits import NestingLock
from asyncpipe.ops.torch_internals import version_of

__all__ = ["BufferValues", "StageBuffers", "shared_buffers"]

_BufferKey = tuple[int, str]
"""Where a buffer is: the number of the module, and the name."""

BufferValues = dict[_BufferKey, Tensor | None]
"""Buffers of some modules of a stage."""

_NORMS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")

_NOTHING = nullcontext()


class _Owner(NamedTuple):
    """A module with buffers."""

    path: str
    module: nn.Module
    needs_copies: bool
    """Whether its backward may read what its forward changes. That of torch's norms does not."""


_Owners = dict[int, _Owner]
"""By number."""


class _Parts(NamedTuple):
    """The modules of a stage by what its forwards in one mode do with them."""

    copied: _Owners
    """They work on copies of their buffers."""
    plain: _Owners
    """They change their buffers, and need no copies for that."""
    others: _Owners
    """They change nothing. (In the first forward that is still to be seen.)"""


class _Sight:
    """The buffers of some modules at one moment, to see what has changed since."""

    def __init__(self, owners: _Owners) -> None:
        self._owners = owners
        self.values = _values(owners)
        self._versions = [(key, each, _version(each)) for key, each in self.values.items() if each is not None]

    def counted(self) -> set[_BufferKey]:
        """The tensors of that moment that were changed in place, as torch counts."""
        return {key for key, tensor, version in self._versions if _version(tensor) != version}

    def replaced(self) -> set[_BufferKey]:
        """The buffers that are other tensors now, or were added or removed."""
        before, now = self.values, _values(self._owners)
        return {key for key in before.keys() | now.keys() if before.get(key) is not now.get(key)}

    def changed(self) -> set[_BufferKey]:
        return self.counted() | self.replaced()


class StageBuffers:
    """The buffers of one stage, and what its forwards have shown of them. One thread at a time runs it."""

    def __init__(self, stage: int, module: nn.Module, shared: Mapping[tuple[str, str], int], rows: int = 1) -> None:
        """``shared`` is what ``shared_buffers`` found for the stage, of a pipeline with so many replicas."""
        self._stage = stage
        self._rows = rows
        with_buffers = [(path, part) for path, part in module.named_modules() if len(part._buffers)]
        self._owners = {
            number: _Owner(path, part, type(part).__module__ not in _NORMS)
            for number, (path, part) in enumerate(with_buffers)
        }
        self._shared = shared
        self._unknown = self._split({number for number, owner in self._owners.items() if owner.needs_copies})
        self._parts: dict[tuple[bool, ...], _Parts] = {}
        """By mode; missing until the first forward in it."""
        self._lock = NestingLock()
        """Another thread runs this stage, too, where a task calls the pipeline."""
        self._uncounted: set[int] = set()
        """The modules that make changes which torch does not count."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to do around a forward: the stage has buffers."""
        return bool(self._owners)

    def during(self, kept: BufferValues) -> AbstractContextManager[None]:
        """The context of a forward or of its recomputation. ``kept`` is what the one leaves for the other."""
        if not self._owners:
            return _NOTHING
        if is_recomputing():
            return self._alone(self._recomputation(kept))
        if is_checkpointing() or torch.is_grad_enabled():
            return self._alone(self._forward(kept))
        return self._watched() if self._shared else _NOTHING

    @contextmanager
    def _alone(self, run: Iterator[None]) -> Iterator[None]:
        with self._lock:
            yield from run

    def _forward(self, kept: BufferValues) -> Iterator[None]:
        """A forward that a backward follows. What it changes are copies; the buffers get their values at its end."""
        mode = tuple([owner.module.training for owner in self._owners.values()])
        first = mode not in self._parts
        copied, plain, others = self._parts.get(mode, self._unknown)
        watched = _Sight(others)
        before = _copies(watched.values if first else _values(plain)) if first or is_checkpointing() else {}
        originals = _Sight(copied)
        copies = _copies(originals.values)
        _put(copied, copies)
        try:
            yield
            left = _values(copied)
        finally:
            _put(copied, originals.values)
        missed = watched.changed()
        changed = missed | self._changes(originals, copies, left, first)
        if first:
            changed |= _differing(before, watched.values)
        if first or missed:
            self._learn(mode, changed)
        if is_checkpointing():
            if missed and not first:
                raise RecomputeError(
                    f"stage {self._stage} changed the buffer {self._name(*min(missed))} in this forward, but no buffer "
                    "of its module in the first one, so the value to recompute with is lost; change one of them in "
                    "every forward, such as a count of the forwards, or use checkpoint='never'"
                )
            # Copied again where a lazy module has only now made the buffers, with values that torch's do not read.
            kept.update(_copies(before) if first else before)
            kept.update(_copies(originals.values))
            for key in [key for key in kept if key[0] in self._parts[mode].others]:
                del kept[key]
        for key, copy in copies.items():
            # A buffer that is still the copy becomes the original again, with the values of the copy.
            if copy is not None and left.get(key) is copy:
                original = left[key] = originals.values[key]
                if original is not None and original is not copy and key in changed:
                    with torch.no_grad():
                        if original.shape != copy.shape:
                            original.resize_(copy.shape)  # As the forward has resized the copy.
                        original.copy_(copy)
        _put(copied, left)

    def _changes(self, originals: _Sight, copies: BufferValues, left: BufferValues, first: bool) -> set[_BufferKey]:
        """What a forward on ``copies`` has changed. Raises ``StageError`` if it changed an original instead."""
        changed = {key for key in copies.keys() | left.keys() if left.get(key) is not copies.get(key)}
        for key in originals.counted():
            if copies[key] is not originals.values[key]:
                raise StageError(
                    f"stage {self._stage} changes the buffer {self._name(*key)} by another reference to its "
                    "tensor than its module's; change it as self.buffer, since the module has a copy of it meanwhile"
                )
            changed.add(key)
        for key, copy in copies.items():
            original = originals.values[key]
            if copy is None or original is None or copy is original:
                continue
            if _version(copy):
                changed.add(key)
            elif not _equal(copy, original) if first else key[0] in self._uncounted:
                self._uncounted.add(key[0])
                changed.add(key)
        return changed

    def _recomputation(self, kept: BufferValues) -> Iterator[None]:
        """The second run of a forward: it reads and changes what was kept of the first."""
        before = _Sight(self._owners)
        owners = {number: self._owners[number] for number, _ in kept}
        _put(owners, _copies(kept) if may_recompute_again() else kept)
        try:
            yield
            changed = before.counted() | {key for key in before.replaced() if key[0] not in owners}
        finally:
            _put(self._owners, before.values)
        if changed:
            raise RecomputeError(
                f"the recomputation of stage {self._stage} changed the buffer {self._name(*min(changed))}, which its "
                "forward did not change; change it in every forward, or use checkpoint='never'"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A forward without a backward, in a stage that shares buffers."""
        sight = _Sight(self._owners)
        yield
        self._refuse_shared(sight.changed())

    def _learn(self, mode: tuple[bool, ...], changed: set[_BufferKey]) -> None:
        self._refuse_shared(changed)
        changing = {number for number, _ in changed}
        if mode in self._parts:
            changing |= self._parts[mode].copied.keys() | self._parts[mode].plain.keys()
        self._parts[mode] = self._split(changing)

    def _split(self, changing: Container[int]) -> _Parts:
        parts = _Parts({}, {}, {})
        for number, owner in self._owners.items():
            part = parts.others if number not in changing else parts.copied if owner.needs_copies else parts.plain
            part[number] = owner
        return parts

    def _refuse_shared(self, changed: set[_BufferKey]) -> None:
        for number, name in sorted(changed):
            other = self._shared.get((self._owners[number].path, name))
            if other is not None and self._rows > 1:
                raise SharedParameterError(
                    f"a forward changes the buffer {self._name(number, name)}, and each of the {self._rows} replicas "
                    "would change its own; running statistics of torch's batch norms are joined, for others use "
                    "replicas=1"
                )
            if other is not None:
                raise SharedParameterError(
                    f"stage {self._stage} changes the buffer {self._name(number, name)}, which stage {other} uses "
                    "too, and not in the order of the unsplit model; split where one stage has both, or give each a "
                    "buffer of its own"
                )

    def _name(self, number: int, name: str) -> str:
        """The buffer's name in messages, as in the model's state dict."""
        path = self._owners[number].path.removeprefix("layers").removeprefix(".")
        return repr(f"{path}.{name}" if path else name)


def shared_buffers(stages: Sequence[nn.Module]) -> list[dict[tuple[str, str], int]]:
    """For each stage: by (path of the module, name) of a buffer that it shares, another stage that uses it.

    To be called before the stages are moved, which replaces buffers.
    """
    places = [
        (stage, (path, name), key)
        for stage, part in enumerate(stages)
        for path, module in part.named_modules()
        for name, tensor in module._buffers.items()
        for key in ((id(module), name), *([] if tensor is None else [id(tensor)]))
    ]
    users: dict[object, set[int]] = {}
    for stage, _, key in places:
        users.setdefault(key, set()).add(stage)
    shared: list[dict[tuple[str, str], int]] = [{} for _ in stages]
    for stage, place, key in places:
        for other in users[key] - {stage}:
            shared[stage][place] = other
    return shared


def _values(owners: _Owners) -> BufferValues:
    return {(number, name): each for number, owner in owners.items() for name, each in owner.module._buffers.items()}


def _put(owners: _Owners, values: BufferValues) -> None:
    """Make ``values`` the buffers of ``owners``, in the tables that they have."""
    for number, owner in owners.items():
        table = owner.module._buffers
        for name in [name for name in table.keys() if (number, name) not in values]:  # noqa: SIM118 - TorchScript's is no dict.
            del table[name]
    for (number, name), tensor in values.items():
        table = owners[number].module._buffers
        if name not in table or table[name] is not tensor:
            table[name] = tensor


def _copies(values: BufferValues) -> BufferValues:
    """Copies of ``values``; a tensor with two names has one copy."""
    made: dict[int, Tensor] = {}
    for each in values.values():
        if each is not None and id(each) not in made:
            # What requires a gradient collects it, or belongs to a graph; a lazy buffer has no values yet.
            made[id(each)] = each if each.requires_grad or is_lazy(each) else each.clone()
    return {key: None if each is None else made[id(each)] for key, each in values.items()}


def _differing(ours: BufferValues, theirs: BufferValues) -> set[_BufferKey]:
    """Where the values differ, of tensors that are not the same."""
    return {
        key
        for key, tensor in ours.items()
        if tensor is not None and tensor is not (other := theirs[key]) and not _equal(tensor, other)
    }


def _equal(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors have equal values. On an accelerator the host waits for them."""
    return other is not None and one.layout is torch.strided and torch.equal(one, other)


def _version(tensor: Tensor) -> int:
    """How often ``tensor`` has been changed in place; 0 where torch does not count."""
    try:
        return version_of(tensor)
    except (RuntimeError, ValueError):  # It belongs to inference mode, or to a lazy module that has not run yet.
        return 0
