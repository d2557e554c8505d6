"""What a trace would drop without a word: it is refused, or noted and done by the pipeline.

A trace records operations on tensors. Hooks of modules are not called by stages, which have no such modules, so they
are refused. The inside of ``torch.utils.checkpoint`` is recorded as ordinary operations; that the model asks for
recomputation is noted, so that a pipeline that would recompute nothing is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncpipe.errors import StageError, TraceError
from asyncpipe.ops.torch_internals import BACKWARD_HOOKS, FORWARD_HOOKS, hooks_of, hooks_of_all_modules

__all__ = ["HookWatch", "WatchForward", "reentrant_as_calls", "refuse_hooks"]

_TENSOR_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


def refuse_hooks(model: nn.Module) -> None:
    """Raise ``TraceError`` for a module with hooks; torch's own forward hooks (``weight_norm``) only compute.

    Also for hooks of all modules (``register_module_forward_hook``).
    """
    if hooks_of_all_modules():
        raise TraceError(
            "a hook of all modules (torch.nn.modules.module.register_module_…_hook) is registered, which the stages of "
            "a trace would not call for each module; remove it while the model is traced"
        )
    for name, module in model.named_modules():
        backward = bool(hooks_of(module, BACKWARD_HOOKS))
        forward = not all(map(_is_of_torch, hooks_of(module, FORWARD_HOOKS)))
        if backward or forward:
            raise TraceError(
                f"{_named(name)} has a {'backward' if backward else 'forward'} hook, which the stages of a trace would "
                "not call; remove it, or cut the model by hand into a list of stages"
            )


class WatchForward(TorchFunctionMode):
    """While a model is traced: refuses hooks on tensors, and notes ``torch.utils.checkpoint``.

    Raises ``TraceError`` for a hook on a tensor. A checkpoint's function is traced as if it were called: the pipeline
    recomputes whole stages.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self.checkpoints = ""
        """Where ``torch.utils.checkpoint`` was called first, in words."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _TENSOR_HOOKS:
            where = _named(self._caller(sys._getframe(1)))
            raise TraceError(
                f"{where} registers a hook on a tensor, which a trace would drop; leave it out, or cut the model by "
                "hand into a list of stages"
            )
        if not self.checkpoints:
            self._look_for_checkpoint(sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _look_for_checkpoint(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
            frame = frame.f_back
        if frame is not None:
            self.checkpoints = _named(self._caller(frame))

    def _caller(self, frame: FrameType | None) -> str:
        """The name of the innermost module that runs at ``frame``."""
        while frame is not None and id(frame.f_locals.get("self")) not in self._names:
            frame = frame.f_back
        return "" if frame is None else self._names[id(frame.f_locals["self"])]


class _PlainFunction:
    """Stands in for the autograd function of reentrant checkpoints, which would run its function without gradients."""

    tracing: ClassVar[set[int]] = set()
    """The threads that trace a model."""
    lock = threading.Lock()
    original = torch.utils.checkpoint.CheckpointFunction

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call ``function``, if this thread traces; other threads get their checkpoint."""
        if threading.get_ident() in _PlainFunction.tracing:
            return function(*args)
        return _PlainFunction.original.apply(function, preserve, *args)  # type: ignore[no-untyped-call]


@contextmanager
def reentrant_as_calls() -> Iterator[None]:
    """While a model is traced on this thread, a reentrant checkpoint is a call of its function."""
    me = threading.get_ident()
    with _PlainFunction.lock:
        _PlainFunction.tracing.add(me)
        torch.utils.checkpoint.CheckpointFunction = _PlainFunction  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        with _PlainFunction.lock:
            _PlainFunction.tracing.discard(me)
            if not _PlainFunction.tracing:
                torch.utils.checkpoint.CheckpointFunction = _PlainFunction.original  # type: ignore[misc]


class HookWatch:
    """Whether modules got hooks after they were traced, which stages do not call."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            (name, getattr(module, table))
            for name, module in model.named_modules()
            for table in (*BACKWARD_HOOKS, *FORWARD_HOOKS)
        ]
        self._hooks = [table for _, table in self._tables]
        self._before = list(map(len, self._hooks))

    def check(self) -> None:
        """Raise ``StageError`` for a module that has a hook more. Costs some 10 µs for a hundred modules."""
        if list(map(len, self._hooks)) == self._before:
            return
        for (name, table), before in zip(self._tables, self._before, strict=True):
            if len(table) > before:
                raise StageError(
                    f"{_named(name)} got a hook after the model was traced, which its stages would not call; remove "
                    "it, or cut the model by hand into a list of stages"
                )


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    # That of enable_input_require_grads() of Hugging Face only serves reentrant checkpoints, which are traced as calls.
    serves = str(getattr(hook, "__qualname__", "")).endswith(".make_inputs_require_grads")
    origin = str(getattr(hook, "__module__", ""))
    # transformers' hooks for hidden states do nothing unless somebody asks for these, which pipelines refuse.
    return serves or origin == "transformers.utils.output_capturing" or origin.partition(".")[0] == "torch"


def _named(name: str) -> str:
    return f"submodule {name!r}" if name else "the model"
