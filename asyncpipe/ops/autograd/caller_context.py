"""Thread-local state of torch that a task takes over from its caller: grad mode, inference mode, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from asyncpipe.errors import BackwardError
from asyncpipe.ops.device.devices import ACCELERATORS
from asyncpipe.ops.torch_internals import inside_forward_derivatives, inside_transform

__all__ = ["CallerContext"]

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The state of the thread that called a step, to be entered on the threads that run its tasks."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    """(device type, type to cast to) for each device type that has autocast on."""
    autocast_cache: bool

    @classmethod
    def capture(cls) -> CallerContext:
        """The state of the calling thread.

        Raises ``BackwardError`` where part of that state cannot be taken over: other threads know nothing of a
        transform of ``torch.func``, and tasks detach what they pass on, which drops forward-mode derivatives.
        """
        if inside_forward_derivatives():
            raise BackwardError(
                "a pipeline does not pass forward-mode derivatives on (torch.autograd.forward_ad, torch.func.jvp and "
                "jacfwd), which would vanish; use the bare model, or backward derivatives"
            )
        if inside_transform():
            raise BackwardError(
                "a pipeline runs on threads that transforms of torch.func (grad, vjp, vmap, …) do not reach; transform "
                "the bare model, or call backward"
            )
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in ("cpu", *ACCELERATORS)
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to enter."""
        return not (self.autocasts or self.inference)

    def entered(self) -> AbstractContextManager[None]:
        """Enter the caller's autocast and inference mode. The task sets its grad mode itself.

        Every task enters a new autocast, which clears the cache of cast weights at its end. Otherwise a recomputation
        could use a cast that its first run made under ``no_grad``, and that has no graph.
        """
        return _NOTHING if self.is_plain else self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield
