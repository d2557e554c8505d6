"""A stage whose kernels are captured in CUDA graphs: a call queues one graph instead of each kernel.

A captured graph reads and writes fixed memory. So each call copies what the stage receives into it, and what the stage
sends out of it; and what a forward leaves for its backward stays there until that has run. Several micro-batches are
between the two at a time, so a *slot*, a forward and its backward with memory of their own, is taken by one micro-batch
until its backward is done, and captured when no free one is left::

    call 1 of a size   runs as it is: the stage shows whether it changes buffers, and whether it draws
    call 2             warm-up; then, as call 3
    call 3             no free slot: captured, replayed    slot 0   F ───────────▶ B ─▶ free
    call 4             no free slot: captured, replayed    slot 1        F ──────────▶ B ─▶ free
    later              a free slot is replayed

The warm-up is forwards and backwards on the stream of captures, so that nothing of a library happens for the first time
in a capture: the workspaces of cuBLAS for this stream, plans and benchmarks of cuDNN for these sizes
(``cudnn.benchmark``), kernels that are loaded or compiled when they are first used.

This is why torch's own ways do not do here: ``torch.cuda.make_graphed_callables`` has one slot, and the trees of
``mode="reduce-overhead"`` keep what a call made until the thread's next one only.

**Streams.** Graphs are captured on a stream of their own: others may queue on a lane's compute stream meanwhile, which
would become part of the graph. They are replayed on the compute stream, and so are the copies; since all replays of a
stage are in one order there, a slot may be taken as soon as its backward is queued. What is sent is copied out, since
other streams read it later; gradients of inputs too. Gradients of parameters are added by autograd on the same stream
before the slot is replayed again: they are passed as the objects that the slot keeps, so autograd copies them instead
of taking their memory for ``grad``.

**Random numbers.** A replay begins where the device's default generator is, which the task has set
(``ops/autograd/random_streams.py``), and moves it on as the kernels would. So a replayed forward, its recomputation,
and a call that is not replayed draw the same. Kernels read where to begin from memory on the device: that of their
capture since torch 2.12, one for all graphs before. With an older torch, stages on two streams of a GPU may not both
draw.

**Which graphs a call may replay** depends on modes, flags, sizes, and where parameters are. In a whole step, parameters
are looked at once for each stage; in a call of ``pipe(x)``, whose backward may come much later, for each task.

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
    CAPTURES_HAVE_SEEDS,
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


WARM_UPS = 3
"""Forwards and backwards before the first capture of a kind; torch asks for as many."""


class GraphDevice:
    """All that a stage needs of CUDA to capture its kernels. Tests have another one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.cuda.default_generators[device.index]
        self._stream = AcceleratorStream(device).stream
        """Where graphs are captured."""

    def lane(self) -> Any:
        """The stream on which the calling thread queues, and so replays."""
        return torch.cuda.current_stream(self.device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is queued inside runs on the stream of captures, behind what this thread has queued, and before more."""
        lane = self.lane()
        # Hazard: the lane's stream has queued the writes to what is read inside: parameters and copies of inputs.
        self._stream.wait_stream(lane)
        with torch.cuda.stream(self._stream):
            yield
        # Hazard: the lane's stream queues writes to the same memory next: the first micro-batch, and later an update.
        lane.wait_stream(self._stream)
        # What was freed inside is kept for the stream of captures, where no capture may use it.
        torch.cuda.empty_cache()

    @contextmanager
    def capturing(self, other: Any = None) -> Iterator[Any]:
        """A graph of the kernels that are queued inside, in the memory of another graph or in memory of its own."""
        graph, pool = torch.cuda.CUDAGraph(), other.pool() if other else torch.cuda.graph_pool_handle()
        # Not ``torch.cuda.graph``, which waits for the whole device and empties the allocator's cache each time.
        with torch.cuda.stream(self._stream):
            # ``thread_local``: what other threads do meanwhile (wait for events, allocate) is none of the capture's.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()


class _Sizes:
    """The calls of one kind with tensors of one size."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws
        """Whether the forward draws from the device's generator."""
        self.free: list[_GraphSlot] = []
        self.slots = 0
        self.addresses: tuple[int, ...] = ()
        """Of the parameters and buffers that the graphs read."""


_drawing: weakref.WeakKeyDictionary[StageCapturer, tuple[torch.device, object, int]] = weakref.WeakKeyDictionary()
"""By what captured graphs that draw: the device and the stream on which these are replayed, and the stage."""


class StageCapturer:
    """One stage, by graphs. Used on the threads that run the stage; ``compilations`` on any."""

    def __init__(self, stage: int, module: nn.Module, device: torch.device) -> None:
        self._stage = stage
        self._module = module
        self._submodules = tuple(module.modules())
        self._device = device
        self._cuda: GraphDevice | None = None
        self._sizes: dict[object, _Sizes] = {}
        self._flags: dict[object, int] = {}
        self._look: tuple[CallKind, int, tuple[int, ...]] | None = None
        """What ``_looked`` has found last, and for calls of which kind."""
        self.compilations: list[Compilation] = []
        """All so far."""
        compile_gate.is_used = True

    @contextmanager
    def prepared(
        self, tensors: Sequence[Tensor], kind: CallKind, microbatch: int, notes: list[Compilation]
    ) -> Iterator[Callable[[Received], Any]]:
        """As ``StageCompiler.prepared``."""
        _, flags, addresses = self._looked(kind)
        key = (
            torch.is_grad_enabled(),
            kind.context,
            flags,
            tuple([(each.dtype, each.shape, each.stride(), each.requires_grad) for each in tensors]),
        )
        sizes = self._sizes.get(key)
        if sizes is None:
            cuda = self._cuda = self._cuda or GraphDevice(self._device)
            buffers, unused = self._buffers(), cuda.generator.get_state()
            yield self._module
            self._check_unhooked()
            self._check_buffers(buffers)
            self._sizes[key] = _Sizes(draws=not torch.equal(unused, cuda.generator.get_state()))
            return
        same = addresses is sizes.addresses or addresses == sizes.addresses
        if moved := bool(sizes.addresses) and not same:
            sizes.free.clear()
        sizes.addresses = addresses
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

    def _looked(self, kind: CallKind) -> tuple[CallKind, int, tuple[int, ...]]:
        """The number of what is asked by ``training`` and ``requires_grad``, and where parameters and buffers are."""
        look = self._look
        if look is not None and look[0] is kind and not kind.may_retain:
            return look
        parameters = list(self._module.parameters())
        flags = [module.training for module in self._submodules] + [each.requires_grad for each in parameters]
        addresses = tuple([each.data_ptr() for each in (*parameters, *self._module.buffers())])
        if look is not None and look[2] == addresses:
            addresses = look[2]  # The same object is compared at once.
        self._look = look = kind, self._flags.setdefault(tuple(flags), len(self._flags)), addresses
        return look

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

    def _check_draws(self, cuda: GraphDevice) -> None:
        """Raise ``CompileError`` where another stage's graphs draw at the same time from the same seed in memory."""
        if CAPTURES_HAVE_SEEDS:
            return
        lane = cuda.lane()
        for device, stream, other in _drawing.values():
            if device == self._device and stream != lane:
                raise CompileError(
                    self._stage,
                    f"it draws random numbers, as stage {other} does on another logical device of "
                    f"{self._device}, and CUDA graphs of one GPU share the seed in torch {torch.__version__}; install "
                    "torch 2.12 or newer, give each stage that draws a GPU, or use compile=True",
                )
        _drawing[self] = self._device, lane, self._stage

    def _captured(self, received: Received, sizes: _Sizes, notes: list[Compilation], *, moved: bool) -> Any:
        """Capture one more slot, and run it."""
        cuda = self._cuda
        assert cuda is not None
        began = time.perf_counter()
        _logger.info("capturing stage %d, slot %d", self._stage, sizes.slots)
        if sizes.draws:
            self._check_draws(cuda)
        cache = torch.is_autocast_cache_enabled()
        # A parameter that was cast in a warm-up, or in another graph, is not where this graph looks for it.
        torch.set_autocast_cache_enabled(False)
        try:
            slot = _GraphSlot(self._module, received, cuda, warm_ups=0 if sizes.slots else WARM_UPS, draws=sizes.draws)
        except RuntimeError as error:
            raise CompileError(self._stage, f"its kernels cannot be captured: {error}") from error
        finally:
            torch.set_autocast_cache_enabled(cache)
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

    def __init__(self, module: nn.Module, received: Received, cuda: GraphDevice, *, warm_ups: int, draws: bool) -> None:
        leaves, self._spec = tree_flatten(dict(received))
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.inputs = [torch.empty_like(each).copy_(each.detach()).requires_grad_(each.requires_grad) for each in given]
        self.parameters = [each for each in module.parameters() if each.requires_grad]
        if warm_ups:
            state = cuda.generator.get_state() if draws else None
            with cuda.beside():
                for _ in range(warm_ups):
                    outputs = self._forward_of(module)
                    self._backward_of(outputs, [torch.zeros_like(each) for each in self._wanted(outputs)])
            if state is not None:
                cuda.generator.set_state(state)
        # One pool for both: the backward frees what the forward has saved. No other slot may have that memory.
        with cuda.capturing() as self.forward:
            outputs = self._forward_of(module)
        self.backward: Any = None
        if any(self.wants):
            self.starts = [torch.zeros_like(each) for each in self._wanted(outputs)]
            """What the backward begins from."""
            with cuda.capturing(self.forward) as self.backward:
                found = iter(self._backward_of(outputs, self.starts))
            self.gradients = [next(found) if each.requires_grad else None for each in self.inputs]
            self.of_parameters = list(found)
        # Detached: the graph of autograd goes, what it saved stays in the pool as long as the graphs of CUDA do.
        self.outputs = [each.detach() for each in outputs]

    def _forward_of(self, module: nn.Module) -> list[Tensor]:
        """What ``module`` sends of the inputs, whose shapes are noted."""
        values, self._sent = tree_flatten(module(_filled(self._leaves, self.inputs, self._spec)))
        self._values = [_TENSOR if isinstance(value, Tensor) else value for value in values]
        outputs = [value for value in values if isinstance(value, Tensor)]
        self.wants = [torch.is_grad_enabled() and each.requires_grad for each in outputs]
        return outputs

    def _wanted(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [each for each, wants in zip(outputs, self.wants, strict=True) if wants]

    def _backward_of(self, outputs: Sequence[Tensor], starts: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of the inputs that have one, and of the parameters."""
        ends = [each for each in (*self.inputs, *self.parameters) if each.requires_grad]
        return torch.autograd.grad(self._wanted(outputs), ends, starts, allow_unused=True) if starts else ()

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
