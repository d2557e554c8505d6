"""What a trace would drop without a word, and which is therefore refused.

A trace records operations on tensors. Hooks of modules are not called by stages, which have no such modules; and the
inside of ``torch.utils.checkpoint`` would be recorded as ordinary operations or, if it is reentrant, as operations
without gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncpipe.errors import TraceError

__all__ = ["RefuseDropped", "refuse_hooks"]

_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")


def refuse_hooks(model: nn.Module) -> None:
    """Raise ``TraceError`` for a module with hooks; torch's own forward hooks (``weight_norm``) only compute."""
    for name, module in model.named_modules():
        # Hugging Face's, which also registers a hook: that would be the wrong thing to name.
        if getattr(module, "gradient_checkpointing", None) is True:
            raise _checkpoint_error(name)
    for name, module in model.named_modules():
        backward = any(getattr(module, table) for table in _BACKWARD)
        forward = any(not _is_of_torch(hook) for table in _FORWARD for hook in getattr(module, table).values())
        if backward or forward:
            raise TraceError(
                f"{_named(name)} has a {'backward' if backward else 'forward'} hook, which the stages of a trace would "
                "not call; remove it, or cut the model by hand into a list of stages"
            )


class RefuseDropped(TorchFunctionMode):
    """While a model is traced: raises ``TraceError`` for a hook on a tensor and for ``torch.utils.checkpoint``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}

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
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
            frame = frame.f_back
        if frame is not None:
            raise _checkpoint_error(self._caller(frame))
        return func(*args, **(kwargs or {}))

    def _caller(self, frame: FrameType | None) -> str:
        """The name of the innermost module that runs at ``frame``."""
        while frame is not None and id(frame.f_locals.get("self")) not in self._names:
            frame = frame.f_back
        return "" if frame is None else self._names[id(frame.f_locals["self"])]


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"


def _checkpoint_error(name: str) -> TraceError:
    return TraceError(
        f"{_named(name)} calls torch.utils.checkpoint, which a trace would drop; switch that off "
        "(gradient_checkpointing_disable() of a Hugging Face model), and give the pipeline checkpoint='always'"
    )


def _named(name: str) -> str:
    return f"submodule {name!r}" if name else "the model"
