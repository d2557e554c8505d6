"""A run's random numbers, which are its own, whoever else draws in the process.

Each run has a CPU generator. The entry draws from it when it makes the model, each step takes one number from it, from
which all that the model draws follows, and so do batches and samplers that name no generator: while such code is at
work, a function mode (``ops/autograd/random_streams.py``) hands the run's generator to whatever draws. torch's
default generators would not do: all runs share them, and a step lends them to functions that know no other.

::

    alone      the entry draws from torch's default generators, seeded before; the run's goes on where they are then.
               A snapshot has Python's, numpy's and the CUDA devices' states, too.
    on a pool  the mode serves the entry as well, and what belongs to the process is neither seeded, kept nor put back.

Both ways the same seed gives the same numbers, so a job trains alike alone and among others. What the mode cannot see
is not the run's: Python's ``random``, numpy, threads that an entry starts, and default generators that it seeds itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from asyncpipe.ops.autograd.random_streams import RandomStream

__all__ = ["RunRandom"]

_T = TypeVar("_T")


class RunRandom:
    """The random numbers of one run; ``shared`` where others run in the process, on the same pool."""

    def __init__(self, *, shared: bool) -> None:
        self.generator = torch.Generator()
        """What step seeds are drawn from."""
        self._shared = shared
        self._mode = _Own(self.generator, shared=shared)

    def build(self, seed: int, make: Callable[[], _T]) -> _T:
        """What ``make`` makes, with draws that follow from ``seed`` alone, as do all later ones of the run."""
        if self._shared:
            self.seed(seed)
            with self._mode:
                return make()
        torch.manual_seed(seed)
        made = make()
        self.generator.set_state(torch.get_rng_state())
        return made

    def seed(self, seed: int) -> None:
        """Begin the run's generator anew, and no other."""
        self._mode.seed(seed)

    def drawing(self) -> AbstractContextManager[Any]:
        """While it is entered, draws of this thread are the run's. Not for two threads at once."""
        return self._mode

    async def drawn_by(self, coroutine: Awaitable[_T]) -> _T:
        """Await ``coroutine``, whose draws on the loop's thread are the run's; nobody else's there are."""
        return await _Driven(coroutine, self._mode)

    @property
    def position(self) -> Tensor:
        """The state of ``generator``."""
        return self.generator.get_state()

    @position.setter
    def position(self, state: Tensor) -> None:
        self.generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """The run's generator as ``cpu``, and, where it is alone, what batches may draw from although they should not.

        May be called while a step runs.
        """
        return {"cpu": self.position, **({} if self._shared else _python_state())}

    def device_state(self) -> dict[str, Any]:
        """The CUDA devices' default generators, where the run is alone. Not while a step runs: it is lent them."""
        if self._shared or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        return {"cuda": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from both together; where the run is not alone, nobody else notices."""
        self.position = state["cpu"]
        if not self._shared:
            _set_default_generators(state)


class _Own(RandomStream):
    """Hands a generator to all that draws: what torch's default one, in the same state, would have given is drawn.

    On other devices that is the default one where the run is alone, else one that is made from the same seed.
    """

    def __init__(self, generator: torch.Generator, *, shared: bool) -> None:
        super().__init__(0, 0, 0, torch.device("cpu"))
        self._cpu = generator
        self._shared = shared

    def seed(self, seed: int) -> None:
        self._cpu.manual_seed(seed)
        self._seed = seed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A traced function must draw where it will run, not here.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device.type == "cpu":
            return self._cpu
        if device.type == "cuda" and not self._shared:
            return torch.cuda.default_generators[device.index]
        return super()._generator(device)


class _Driven(Generic[_T]):
    """``coroutine``, with ``context`` entered whenever it runs, and left while it waits."""

    def __init__(self, coroutine: Awaitable[_T], context: AbstractContextManager[Any]) -> None:
        self._coroutine = coroutine
        self._context = context

    def __await__(self) -> Generator[Any, Any, _T]:
        steps: Any = self._coroutine.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                with self._context:
                    awaited = resume()
            except StopIteration as end:
                result: _T = end.value
                return result
            try:
                sent = yield awaited
            except BaseException as error:  # noqa: BLE001 - thrown into the coroutine, which decides
                resume = partial(steps.throw, error)
            else:
                resume = partial(steps.send, sent)


# The process's generators


def _python_state() -> dict[str, Any]:
    """The states of Python's generator, and of numpy's where it is loaded."""
    state: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    return state


def _set_default_generators(state: dict[str, Any]) -> None:
    """Put them into ``state``, as far as it says; of CUDA devices, those that there were and are."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:
        random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
    if "numpy" in state and find_spec("numpy") is not None:
        import_module("numpy").random.set_state(state["numpy"])


def _plain(value: Any) -> Any:
    """Numpy's state without arrays and numbers of its own: it takes lists as well."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
