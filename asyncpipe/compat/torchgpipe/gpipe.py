"""torchgpipe's ``GPipe``: a sequence of layers, split by a balance, called like the sequence itself.

The module owns the layers and thereby the state. The pipeline is made from them, opened by the first forward and closed
when the module is dropped. It can be made again at any time, so copies and pickles leave it out::

    GPipe ── partitions ──▶ stage 0, stage 1, …      parameters, modes, hooks, state dict
      └───── Pipeline ─────────▲                     threads, from the first forward until it is dropped
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from asyncpipe.compat.torchgpipe.state import place_by_name, rename_layers
from asyncpipe.core.checks import check_positive
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.core.predict.balance import check_balance
from asyncpipe.errors import (
    ArgumentTypeError,
    BalanceError,
    DeviceError,
    MicrobatchError,
    MoveError,
    TaskError,
    TooFewDevicesError,
)
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.model.batchnorm import convert_deferred_batch_norm
from asyncpipe.ops.model.sequential import check_plain, split, stage_parts
from asyncpipe.ops.model.skip_layout import verify_skippables
from asyncpipe.ops.torch_internals import parse_to
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["GPipe"]


class GPipe(nn.Module):
    """A pipeline in place of ``module``: the same layers, output and gradients, with the stages on ``devices``.

    ``module``: an ``nn.Sequential``, whose layers are moved in place and stay the objects that they are.
    ``balance``: the number of layers in each stage.
    ``devices``: one per stage, by default all CUDA devices; extra ones are not used. Several may be ``"cpu"``, each
    with a thread of its own.
    ``chunks``: into how many micro-batches a mini-batch is cut; a mini-batch with fewer samples makes fewer.
    ``checkpoint``: which micro-batches are recomputed in training: ``"always"``, ``"except_last"``, ``"never"``.
    ``deferred_batch_norm``: whether batch norms update their running statistics once per mini-batch.

    Raises ``ValueError`` for a wrong balance, ``chunks`` or ``checkpoint``, ``IndexError`` for fewer devices than
    stages, ``TypeError`` for another type of module and for skips that do not match. Stages may share a parameter.
    """

    balance: list[int]
    """The number of layers in each stage."""
    partitions: nn.ModuleList
    """The stages, each a sequence of layers."""
    devices: list[torch.device]
    """The device of each stage; the outputs are on the last one."""
    chunks: int
    """Into how many micro-batches a large enough mini-batch is cut."""
    checkpoint: str
    """Which micro-batches are recomputed in training: ``"always"``, ``"except_last"`` or ``"never"``."""

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[int | str | torch.device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        try:
            number = int(chunks)
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"chunks must be a positive integer, got {chunks!r}") from None
        self.chunks = check_positive("microbatches", number, MicrobatchError)
        self.checkpoint = CheckpointMode.parse(str(checkpoint)).value
        self._pipeline: Pipeline | None = None
        self._sync: SyncPipeline | None = None
        self._made_from: tuple[Any, ...] = ()
        self._opening: dict[int, threading.Lock] = {}
        verify_skippables(_checked_module(module))
        self.balance = _checked(balance, len(module))
        self._device_names = _names(devices, len(self.balance))
        self.devices = [device.physical for device in resolve_devices(self._device_names)] if self.balance else []
        parts = split(module, self.balance, len(self.balance)) if self.balance else []
        self.partitions = nn.ModuleList(parts)
        if deferred_batch_norm:
            convert_deferred_batch_norm(self)
        if parts:
            self._update_pipeline()

    # Calls

    def forward(self, input: Any) -> Any:  # noqa: A002 - torchgpipe's name, which callers may use
        """The output for a mini-batch: a tensor, or a tuple, which the first layer gets as one argument.

        Tensors are cut along dimension 0. Raises ``TypeError`` for an input of another type, ``ValueError`` for one
        that cannot be cut, and whatever a layer raises. An error in ``backward`` is the cause of a ``TaskError``.
        """
        if not isinstance(input, Tensor | tuple):
            raise ArgumentTypeError(f"the input must be a tensor or a tuple of tensors, got {type(input).__name__}")
        return self._run(input) if len(self.partitions) else input

    def _run(self, batch: Any) -> Any:
        """The output of the pipeline. An exception of a layer is raised unchanged, with a note that names the task."""
        pipe = self._open()
        try:
            return pipe(batch)
        except TaskError as error:
            failure = error.__cause__
            # Not a BaseException such as SystemExit: raised here, it would end the caller's program, not the layer.
            if not isinstance(failure, Exception):
                raise
            where = f"micro-batch {error.microbatch}, stage {error.stage}, device {error.device}"
            failure.add_note(f"raised by {error.task_id}: {where}")
            # Otherwise a cycle keeps this module alive: error -> failure -> traceback -> frames -> module and error.
            error.__traceback__ = None
        try:
            raise failure
        finally:
            del failure

    def _open(self) -> SyncPipeline:
        """The pipeline, made and opened if it is not. After an error the next call tries again."""
        # By process: a thread of the parent that a forked child does not have may hold the parent's lock.
        with self._opening.setdefault(os.getpid(), threading.Lock()):
            pipeline = self._update_pipeline()
            if self._sync is None:
                self._pipeline = None  # one that failed to open cannot be opened again
                self._sync = pipeline.sync().__enter__()
                self._pipeline = pipeline
            return self._sync

    def _update_pipeline(self) -> Pipeline:
        """The pipeline; a new one if ``chunks``, ``checkpoint``, layers or process have changed since it was made."""
        made_from = (os.getpid(), self.chunks, self.checkpoint, *self)
        if self._pipeline is None or made_from != self._made_from:
            self._sync = None
            self._pipeline = Pipeline(
                stage_parts(self.partitions, [cast("nn.Sequential", part) for part in self.partitions]),
                self._device_names,
                microbatches=self.chunks,
                schedule="gpipe",
                checkpoint=self.checkpoint,
            )
            self._made_from = made_from
        return self._pipeline

    # Methods of a sequence

    def __len__(self) -> int:
        """How many layers there are in all stages."""
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> nn.Module:
        """The layer at ``index``; a negative index counts from the end. Raises ``IndexError`` if there is none."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in order."""
        for part in self.partitions:
            yield from cast("nn.Sequential", part)

    # State

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything except the pipeline."""
        return {**self.__dict__, "_pipeline": None, "_sync": None, "_made_from": (), "_opening": {}}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        place_by_name(self, state_dict, prefix)  # The names are those of the whole module, whatever the balance is.
        rename_layers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # A cast replaces buffers of which the pipeline may have replicas. A module around this one may also move it.
        self._pipeline = self._sync = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Raises ``MoveError``."""
        raise self._denied()

    def cpu(self) -> Self:
        """Raises ``MoveError``."""
        raise self._denied()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast the module, as ``nn.Module.to(dtype)``. Raises ``MoveError`` for a device."""
        # Without an accelerator, torch cannot parse a device that is given as a number.
        number = isinstance(kwargs.get("device", args[0] if args else None), int)
        if number or parse_to(*args, **kwargs)[0] is not None:
            raise self._denied()
        return super().to(*args, **kwargs)

    def _denied(self) -> MoveError:
        name = type(self).__name__
        return MoveError(
            f"denied to move parameters and buffers: {name} keeps each stage on its device, {self.devices}; "
            f"nn.Sequential(*{name.lower()}) has the same layers and can be moved once the {name} is no longer used"
        )


def _checked_module(module: object) -> nn.Sequential:
    """``module`` if it is an ``nn.Sequential``; raises ``ArgumentTypeError`` otherwise, and as ``check_plain``."""
    if not isinstance(module, nn.Sequential):
        raise ArgumentTypeError(
            f"module must be nn.Sequential to be partitioned, got {type(module).__name__}; asyncpipe.Pipeline takes "
            "any module that asyncpipe.trace has cut"
        )
    check_plain(module, "module")
    return module


def _checked(balance: Iterable[int] | None, layers: int) -> list[int]:
    tool = "asyncpipe.compat.torchgpipe.balance finds one: balance_by_time(partitions, module, sample)"
    if balance is None:
        raise BalanceError(f"balance is required: the number of layers in each stage; {tool}")
    # Accepts integers of other libraries, but no fractions.
    sizes = [size.__index__() if hasattr(size, "__index__") else size for size in balance]
    try:
        return check_balance(sizes, layers) if sizes or layers else []
    except BalanceError as error:
        raise BalanceError(f"{error}; {tool}") from None


def _names(devices: Iterable[int | str | torch.device] | None, stages: int) -> list[str]:
    """The names of the first ``stages`` devices."""
    if isinstance(devices, str | torch.device):
        raise DeviceError(f"devices must be a list such as ['cuda:0', 'cuda:1'], got {devices!r}")
    there = range(torch.cuda.device_count()) if devices is None else devices
    names = [f"cuda:{device}" if isinstance(device, int) else str(device) for device in there]
    if len(names) < stages:
        default = " (by default all CUDA devices of this machine)" if devices is None else ""
        raise TooFewDevicesError(
            f"{stages} stages need {stages} devices, got {len(names)}{default}; give devices, such as "
            f"{['cpu'] * stages}, or fewer stages"
        )
    return names[:stages]
