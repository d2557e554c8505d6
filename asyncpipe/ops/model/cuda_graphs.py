"""A stage whose kernels are captured in CUDA graphs: a call queues one graph instead of each kernel.

A captured graph reads and writes fixed memory. So each call copies what the stage receives into it, and what the stage
sends out of it; and what a forward leaves for its backward stays there until that has run. Several micro-batches are
between the two at a time, so a *slot*, a forward and its backward with memory of their own, is taken by one micro-batch
until its backward is done, and captured when no free one is left::

    call 1 of a size   runs as it is: libraries start up, and the stage shows whether it changes buffers
    call 2             no free slot: captured, replayed    slot 0   F ───────────▶ B ─▶ free
    call 3             no free slot: captured, replayed    slot 1        F ──────────▶ B ─▶ free
    later              a free slot is replayed

This is why torch's own ways do not do here: ``torch.cuda.make_graphed_callables`` has one slot, and the trees of
``mode="reduce-overhead"`` keep what a call made until the thread's next one only.

**Streams.** Graphs are captured on a stream of their own: others may queue on a lane's compute stream meanwhile, which
would become part of the graph. They are replayed on the compute stream, and so are the copies; since all replays of a
stage are in one order there, a slot may be taken as soon as its backward is queued. What is sent is copied out, since
other streams read it later; gradients of inputs too. Gradients of parameters are added by autograd on the same stream
before the slot is replayed again: they are passed as the objects that the slot keeps, so autograd copies them instead
of taking their memory for ``grad``.

**Random numbers.** The device's default generator is registered with a graph by torch. A replay begins where the
generator is, which the task has set (``ops/autograd/random_streams.py``), and moves it on as the kernels would. So a
replayed forward, its recomputation, and a call that is not replayed draw the same.

**Refused**, since a replay would do without it: forwards that change buffers, hooks of modules, tied parameters, which
are brought to other memory in each step; a second backward; and what waits for the device (``item()``), which torch
refuses to capture. What a stage does in Python beside its tensors happens when it is captured, not in later calls.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe.core.compile_option import CUDA_GRAPHS
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.errors import BackwardError, CompileError
from asyncpipe.ops.device.compile_gate import compile_gate, hold_up
from asyncpipe.ops.device.streams import AcceleratorStream
from asyncpipe.ops.model.stage_compiler import CallKind, Received
from asyncpipe.ops.torch_internals import (
    BatchNorm,
    TreeSpec,
    hooks_of,
    hooks_of_all_modules,
    tree_flatten,
    tree_unflatten,
    version_of,
)

__all__ = ["StageCapturer"]

_logger = logging.getLogger(__name__)


class _Sizes:
    """The calls of one kind with tensors of one size."""

    def __init__(self) -> None:
        self.free: list[_GraphSlot] = []
        self.slots = 0
        self.addresses: tuple[int, ...] = ()
        """Of the parameters and buffers that the graphs read."""


class StageCapturer:
    """One stage, by graphs. Used on the threads that run the stage; ``compilations`` on any."""

    def __init__(self, stage: int, module: nn.Module, device: torch.device) -> None:
        self._stage = stage
        self._module = module
        self._submodules = tuple(module.modules())
        self._device = device
        self._stream: AcceleratorStream | None = None
        """Where graphs are captured."""
        self._sizes: dict[object, _Sizes] = {}
        self.compilations: list[Compilation] = []
        """All so far."""
        compile_gate.is_used = True

    @contextmanager
    def prepared(
        self, tensors: Sequence[Tensor], kind: CallKind, microbatch: int, notes: list[Compilation]
    ) -> Iterator[Callable[[Received], Any]]:
        """As ``StageCompiler.prepared``."""
        key = (
            torch.is_grad_enabled(),
            kind.context,
            tuple([module.training for module in self._submodules]),
            tuple([parameter.requires_grad for parameter in self._module.parameters()]),
            tuple([(each.dtype, each.shape, each.stride(), each.requires_grad) for each in tensors]),
        )
        sizes = self._sizes.get(key)
        if sizes is None:
            buffers = self._buffers()
            yield self._module
            self._check_unhooked()
            self._check_buffers(buffers)
            self._sizes[key] = _Sizes()
            return
        addresses = tuple([each.data_ptr() for each in (*self._module.parameters(), *self._module.buffers())])
        if addresses != sizes.addresses:
            sizes.free.clear()
            moved, sizes.addresses = bool(sizes.addresses), addresses
        else:
            moved = False
        if sizes.free:
            slot = sizes.free.pop()
            yield lambda received: slot.run(received, _gives_back(sizes, slot))
            return
        hold_up(True)
        try:
            with compile_gate.compiling():
                yield lambda received: self._captured(received, sizes, notes, moved=moved)
        finally:
            hold_up(False)

    def retained(self) -> AbstractContextManager[None]:
        """As ``StageCompiler.retained``: refused."""
        raise BackwardError(
            "a graph of CUDA cannot be retained for another backward, which would read memory that this one has used "
            "again; give the pipeline checkpoint='always', which recomputes it, or leave compile out"
        )

    def _check_unhooked(self) -> None:
        for name, module in self._module.named_modules():
            if hooks_of(module) or hooks_of_all_modules():
                raise CompileError(
                    self._stage, f"a replay would not call the hooks of its module {name!r}; remove them"
                )

    def _buffers(self) -> list[tuple[int, int]]:
        return [(id(buffer), version_of(buffer)) for buffer in self._module.buffers()]

    def _check_buffers(self, before: Sequence[tuple[int, int]]) -> None:
        """Raise ``CompileError`` if the forward has changed a buffer. Norms do not count their changes."""
        changed = self._buffers() != list(before)
        for module in self._submodules:
            if isinstance(module, BatchNorm) and module.training and module.track_running_stats:
                changed = True
        if changed:
            raise CompileError(
                self._stage,
                "it changes a buffer in its forward, and a replay would not do so as its recomputation needs",
            )

    def _captured(self, received: Received, sizes: _Sizes, notes: list[Compilation], *, moved: bool) -> Any:
        """Capture one more slot, and run it."""
        began = time.perf_counter()
        _logger.info("capturing stage %d, slot %d", self._stage, sizes.slots)
        if self._stream is None:
            self._stream = AcceleratorStream(self._device)
        try:
            slot = _GraphSlot(self._module, received, self._stream.stream)
        except RuntimeError as error:
            raise CompileError(self._stage, f"its kernels cannot be captured: {error}") from error
        sizes.slots += 1
        made = Compilation(
            self._stage,
            CUDA_GRAPHS,
            "training" if slot.backward is not None else "forward",
            1,
            int(slot.backward is not None),
            (),
            "a parameter or buffer is in other memory" if moved else "",
            time.perf_counter() - began,
        )
        self.compilations.append(made)
        notes.append(made)
        hold_up(False)
        return slot.run(received, _gives_back(sizes, slot))


def _gives_back(sizes: _Sizes, slot: _GraphSlot) -> Callable[[], None]:
    """What gives ``slot`` back, unless parameters have moved since."""
    addresses = sizes.addresses

    def free() -> None:
        if sizes.addresses == addresses:
            sizes.free.append(slot)

    return free


class _GraphSlot:
    """A captured forward, with its backward where autograd records, and the memory that both use."""

    def __init__(self, module: nn.Module, received: Received, stream: Any) -> None:
        leaves, self._spec = tree_flatten(dict(received))
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.inputs = [torch.empty_like(each).copy_(each.detach()).requires_grad_(each.requires_grad) for each in given]
        self.parameters = [each for each in module.parameters() if each.requires_grad]
        # One pool for both: the backward frees what the forward has saved. No other slot may have that memory.
        pool = torch.cuda.graph_pool_handle()
        self.forward = torch.cuda.CUDAGraph()
        self.backward: torch.cuda.CUDAGraph | None = None
        # ``thread_local``: what other threads do meanwhile (wait for events, allocate) is none of the capture's.
        with torch.cuda.graph(self.forward, pool=pool, stream=stream, capture_error_mode="thread_local"):
            values, self._sent = tree_flatten(module(_filled(self._leaves, self.inputs, self._spec)))
            self._values = [_TENSOR if isinstance(value, Tensor) else value for value in values]
            outputs = [value for value in values if isinstance(value, Tensor)]
        self.wants = [each.requires_grad for each in outputs]
        self.starts = [torch.zeros_like(each) for each in outputs if each.requires_grad]
        """What the backward begins from."""
        if torch.is_grad_enabled() and any(self.wants):
            self.backward = torch.cuda.CUDAGraph()
            ends = [each for each in (*self.inputs, *self.parameters) if each.requires_grad]
            with torch.cuda.graph(self.backward, pool=pool, stream=stream, capture_error_mode="thread_local"):
                found = torch.autograd.grad(
                    [each for each in outputs if each.requires_grad], ends, self.starts, allow_unused=True
                )
            rest = iter(found)
            self.gradients = [next(rest) if each.requires_grad else None for each in self.inputs]
            self.of_parameters = list(rest)
        # Detached: the graph of autograd goes, what it saved stays in the pool as long as the graphs of CUDA do.
        self.outputs = [each.detach() for each in outputs]

    def run(self, received: Received, free: Callable[[], None]) -> Any:
        """What the stage sends. ``free`` is called when nothing needs the slot's memory any more."""
        given = [leaf for leaf in tree_flatten(dict(received))[0] if isinstance(leaf, Tensor)]
        if self.backward is None:
            made: Sequence[Tensor] = self.load_and_replay(given)
            free()
        else:
            taken = _TakenSlot(self)
            # Also where the backward never comes: the graph of autograd is dropped.
            weakref.finalize(taken, free).atexit = False
            made = CudaGraphCompiledFunction.apply(taken, *given, *self.parameters)  # type: ignore[no-untyped-call]
        return _filled(self._values, made, self._sent)

    def load_and_replay(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Copies of what the forward makes of ``given``, on the current stream."""
        with torch.no_grad():
            for static, tensor in zip(self.inputs, given, strict=True):
                static.copy_(tensor)
            self.forward.replay()
            # Hazard: other streams read what is sent, later than the next replay here.
            return [each.clone() for each in self.outputs]


_TENSOR: Any = object()
"""Where a tensor is, among the leaves of a nested value."""


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor], spec: TreeSpec) -> Any:
    """The nested value with ``tensors`` in their places."""
    rest = iter(tensors)
    return tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in leaves], spec)


class _TakenSlot:
    """That a micro-batch has a slot, until its backward has run or nobody can run it."""

    __slots__ = ("__weakref__", "slot", "was_run")

    def __init__(self, slot: _GraphSlot) -> None:
        self.slot = slot
        self.was_run = False


class CudaGraphCompiledFunction(torch.autograd.Function):
    """A replayed forward for autograd, whose backward is a replay. Not split, by its name (``split_backward``)."""

    @staticmethod
    def forward(ctx: Any, taken: _TakenSlot, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies of what the stage sends."""
        slot = taken.slot
        ctx.taken = taken
        ctx.set_materialize_grads(False)
        outputs = slot.load_and_replay(tensors[: len(slot.inputs)])
        ctx.mark_non_differentiable(*(each for each, wanted in zip(outputs, slot.wants, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of what the stage received, copied, and of its parameters."""
        taken: _TakenSlot = ctx.taken
        slot = taken.slot
        assert slot.backward is not None
        if taken.was_run:
            raise BackwardError("this backward has run already; the memory that it reads has been used again")
        taken.was_run = True
        wanted = [gradient for gradient, wants in zip(gradients, slot.wants, strict=True) if wants]
        for start, gradient in zip(slot.starts, wanted, strict=True):
            if gradient is None:
                start.zero_()
            else:
                start.copy_(gradient)
        slot.backward.replay()
        made = [None if each is None else each.clone() for each in slot.gradients]
        return None, *made, *slot.of_parameters
