"""The calling thread as a thread that runs only tasks would be, for tasks that run inside another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from asyncpipe.ops.autograd.checkpoint import in_no_run
from asyncpipe.ops.device.devices import ACCELERATORS
from asyncpipe.ops.torch_internals import without_modes_and_hooks

__all__ = ["bare_thread"]


@contextmanager
def bare_thread() -> Iterator[None]:
    """Inside, modes, hooks for saved tensors and autocast that were entered around it do not act.

    Hooks of ``torch.utils.checkpoint`` around a call would drop tensors of the inner graphs. A recomputation of the
    outer task is none of the inner ones. Grad mode and random streams are left alone, since each task has its own.
    """
    with ExitStack() as stack, in_no_run(), without_modes_and_hooks():
        for kind in ("cpu", *ACCELERATORS):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
