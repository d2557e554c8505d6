"""A worker of a campaign serves the controller as the package's own entry does, and hears what the campaign says."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from typing import Any

import torch

from asyncpipe.pipeline.resident.serve import serve
from asyncpipe.runtime.workers.control_client import ControlClient

__all__ = ["serve_campaign"]


async def serve_campaign(control: ControlClient, take: Callable[[Any], bool]) -> None:
    """Serve; ``take`` is called with each message, and says whether it was the campaign's."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # For a case that is late.
    torch.set_num_threads(1)
    await serve(_Control(control, take))  # type: ignore[arg-type]


class _Control:
    """The controller, with whom the campaign speaks as well."""

    def __init__(self, control: ControlClient, take: Callable[[Any], bool]) -> None:
        self._control = control
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    async def serve(self, handle: Callable[[Any], Any]) -> None:
        await self._control.serve(lambda message: None if self._take(message) else handle(message))
