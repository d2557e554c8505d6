"""What the tasks of a device run inside: its compute stream, the grad mode of the step, and what draws random numbers.

Entered once for a program, and again after each of its waits; or around a single task.
"""

from __future__ import annotations

import torch

from asyncpipe.ops.autograd.random_streams import DeviceDraws
from asyncpipe.ops.device.streams import LaneStream

__all__ = ["Surroundings"]


class Surroundings:
    """A context for one thread at a time. It may be entered again when it has been left."""

    __slots__ = ("_draws", "_grad", "_outer_grad", "_stream", "_use")

    def __init__(self, stream: LaneStream, grad: bool, draws: DeviceDraws | None) -> None:
        """``stream`` is the device's compute stream."""
        self._stream = stream
        self._grad = grad
        self._draws = draws

    def __enter__(self) -> None:
        self._use = self._stream.use()
        self._use.__enter__()
        self._outer_grad = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad)
        if self._draws is not None:
            self._draws.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._draws is not None:
            self._draws.__exit__()
        torch.set_grad_enabled(self._outer_grad)
        self._use.__exit__(None, None, None)
