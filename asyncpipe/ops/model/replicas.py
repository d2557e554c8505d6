"""Replicas of a staged model: the stages of later rows, and the running statistics of their batch norms.

The stages of a later row are copies of those of row 0. Where the pipeline has the optimizers, each row has parameters
of its own, which begin and stay equal (``ops/execute/replica_sums.py``). Where an optimizer of the caller's updates row
0 between two steps, the others are tied to it (``ties.py``): each step brings them the values, and their gradients
back::

    row 0    stage 0 ───────▶ stage 1          parameters, optimizers, state dict
               ║ C(0>2), C(2>0)  ║ C(1>3), C(3>1)
    row 1    stage 2 ───────▶ stage 3          replicas of the parameters, buffers of their own

What else a layer has is its row's own: a forward in one row must not see what another row's forward does. Its buffers
get the values of row 0 when a step begins. At the end the running statistics of batch norms are joined as one pipeline
would have made them of all micro-batches; a forward that changes any other buffer is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError
from asyncpipe.ops.model.batchnorm import DeferredBatchNorm, Moments
from asyncpipe.ops.model.stage import CALLER, StagedModel, StageModule
from asyncpipe.ops.torch_internals import BatchNorm, version_of

__all__ = ["ReplicaStage", "ReplicaStatistics", "Twins", "own_buffers", "replicated"]

_Call = Callable[[Mapping[int, Any]], Mapping[int, Any]]


def replicated(model: StagedModel, rows: int, *, tied: bool) -> StagedModel:
    """``model`` with the stages of all ``rows``, which are ``tied`` to the parameters of row 0 or have copies of them.

    Raises ``OptionError`` for a layer that cannot be copied.
    """
    count = len(model.stages)
    stages = list(model.stages)
    for row in range(1, rows):
        shared: dict[int, Any] = {id(parameter): parameter for parameter in model.module.parameters()} if tied else {}
        try:
            copies = copy.deepcopy(list(model.stages), shared)
        except Exception as error:
            raise OptionError(
                f"the model cannot be copied for another replica ({type(error).__name__}: {error}); leave open files, "
                "locks and tensors that are computed from others out of its layers"
            ) from error
        stages += [ReplicaStage(stage, row * count) for stage in copies]
    links = [(source + row * count, user + row * count) for row in range(rows) for source, user in model.links]
    return replace(model, stages=stages, links=tuple(links), join=None, rows=rows)


class ReplicaStage(StageModule):
    """A stage of a later row: calls a copy of the stage of row 0, which counts its row's stages from 0."""

    def __init__(self, stage: StageModule, first: int) -> None:
        """``first`` is the number of the row's first stage."""
        super().__init__()
        self.stage = stage
        self.overwrites_input = stage.overwrites_input
        self.splits_head = stage.splits_head
        self._first = first

    def forward(self, received: Mapping[int, Any]) -> dict[int, Any]:
        """Call the copy."""
        return _call_in_row(self.stage, self._first, received)

    def function(self) -> _Call:
        """As ``StageModule.function``."""
        return partial(_call_in_row, self.stage.function(), self._first)


def _call_in_row(call: _Call, first: int, received: Mapping[int, Any]) -> dict[int, Any]:
    own = {source if source < 0 else source - first: value for source, value in received.items()}
    return {user if user == CALLER else user + first: value for user, value in call(own).items()}


class Twins:
    """The modules of row 0, and their copies in later rows."""

    def __init__(self, pairs: Iterable[tuple[int, nn.Module, nn.Module]] = ()) -> None:
        """``pairs``: a row, a module of row 0 and its copy. Copies that are tied have the parameters of row 0."""
        self._pairs_of_modules = list(pairs)
        self._pairs_of_parameters = [
            (parameter, twin)
            for _, module, copied in self._pairs_of_modules
            for parameter, twin in zip(module._parameters.values(), copied._parameters.values(), strict=True)
            if parameter is not None and twin is not None and parameter is not twin
        ]
        self._versions = self._seen()

    def of(self, parameters: Collection[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """By copy of one of ``parameters``, which are those of row 0: that one."""
        return {twin: parameter for parameter, twin in self._pairs_of_parameters if parameter in parameters}

    def follow(self) -> None:
        """Have the copies as their originals: modes, flags, and values that somebody else has put there; no gradients.

        Originals that another worker has are left out: who has changed their values there gives them to all rows.
        """
        for _, module, copied in self._pairs_of_modules:
            copied.training = module.training
        versions = self._seen()
        for (parameter, twin), now, before in zip(self._pairs_of_parameters, versions, self._versions, strict=True):
            twin.requires_grad_(parameter.requires_grad)
            twin.grad = None
            if now != before and not (parameter.is_meta or twin.is_meta):
                twin.data.copy_(parameter.data)
        self._versions = versions

    def updated(self) -> None:
        """All rows have made the same update."""
        self._versions = self._seen()

    def in_row(self, row: int) -> dict[int, Tensor | None]:
        """By ``id`` of a parameter or buffer of row 0: that of a later row."""
        return {
            id(tensor): copied_table[name]
            for of, module, copied in self._pairs_of_modules
            for table, copied_table in ((module._parameters, copied._parameters), (module._buffers, copied._buffers))
            for name, tensor in table.items()
            if of == row and tensor is not None
        }

    def _seen(self) -> list[tuple[int, int]]:
        return [(version_of(parameter), parameter.data_ptr()) for parameter, _ in self._pairs_of_parameters]


def own_buffers(stages: Sequence[nn.Module], rows: int, shared: Sequence[dict[tuple[str, str], int]]) -> None:
    """Add to ``shared`` (``shared_buffers``) what each row has of its own and nobody joins."""
    count = len(stages) // rows
    for stage, part in enumerate(stages):
        for path, module in part.named_modules():
            if not _joins_statistics(module):
                shared[stage].update({(path, name): (stage + count) % len(stages) for name in module._buffers})


def _joins_statistics(module: nn.Module) -> bool:
    """Whether what forwards do to the buffers of ``module`` in several rows is joined."""
    return isinstance(module, DeferredBatchNorm) or (
        isinstance(module, BatchNorm) and type(module).__module__ == "torch.nn.modules.batchnorm"
    )


class ReplicaStatistics:
    """The buffers of a stage in row 0, and in a later row.

    A batch norm's forward maps a running value v to (1 - momentum) v + momentum x, so n forwards map it to
    (1 - momentum)^n v + c. The later row tells n and c, and row 0 applies them behind its own forwards, in the order
    of the rows: what one pipeline computes with all micro-batches. Without momentum v is a mean of all x, and c their
    sum.
    """

    def __init__(self, owner: nn.Module, user: nn.Module) -> None:
        pairs = zip(owner.modules(), user.modules(), strict=True)
        self._pairs = [(a, b) for a, b in pairs if a._buffers or _joins_statistics(a)]
        self._values: list[Tensor | None] = []
        self._begun: dict[nn.Module, dict[str, Tensor]] = {}
        """Of each batch norm of the later row that trains: its buffers as they were when the step began."""

    def __bool__(self) -> bool:
        return bool(self._pairs)

    @property
    def joins(self) -> bool:
        """Whether row 0 is told of something."""
        return any(_joins_statistics(owner) for owner, _ in self._pairs)

    def begin(self) -> None:
        """A step begins: keep the buffers of row 0, whose forwards may change them before the later row has them."""
        buffers = [tensor for owner, _ in self._pairs for tensor in owner._buffers.values()]
        self._values = [None if tensor is None else tensor.detach().clone() for tensor in buffers]

    def values(self) -> list[Tensor | None]:
        """The buffers of row 0 as they were when the step began."""
        return self._values

    def load(self, values: Iterator[Tensor | None]) -> None:
        """Let the later row begin from these values."""
        with torch.no_grad():
            for owner, user in self._pairs:
                for name in owner._buffers:
                    _load(user, name, next(values))
                if isinstance(user, DeferredBatchNorm):
                    user.discard()
                elif _joins_statistics(user) and user.training:
                    self._begun[user] = {name: each.clone() for name, each in user._buffers.items() if each is not None}

    def collect(self) -> list[Tensor | None]:
        """What row 0 needs to know of the later row's forwards, layer by layer: three tensors each, or ``None``."""
        told: list[Tensor | None] = []
        for _, user in self._pairs:
            if isinstance(user, DeferredBatchNorm):
                gathered, user.gathered = user.gathered, None
                told += [None] * 3 if gathered is None else gathered.tensors()
            elif _joins_statistics(user):
                told += _what_forwards_did(user, self._begun.pop(user, {}))
        return told

    def join(self, told: Iterator[Tensor | None]) -> None:
        """Have row 0 as if it had done what ``collect`` has told."""
        for owner, _ in self._pairs:
            if not _joins_statistics(owner):
                continue
            count, first, second = next(told), next(told), next(told)
            if count is None or first is None or second is None:
                continue
            if isinstance(owner, DeferredBatchNorm):
                theirs = Moments.from_tensors(count, first, second)
                owner.gathered = theirs if owner.gathered is None else owner.gathered.merged(theirs)
            else:
                _do_again(owner, count, (first, second))


def _load(module: nn.Module, name: str, value: Tensor | None) -> None:
    own = module._buffers[name]
    if value is None or own is None or own.shape != value.shape or own.dtype is not value.dtype:
        module._buffers[name] = None if value is None else value.clone()
    else:
        own.copy_(value)


_RUNNING = ("running_mean", "running_var")


def _what_forwards_did(norm: Any, before: Mapping[str, Tensor]) -> Sequence[Tensor | None]:
    """The number of forwards since ``before``, and what they have added to each running value."""
    if "num_batches_tracked" not in before:
        return [None] * 3
    count = norm.num_batches_tracked - before["num_batches_tracked"]
    if norm.momentum is None:
        tracked = norm.num_batches_tracked
        added = [norm._buffers[name] * tracked - before[name] * before["num_batches_tracked"] for name in _RUNNING]
    else:
        added = [norm._buffers[name] - before[name] * _kept(norm, count, before[name]) for name in _RUNNING]
    return [count, *added]


def _do_again(norm: Any, count: Tensor, added: Sequence[Tensor]) -> None:
    tracked = norm.num_batches_tracked + count
    for name, more in zip(_RUNNING, added, strict=True):
        running = norm._buffers[name]
        if norm.momentum is not None:
            running.mul_(_kept(norm, count, running)).add_(more)
        elif tracked:
            running.mul_(norm.num_batches_tracked.to(running.dtype) / tracked).add_(more / tracked)
    norm.num_batches_tracked.copy_(tracked)


def _kept(norm: Any, count: Tensor, like: Tensor) -> Tensor:
    """What ``count`` forwards leave of a running value."""
    return torch.as_tensor(1 - norm.momentum, dtype=like.dtype, device=like.device) ** count
