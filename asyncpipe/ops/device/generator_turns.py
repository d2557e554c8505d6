"""Turns at the default generator of an accelerator.

CUDA's dropout and attention, cuDNN, CUDA graphs and the kernels of extensions draw from the default generator of the
device. A task therefore seeds it. Other threads may issue work to the same device: one at a time has the turn, while
its task is issued, and gives the generator back in the state in which it was taken. All this is on the host, and
nothing waits for the device.

A task waits for no other while it has a turn: what it calls in between (a pipeline in a loss function) pauses the turn.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

from asyncpipe.ops.device.devices import ACCELERATORS
from asyncpipe.ops.torch_internals import DRAWS

__all__ = ["GeneratorTurn", "turn_of"]


GeneratorPlace = tuple[int, int] | Tensor
"""Where a generator is: the seed and the offset of Philox, or the state of one that has none."""


class GeneratorTurn:
    """One thread at a time sets ``generator``, the default one of ``device``, and draws from it."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self.device = device
        self.generator = generator
        self._lock = threading.Lock()
        self._is_philox = generator.device.type != "cpu"
        self._outside: GeneratorPlace
        """Where the generator was found."""

    def acquire(self, place: GeneratorPlace | int) -> GeneratorPlace:
        """Wait for the turn; then set the generator to a seed or a place. Where it is then."""
        self._lock.acquire()
        self._outside = self.place()
        self._set(place)
        return self.place()

    def release(self) -> GeneratorPlace:
        """End the turn; where the generator was, for ``acquire`` to go on from."""
        place = self.place()
        self._set(self._outside)
        self._lock.release()
        return place

    def place(self) -> GeneratorPlace:
        """Where the generator is now. Of Philox two numbers say it, without a tensor."""
        generator = self.generator
        return (generator.initial_seed(), generator.get_offset()) if self._is_philox else generator.get_state()

    def is_at(self, place: GeneratorPlace) -> bool:
        """Whether the generator is there now."""
        now = self.place()
        return torch.equal(now, place) if isinstance(now, Tensor) and isinstance(place, Tensor) else now == place

    def _set(self, place: GeneratorPlace | int) -> None:
        if isinstance(place, Tensor):
            self.generator.set_state(place)
            return
        seed, offset = (place, 0) if isinstance(place, int) else place
        # This also makes cuDNN's recurrent layers draw a new seed for their dropout, from the CPU's generator.
        self.generator.manual_seed(seed)
        if offset:
            self.generator.set_offset(offset)


_turns: dict[torch.device, GeneratorTurn] = {}


@cache
def turn_of(device: torch.device) -> GeneratorTurn | None:
    """The turns at the default generator of an accelerator that has been used before.

    ``None`` for a CPU, unless this torch cannot draw from generators of a thread's own (``torch_internals.DRAWS``).
    """
    if device.type in ACCELERATORS:
        generator = torch.get_device_module(device).default_generators[device.index]
    elif device.type == "cpu" and DRAWS is None:
        generator = torch.default_generator
    else:
        return None
    # Threads that ask at the same time get the same one.
    return _turns.setdefault(device, GeneratorTurn(device, generator))
