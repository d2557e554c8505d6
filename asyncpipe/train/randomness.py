"""A run's random numbers, independent of everything else that draws in the process.

Each run has a CPU generator. The entry draws from it when it makes the model, and each step draws one number from it,
which determines all numbers that the model draws. Batches and samplers that name no generator draw from it too: while
they run, it takes the place of torch's default CPU generator on their thread (``ops/autograd/own_draws.py``). torch's
default generators are not enough, because all runs share them.

::

    alone      the entry draws from torch's default generators, which are seeded before; the run's generator continues
               from their state. Snapshots also have the states of Python's, numpy's and the CUDA devices' generators.
    on a pool  the run's generator serves the entry too; those of the process are not seeded, saved or restored.

In both cases the same seed gives the same numbers, so a job trains the same way alone and on a pool. This does not hold
for Python's ``random``, numpy, and threads that an entry starts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncpipe.ops.autograd.own_draws import OwnDraws
from asyncpipe.ops.device.caller_streams import await_inside
from asyncpipe.ops.device.devices import ACCELERATORS

__all__ = ["RunRandom"]

_T = TypeVar("_T")


class RunRandom:
    """The random numbers of one run; ``shared`` if other runs of the process share its pool."""

    def __init__(self, *, shared: bool) -> None:
        self.generator = torch.Generator()
        """The generator that step seeds are drawn from."""
        self._shared = shared
        self._mode = _RunDraws(self.generator, shared=shared)

    def build(self, seed: int, make: Callable[[], _T]) -> _T:
        """The result of ``make``; its random numbers and all later ones of the run follow from ``seed``."""
        if self._shared:
            self._mode.seed(seed)
            with self._mode:
                return make()
        torch.manual_seed(seed)
        made = make()
        self.generator.set_state(torch.get_rng_state())
        return made

    def drawing(self) -> AbstractContextManager[Any]:
        """A context in which this thread draws from the run's generator. For one thread at a time."""
        return self._mode

    async def drawn_by(self, awaitable: Awaitable[_T]) -> _T:
        """Await ``awaitable``, which draws from the run's generator; other coroutines on the loop do not."""
        return await await_inside(lambda: self._mode, awaitable)

    @property
    def position(self) -> Tensor:
        """The state of ``generator``."""
        return self.generator.get_state()

    @position.setter
    def position(self, state: Tensor) -> None:
        self.generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """The run's generator as ``cpu``; if the run is alone, also the generators of Python and numpy.

        Batches should not draw from those, but may. May be called while a step runs.
        """
        return {"cpu": self.position, **({} if self._shared else _python_state())}

    def device_state(self) -> dict[str, Any]:
        """The CUDA devices' default generators, if the run is alone. Not while a step runs, which uses them."""
        if self._shared or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        return {"cuda": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from both states together; if the run is not alone, generators of the process do not change."""
        self.position = state["cpu"]
        if not self._shared:
            _set_default_generators(state)


class _RunDraws(OwnDraws):
    """Draws from the run's generator, which get the numbers of a default generator in that state.

    On other devices, this is the default generator if the run is alone, else one that is made from the same seed.
    """

    def __init__(self, generator: torch.Generator, *, shared: bool) -> None:
        super().__init__()
        self._cpu = generator
        self._shared = shared
        self._seed = 0
        self._others: dict[torch.device, torch.Generator] = {}

    def seed(self, seed: int) -> None:
        self._cpu.manual_seed(seed)
        self._seed = seed

    def generator(self, device: torch.device) -> torch.Generator | None:
        if device.type == "cpu":
            return self._cpu
        if not self._shared or device.type not in ACCELERATORS:
            return None
        if device not in self._others:
            self._others[device] = torch.Generator(device).manual_seed(self._seed)
        return self._others[device]


# The process's generators


def _python_state() -> dict[str, Any]:
    """The states of Python's generator, and of numpy's if it is imported."""
    state: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return state


def _set_default_generators(state: dict[str, Any]) -> None:
    """Set the generators that ``state`` has; those of CUDA devices as far as this machine has them."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:
        random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
    if "numpy" in state and find_spec("numpy") is not None:
        import_module("numpy").random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    """Numpy's state as plain lists and numbers, which it accepts as well."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
