"""Stages compiled by ``torch.compile``, as a whole or block by block, and what is told of them.

By default only the *blocks* of a stage are compiled (``regional``): layers with modules inside that it has several of,
by class and shapes, and that are most of it. They share code, so that twelve are compiled once; other layers run as
they are. A stage without blocks is compiled as a whole, and so is one that does more than to call its layers in order::

    regional    embedding   │ block │ block │ block │   norm, head     1 graph forward, 1 backward, thrice
    whole       │ embedding   block   block   block     norm, head │   1 graph forward, 1 backward

Between blocks runs Python: some microseconds for the checks of each, and nothing is fused across.

Calls are of the same *kind* if they have the same grad mode, autocast, training flags, and types and dimensions of what
the stage receives. Each kind has a copy of the code that calls the stage, since the compiler keeps what it has
compiled, and counts recompilations, by code: so stages, and kinds, do not use up each other's limit. Within a kind,
sizes are fixed until they are seen to differ; if those of a step's micro-batches do, the batch dimension is dynamic
from the start.

A whole stage is traced with what is Python around the layers: values by source and user, skips, hooks. The loss is
not, nor is anything that the task does around the stage: its random stream, its copies of buffers, its autocast. So a
recomputation, whose forward was compiled without a graph, draws the same: inductor draws a seed for each operator
from the stage's stream (``ops/autograd/own_draws.py``), and a number follows from the seed and its place in the tensor.

The backward is compiled together with the forward, not when it first runs: then nothing is compiled in a backward. A
compiled backward is one node for autograd, which computes all gradients at once, so it is not split
(``ops/autograd/split_backward.py``).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncpipe.core.compile_option import CompileOption
from asyncpipe.core.records.compilations import Compilation
from asyncpipe.errors import BackwardError, CompileError, OptionError
from asyncpipe.ops.device.compile_gate import compile_gate, hold_up
from asyncpipe.ops.device.devices import Device
from asyncpipe.ops.torch_internals import (
    break_reasons,
    compile_backend,
    compile_settings,
    compiler_error,
    end_compiler_threads,
    has_cpp_compiler,
    has_triton,
    mark_dynamic,
    recompile_reason,
    tree_leaves,
)

__all__ = ["CallKind", "Layered", "Received", "StageCompiler", "StageFunction", "check_compiler"]

_logger = logging.getLogger(__name__)

Received = Mapping[int, Any]
StageFunction = Callable[[Received], Mapping[int, Any]]
"""What a stage sends, by user, from what it receives, by source."""
Layered = tuple[Sequence[nn.Module], Callable[[Sequence[Callable[..., Any]]], StageFunction]]
"""The layers of a stage, and what makes a function of calls in their places."""


class CallKind(NamedTuple):
    """What decides how a step calls a stage, besides what the stage receives."""

    may_retain: bool
    """Whether a backward may follow that keeps its graph, so that it must not overwrite what the forward has saved."""
    context: object
    """The caller's autocast and inference mode."""
    sizes: Sequence[int]
    """Of the micro-batches, if they differ."""
    batch_dim: int


@dataclass(slots=True, eq=False)
class _Compiled:
    """The calls of one kind."""

    call: StageFunction = field(init=False)
    shapes: set[object] = field(default_factory=set)
    """What was received so far."""
    graphs: int = 0
    """How many the compiler has made."""
    runs: int = 0
    """How often one of them ran, where graph breaks are allowed."""
    ended: float = 0.0
    """When it made the last one."""
    batch: tuple[int, int] | None = None
    """The dimension and the size of the micro-batch, in a call whose batch dimension is to be any size."""


@dataclass(slots=True, eq=False)
class _Code:
    """What is compiled of calls of a kind: of the whole stage, or of a block."""

    call: Callable[..., Any]
    graphs: int = 0
    """How many the compiler has made."""


class StageCompiler:
    """One stage, compiled. Used on the threads that run the stage; ``compilations`` on any."""

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        option: CompileOption,
        *,
        on_cpu: bool = True,
        layered: Layered | None = None,
    ) -> None:
        """Raises ``OptionError`` for a backend that is not there, or options that it does not know."""
        self._stage = stage
        self._module = module
        self._option = option
        self._make = _inner_backend(option, on_cpu=on_cpu)
        layers, keys = (layered[0], _block_keys(layered[0])) if layered else ((), [])
        self._join = layered[1] if layered and any(keys) else itemgetter(0)
        self._pieces = list(zip(layers, keys, strict=True)) if any(keys) else [(module, (True,))]
        """The layers, or the whole stage; with a key, equal for those that share code, or without one: not compiled."""
        self._submodules = tuple(module.modules())
        self._kinds: dict[object, _Compiled] = {}
        self._lock = threading.Lock()
        self.compilations: list[Compilation] = []
        """All so far."""
        self._is_eager = False
        """Whether a call was seen that the compiler had nothing to do with."""
        compile_gate.is_used = True

    @contextmanager
    def prepared(
        self, tensors: Sequence[Tensor], kind: CallKind, microbatch: int, notes: list[Compilation]
    ) -> Iterator[StageFunction]:
        """What calls the stage with ``tensors``; inside, other tasks of the process wait if that compiles something.

        ``notes`` gets what was compiled.
        """
        compiled = self._of_kind(tensors, kind)
        shapes = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        if shapes in compiled.shapes:
            yield lambda received: self._call(compiled, received, notes)
            return
        hold_up(True)
        try:
            with compile_gate.compiling():
                if not compiled.shapes:
                    what = "forward and backward" if torch.is_grad_enabled() else "forward"
                    _logger.info("compiling stage %d (%s) with %s", self._stage, what, self._option.name)

                def call(received: Received) -> Mapping[int, Any]:
                    if kind.sizes and self._option.dynamic is None:
                        compiled.batch = kind.batch_dim, kind.sizes[microbatch]
                    return self._call(compiled, received, notes)

                yield call
        finally:
            compiled.batch = None
            end_compiler_threads()
            hold_up(False)
        compiled.shapes.add(shapes)

    def retained(self) -> AbstractContextManager[None]:
        """For a backward that keeps its graph: what the compiler has made checks once more when it runs.

        Raises ``BackwardError`` where no graph can be kept.
        """
        if any(parameter.device.type != "cpu" for parameter in self._module.parameters()):
            raise BackwardError(
                "the graph of a compiled stage on an accelerator cannot be retained for another backward; give the "
                "pipeline checkpoint='always', which recomputes it, or leave compile out"
            )
        return compile_settings({"donated_buffer": False})

    def _of_kind(self, tensors: Sequence[Tensor], kind: CallKind) -> _Compiled:
        key = (
            torch.is_grad_enabled(),
            kind.may_retain,
            kind.context,
            tuple([module.training for module in self._submodules]),
            tuple([(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors]),
        )
        found = self._kinds.get(key)
        if found is None:
            with self._lock:
                found = self._kinds.setdefault(key, self._new_kind(may_retain=kind.may_retain))
        return found

    def _new_kind(self, *, may_retain: bool) -> _Compiled:
        compiled = _Compiled()
        codes: dict[object, _Code] = {}

        def code(key: object) -> _Code:
            if key not in codes or codes[key].graphs >= MOST_SHARED:
                codes[key] = self._new_code(compiled, may_retain)
            return codes[key]

        pieces = [_piece(compiled, partial(code, key), layer) if key else layer for layer, key in self._pieces]
        compiled.call = self._join(pieces)
        return compiled

    def _new_code(self, compiled: _Compiled, may_retain: bool) -> _Code:
        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            compiled.graphs += 1
            code.graphs += 1
            wanted = {"force_non_lazy_backward_lowering": True, "donated_buffer": not may_retain}
            hold_up(True)
            try:
                # An older torch does not know the first, and compiles the backward when it first runs.
                with compile_settings(wanted):
                    made = self._make(graph, inputs)
            finally:
                hold_up(False)
            compiled.ended = time.perf_counter()
            if self._option.fullgraph:
                return made  # The compiler itself raises where nothing of it runs.

            def counted(*args: Any) -> Any:
                compiled.runs += 1
                return made(*args)

            return counted

        option = self._option
        own = _own_code(self._stage)
        code = _Code(torch.compile(own, fullgraph=option.fullgraph, dynamic=option.dynamic, backend=backend))
        return code

    def _call(self, compiled: _Compiled, received: Received, notes: list[Compilation]) -> Mapping[int, Any]:
        graphs, runs, began = compiled.graphs, compiled.runs, time.perf_counter()
        broken = break_reasons() if not self._option.fullgraph else {}
        try:
            sent = compiled.call(received)
        except Exception as error:
            if (why := compiler_error(error)) is not None:
                raise CompileError(self._stage, why) from error
            raise
        if compiled.graphs > graphs:
            trains = torch.is_grad_enabled()
            made = Compilation(
                self._stage,
                self._option.name,
                "training" if trains else "forward",
                compiled.graphs - graphs,
                _backward_graphs(sent) if trains else 0,
                () if self._option.fullgraph else _new_breaks(broken),
                recompile_reason() if graphs else "",
                compiled.ended - began,
            )
            self._note(made, notes)
        elif not self._option.fullgraph and compiled.runs == runs and not self._is_eager:
            self._is_eager = True
            self._note(Compilation(self._stage, self._option.name, "eager", 0, 0, (), "", 0.0), notes)
        return sent

    def _note(self, made: Compilation, notes: list[Compilation]) -> None:
        self.compilations.append(made)
        notes.append(made)
        if made.kind == "eager":
            _logger.warning(
                "stage %d runs without the compiler: it was compiled for too many different calls, or nothing of it "
                "can be compiled; fullgraph=True makes that an error",
                self._stage,
            )
            return
        for reason in made.graph_breaks:
            _logger.warning("stage %d is not one graph: %s", self._stage, reason)
        if made.again:
            _logger.warning("stage %d was compiled once more: %s", self._stage, made.again)
        _logger.info("compiled stage %d in %.1f s", self._stage, made.seconds)


def _new_breaks(before: Mapping[str, int]) -> tuple[str, ...]:
    """Why graphs were broken since ``break_reasons`` was ``before``."""
    return tuple(reason for reason, count in break_reasons().items() if count > before.get(reason, 0))


MOST_SHARED = 3
"""Graphs of one code after which the next layer gets another. The compiler gives up a code of which it has made 8."""


def _block_keys(layers: Sequence[nn.Module]) -> list[object]:
    """By layer: equal keys for blocks that share code, ``None`` for others; for all if blocks are the lesser part."""
    keys = [_likeness(layer) if any(True for _ in layer.children()) else None for layer in layers]
    found = [key if keys.count(key) > 1 else None for key in keys]
    sizes = [sum(1 for _ in layer.modules()) for layer in layers]
    inside = sum(size for size, key in zip(sizes, found, strict=True) if key)
    return found if 2 * inside > sum(sizes) else [None] * len(keys)


def _likeness(layer: nn.Module) -> object:
    """Equal for layers that compute the same with other parameters, as far as their modules tell."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (
        tuple([(name, type(module), module.extra_repr()) for name, module in layer.named_modules()]),
        tuple([(name, each.shape, each.dtype, each.requires_grad) for name, each in tensors]),
    )


def _piece(compiled: _Compiled, find: Callable[[], _Code], layer: nn.Module) -> Callable[..., Any]:
    """What calls ``layer`` with code that it finds when it first runs."""
    code: _Code | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal code
        code = code or find()
        if not torch.is_grad_enabled():
            # What the stage receives may require a gradient; what layers give each other here does not.
            args = tuple([each.detach() if isinstance(each, Tensor) else each for each in args])
        if compiled.batch is not None:
            _mark_batch((args, kwargs), *compiled.batch)
        return code.call(layer, *args, **kwargs)

    return call


def _own_code(stage: int) -> Callable[..., Any]:
    """A function with code of its own, by which the compiler keeps what it has compiled."""

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return layer(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"stage_{stage}_{next(_numbers)}")
    return call


_numbers = itertools.count()


def _inner_backend(
    option: CompileOption, *, on_cpu: bool
) -> Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]:
    """What compiles a graph."""
    options = dict(option.options or {})
    try:
        if option.backend == "inductor" and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            # On a CPU, threads that start C++ compilers, and end with the compilation (``end_compiler_threads``). On an
            # accelerator it would be a pool of processes in each worker, which takes seconds to start and outlives the
            # pipeline.
            options.setdefault("compile_threads", min(os.cpu_count() or 1, 8) if on_cpu else 1)
        return compile_backend(option.backend, option.mode, options, option.dynamic)
    except (RuntimeError, ValueError, ImportError) as error:
        raise OptionError(f"compile: {error}") from error


def check_compiler(option: CompileOption, devices: Sequence[Device]) -> None:
    """Raise ``OptionError`` unless this process can compile for its ``devices``."""
    if option.cuda_graphs and (other := next((each for each in devices if each.physical.type != "cuda"), None)):
        raise OptionError(
            f"compile='cudagraphs' needs CUDA devices, and {other.name!r} is none; use compile=True, or leave it out"
        )
    if option.cuda_graphs or option.backend != "inductor":
        return
    kinds = {device.physical.type for device in devices}
    if "cpu" in kinds and not has_cpp_compiler():
        raise OptionError(
            "compile: stages on a CPU are compiled with a C++ compiler, and none was found here; install g++ or name "
            "one in the environment variable CXX, or use compile={'backend': 'aot_eager'} or compile=False"
        )
    if kinds - {"cpu"} and not has_triton():
        raise OptionError(
            "compile: stages on accelerators are compiled with Triton, which is not installed or does not support this "
            "device; install it, or use compile=False"
        )


def _mark_batch(values: Any, dim: int, size: int) -> None:
    """Have the batch dimension of ``values`` be any size; one of 1 is always compiled by itself."""
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor) and tensor.dim() > dim and tensor.shape[dim] == size > 1:
            mark_dynamic(tensor, dim)


def _backward_graphs(sent: Mapping[int, Any]) -> int:
    """How many graphs of the compiler have nodes behind what a stage sends."""
    waiting = [value.grad_fn for value in tree_leaves(dict(sent)) if isinstance(value, Tensor) and value.grad_fn]
    seen = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return len({type(node) for node in seen if "CompiledFunction" in node.name()})
