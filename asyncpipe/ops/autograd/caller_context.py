"""What a task takes over from its caller: grad and inference mode, autocast, the default device, context variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import torch

from asyncpipe.errors import BackwardError, OptionError
from asyncpipe.ops.device.devices import ACCELERATORS
from asyncpipe.ops.torch_internals import default_device, inside_forward_derivatives, inside_modes, inside_transform

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
    device: torch.device | None
    """Where tensors are made without a device, if that is not torch's own default."""
    variables: tuple[tuple[ContextVar[Any], Any], ...]
    """Context variables and their values. They do not travel to workers."""

    @classmethod
    def capture(cls, *, modes: bool = False) -> CallerContext:
        """The state of the calling thread. With ``modes``, those of torch are somebody else's business.

        Raises ``BackwardError`` or ``OptionError`` where part of that state cannot be taken over: other threads know
        nothing of a mode or of a transform of ``torch.func``, and tasks detach what they pass on, which drops
        forward-mode derivatives.
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
        if not modes and (mode := inside_modes()):
            raise OptionError(
                f"{mode} is active on the thread that called, and would not see what a pipeline computes on other "
                "threads; leave it before the call, or enter it inside the stages"
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
            device=default_device(),
            variables=tuple(copy_context().items()),
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Without the variables: these cannot be pickled."""
        return CallerContext, (self.grad, self.inference, self.autocasts, self.autocast_cache, self.device, ())

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to enter."""
        return not (self.autocasts or self.inference or self.device)

    def entered(self) -> AbstractContextManager[None]:
        """Enter the caller's autocast, inference mode and default device. The task sets its grad mode itself.

        Every task enters a new autocast, which clears the cache of cast weights at its end. Otherwise a recomputation
        could use a cast that its first run made under ``no_grad``, and that has no graph.
        """
        if self.inference or self.device:
            return self._entered()
        return self._cast() if self.autocasts else _NOTHING

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.device is not None:
                stack.enter_context(self.device)
            if self.autocasts:
                stack.enter_context(self._cast())
            yield

    @contextmanager
    def _cast(self) -> Iterator[None]:
        """As ``torch.autocast`` of each type of device, without what that checks: the caller has entered the same."""
        cache = torch.is_autocast_cache_enabled()
        before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind, _ in self.autocasts]
        torch.autocast_increment_nesting()
        self._set_casts(self.autocast_cache, ((kind, True, dtype) for kind, dtype in self.autocasts))
        try:
            yield
        finally:
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
            self._set_casts(cache, before)

    @staticmethod
    def _set_casts(cache: bool, casts: Iterable[tuple[str, bool, torch.dtype]]) -> None:
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
