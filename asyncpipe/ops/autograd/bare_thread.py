"""The calling thread as a thread that runs only tasks would be, for tasks that run inside another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from asyncpipe.ops.autograd.checkpoint import in_no_run
from asyncpipe.ops.device.devices import ACCELERATORS

__all__ = ["bare_thread"]


@contextmanager
def bare_thread() -> Iterator[None]:
    """Inside, modes, hooks for saved tensors and autocast that were entered around it do not act.

    Hooks of ``torch.utils.checkpoint`` around a call would drop tensors of the inner graphs. A recomputation of the
    outer task is none of the inner ones. Grad mode and random streams are left alone, since each task has its own.
    """
    functions = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    hooks = list(_popped_hooks())
    try:
        with ExitStack() as stack, in_no_run():
            if torch._C._len_torch_dispatch_stack():
                stack.enter_context(_disable_current_modes())
            for kind in ("cpu", *ACCELERATORS):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        for mode in reversed(functions):
            torch._C._push_on_torch_function_stack(mode)


def _popped_hooks() -> Iterator[tuple[Any, Any]]:
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        yield hooks
