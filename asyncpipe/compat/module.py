"""``PipelinedModule``: the base class of ``GPipe`` and ``Pipe``, a module whose forward calls a pipeline.

The module owns the layers and thereby the state. The pipeline is made from them, opened by the first forward and closed
when the module is dropped. It can be made again at any time, so copies and pickles leave it out::

    PipelinedModule ── partitions ──▶ stage 0, stage 1, …      parameters, modes, hooks, state dict
          └─────────── Pipeline ─────────▲                     threads, from the first forward until it is dropped
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import nn

from asyncpipe.compat.state import place_by_order, rename_layers
from asyncpipe.core.checks import check_positive
from asyncpipe.core.graph.checkpoint_mode import CheckpointMode
from asyncpipe.errors import ArgumentTypeError, MicrobatchError, MoveError, TaskError
from asyncpipe.ops.device.devices import resolve_devices
from asyncpipe.ops.model.batchnorm import convert_deferred_batch_norm
from asyncpipe.ops.model.sequential import PipeSequential, check_plain, stage_parts
from asyncpipe.ops.torch_internals import parse_to
from asyncpipe.pipeline.pipeline import Pipeline
from asyncpipe.pipeline.sync import SyncPipeline

__all__ = ["PipelinedModule", "check_sequential"]


class PipelinedModule(nn.Module):
    """A module whose forward runs as a pipeline, and which otherwise behaves like the sequence of its layers.

    Its threads start with the first forward, of whichever thread, and end when it is dropped. A forked child starts
    threads of its own. Copies and pickles contain the module's state only. Changes of ``chunks``, ``checkpoint`` and
    layers take effect at the next forward.
    """

    partitions: nn.ModuleList
    """The ancestor's partitions, each a sequence of layers. Consecutive ones may share a stage."""
    devices: list[torch.device]
    """The device of each partition; the outputs are on the last one."""
    chunks: int
    """Into how many micro-batches a large enough mini-batch is cut."""
    checkpoint: str
    """Which micro-batches are recomputed in training: ``"always"``, ``"except_last"`` or ``"never"``."""

    def __init__(self, chunks: int, checkpoint: str) -> None:
        """Raises ``MicrobatchError``, ``OptionError``, and ``ArgumentTypeError`` if ``chunks`` is not a number."""
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

    def _arrange(
        self,
        parts: Sequence[nn.Sequential],
        stages: Sequence[int],
        devices: Sequence[str],
        *,
        deferred_batch_norm: bool,
    ) -> None:
        """Make ``parts`` the partitions, each in its one of ``stages``, and move them to their stages' ``devices``.

        There may be no parts.
        """
        self._stage_of = list(stages)
        self._device_names = list(devices)
        physical = [device.physical for device in resolve_devices(devices)] if devices else []
        self.devices = [physical[stage] for stage in stages]
        self.partitions = nn.ModuleList(parts)
        if deferred_batch_norm:
            convert_deferred_batch_norm(self)
        if parts:
            self._update_pipeline()

    # Calls

    def _run(self, *args: Any) -> Any:
        """The output of the pipeline. An exception of a layer is raised unchanged, with a note that names the task."""
        pipe = self._open()
        try:
            return pipe(*args)
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
                stage_parts(self.partitions, [self._stage(index) for index in range(len(self._device_names))]),
                self._device_names,
                microbatches=self.chunks,
                schedule="gpipe",
                checkpoint=self.checkpoint,
            )
            self._made_from = made_from
        return self._pipeline

    def _stage(self, index: int) -> nn.Sequential:
        """The partitions of stage ``index`` as one sequence. Those without layers pass on what they get."""
        parts = [part for part, stage in zip(self.partitions, self._stage_of, strict=True) if stage == index]
        if len(parts) == 1:
            return cast("nn.Sequential", parts[0])
        return _SharedStage(*(part for part in parts if len(cast("nn.Sequential", part))))

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
        self._place_layers(state_dict, prefix)
        rename_layers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _place_layers(self, state: dict[str, Any], prefix: str) -> None:
        """Name the layers in ``state``, in place, as they are named here. Raises ``StateDictError``."""
        place_by_order(self, state, prefix)

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


class _SharedStage(PipeSequential):
    """Partitions on one stage. What one returns as a tuple or list are the next one's arguments, as between stages."""

    def forward(self, *args: Any) -> Any:
        for part in self:
            output = part(*args)
            args = tuple(output) if isinstance(output, tuple | list) else (output,)
        return output


def check_sequential(module: object) -> nn.Sequential:
    """``module`` if it is an ``nn.Sequential``; raises ``ArgumentTypeError`` otherwise, and as ``check_plain``."""
    if not isinstance(module, nn.Sequential):
        raise ArgumentTypeError(
            f"module must be nn.Sequential to be partitioned, got {type(module).__name__}; asyncpipe.Pipeline takes "
            "any module that asyncpipe.trace has cut"
        )
    check_plain(module, "module")
    return module
