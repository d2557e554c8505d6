"""What the tasks of a device run inside: its compute stream, the grad mode of the step, what draws random numbers, and
the caller's context variables.

Entered once for a program, and again after each of its waits; or around a single task.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch

from asyncpipe.ops.autograd.random_streams import DeviceDraws
from asyncpipe.ops.device.streams import LaneStream

__all__ = ["Surroundings"]


class Surroundings:
    """A context for one thread at a time. It may be entered again when it has been left."""

    __slots__ = ("_draws", "_grad", "_outer_grad", "_stream", "_tokens", "_use", "_variables")

    def __init__(
        self,
        stream: LaneStream,
        grad: bool,
        draws: DeviceDraws,
        variables: Sequence[tuple[ContextVar[Any], Any]],
    ) -> None:
        """``stream`` is the device's compute stream."""
        self._variables = variables
        self._stream = stream
        self._grad = grad
        self._draws = draws

    def __enter__(self) -> None:
        self._use = self._stream.use()
        self._use.__enter__()
        self._outer_grad = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad)
        self._draws.__enter__()
        self._tokens = [(variable, variable.set(value)) for variable, value in self._variables]

    def __exit__(self, *_: object) -> None:
        for variable, token in self._tokens:
            variable.reset(token)
        self._draws.__exit__()
        torch.set_grad_enabled(self._outer_grad)
        self._use.__exit__(None, None, None)
