"""A stage compiled by ``torch.compile``: one graph forward and one backward for each kind of call, and what is told.

Calls are of the same *kind* if they have the same grad mode, autocast, training flags, and types and dimensions of what
the stage receives. Each kind has a copy of the code that calls the stage, since the compiler keeps what it has
compiled, and counts recompilations, by code: so stages, and kinds, do not use up each other's limit. Within a kind,
sizes are fixed until they are seen to differ; if those of a step's micro-batches do, the batch dimension is dynamic
from the start.

The whole stage is traced, with what is Python around the layers: values by source and user, skips, hooks. The loss is
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
from typing import Any, NamedTuple, Protocol

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
    has_cpp_compiler,
    has_triton,
    mark_dynamic,
    recompile_reason,
    tree_leaves,
)

__all__ = ["CallKind", "CallsStage", "Received", "StageCompiler", "check_compiler"]

_logger = logging.getLogger(__name__)

Received = Mapping[int, Any]
_Call = Callable[[Received], Mapping[int, Any]]


class CallKind(NamedTuple):
    """What decides how a step calls a stage, besides what the stage receives."""

    may_retain: bool
    """Whether a backward may follow that keeps its graph, so that it must not overwrite what the forward has saved."""
    context: object
    """The caller's autocast and inference mode."""
    sizes: Sequence[int]
    """Of the micro-batches, if they differ."""
    batch_dim: int


class CallsStage(Protocol):
    """What calls one stage in the place of its module. Used on the threads that run the stage."""

    compilations: list[Compilation]
    """All so far; from any thread."""

    def prepared(
        self, tensors: Sequence[Tensor], kind: CallKind, microbatch: int, notes: list[Compilation]
    ) -> AbstractContextManager[_Call]:
        """What calls the stage with ``tensors``; inside, other tasks of the process wait if that compiles something.

        ``notes`` gets what was compiled.
        """

    def retained(self) -> AbstractContextManager[None]:
        """For a backward that keeps its graph. Raises ``BackwardError`` where none can."""


@dataclass(slots=True, eq=False)
class _Compiled:
    """The calls of one kind."""

    call: Callable[[nn.Module, Received], Mapping[int, Any]]
    shapes: set[object] = field(default_factory=set)
    """What was received so far."""
    graphs: int = 0
    """How many the compiler has made."""
    runs: int = 0
    """How often one of them ran, where graph breaks are allowed."""
    ended: float = 0.0
    """When it made the last one."""


class StageCompiler:
    """One stage, compiled. Used on the threads that run the stage; ``compilations`` on any."""

    def __init__(self, stage: int, module: nn.Module, option: CompileOption) -> None:
        """Raises ``OptionError`` for a backend that is not there, or options that it does not know."""
        self._stage = stage
        self._module = module
        self._option = option
        self._make = _inner_backend(option)
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
    ) -> Iterator[_Call]:
        """As ``CallsStage.prepared``."""
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
                        _mark_batch(received, kind.batch_dim, kind.sizes[microbatch])
                    return self._call(compiled, received, notes)

                yield call
        finally:
            hold_up(False)
        compiled.shapes.add(shapes)

    def retained(self) -> AbstractContextManager[None]:
        """As ``CallsStage.retained``: what the compiler has made checks once more when it runs."""
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
        compiled = _Compiled(_own_code(self._stage))

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            compiled.graphs += 1
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
        compiled.call = torch.compile(
            compiled.call, fullgraph=option.fullgraph, dynamic=option.dynamic, backend=backend
        )
        return compiled

    def _call(self, compiled: _Compiled, received: Received, notes: list[Compilation]) -> Mapping[int, Any]:
        graphs, runs, began = compiled.graphs, compiled.runs, time.perf_counter()
        broken = break_reasons() if not self._option.fullgraph else {}
        try:
            sent = compiled.call(self._module, received)
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


def _own_code(stage: int) -> Callable[[nn.Module, Received], Mapping[int, Any]]:
    """A function with code of its own, by which the compiler keeps what it has compiled."""

    def call(module: nn.Module, received: Received) -> Mapping[int, Any]:
        sent: Mapping[int, Any] = module(received)
        return sent

    call.__code__ = call.__code__.replace(co_name=f"stage_{stage}_{next(_numbers)}")
    return call


_numbers = itertools.count()


def _inner_backend(option: CompileOption) -> Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]:
    """What compiles a graph."""
    options = dict(option.options or {})
    try:
        if option.backend == "inductor" and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            # One thread of this process: a pool of the compiler's own would be a pool for each worker, and outlive it.
            options.setdefault("compile_threads", 1)
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


def _mark_batch(received: Received, dim: int, size: int) -> None:
    """Have the batch dimension of what the stage receives be any size; one of 1 is always compiled by itself."""
    for tensor in tree_leaves(dict(received)):
        if isinstance(tensor, Tensor) and tensor.dim() > dim and tensor.shape[dim] == size > 1:
            mark_dynamic(tensor, dim)


def _backward_graphs(sent: Mapping[int, Any]) -> int:
    """How many nodes of the compiler are behind what a stage sends."""
    waiting = [value.grad_fn for value in tree_leaves(dict(sent)) if isinstance(value, Tensor) and value.grad_fn]
    seen = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return sum("CompiledFunction" in node.name() for node in seen)
