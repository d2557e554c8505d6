"""What torch keeps per thread and a task must take with it: grad and inference mode, autocast, device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["CallerContext"]


@dataclass(frozen=True, slots=True)
class _Autocast:
    device_type: str
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The thread state of the caller of a step, to be entered on the threads that run its tasks."""

    grad: bool
    inference: bool
    autocasts: tuple[_Autocast, ...]

    @classmethod
    def capture(cls) -> CallerContext:
        """The state of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                _Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            ),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The caller's autocast and inference mode; grad mode is the task's own business.

        Every task enters a fresh autocast, which drops the cache of cast weights at its end: a cast made under
        no_grad by a checkpointed forward must not serve the recomputation.
        """
        if not self.autocasts and not self.inference:
            yield
            return
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for autocast in self.autocasts:
                stack.enter_context(
                    torch.autocast(autocast.device_type, dtype=autocast.dtype, cache_enabled=autocast.cache)
                )
            yield
