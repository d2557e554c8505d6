"""Draws of a thread from generators of its own, whatever makes them: Python, C++, TorchScript or compiled code.

torch's default generators are global, and most functions that draw take no other. But every draw on a CPU is in the end
an operator with a ``generator`` argument, which torch's dispatcher calls. The dispatcher has a key that each thread can
switch on for itself, and that torch uses in its own tests only. For this key, such operators have a kernel here, which
fills in a generator of the thread; all others have none, and cost what they cost without the key::

    dropout ──▶ bernoulli_(x, generator=None) ──▶ this key ──▶ bernoulli_(x, generator=own) ──▶ autograd ──▶ kernel

The key and the generators travel with the thread-local state that torch itself hands to its threads: those of autograd
and of ``torch.jit.fork``. While torch traces a function to compile it, nothing is filled in: what is compiled draws
when it runs.

Two more places know the default generator:

- Between an operator without a ``generator`` and the one with it that it calls, there may be Python code: a dispatch
  mode, or a tensor that has ``__torch_dispatch__``. torch switches the key off there. The default generator then has
  the state of the thread's own for as long as that operator runs, under a lock.
- ``torch.utils.checkpoint`` keeps the state of the default generator in its forward, and sets it in its recomputation,
  by functions of ``torch.random``. While a pool is open, ``torch.random.default_generator`` is therefore an object that
  stands for the calling thread's own generator if it has one, and for torch's otherwise.

Nothing is registered until the first use. What stays then is a key without effect. Where torch has no such key, tasks
on a CPU take turns at its default generator instead (``ops/device/generator_turns``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from asyncpipe.ops.torch_internals import DRAWS, DrawsKey, is_default_generator, thread_slot

__all__ = ["OwnDraws", "own_draws", "replace_torch_random", "restore_torch_random"]

_slot = thread_slot()
# Looked up once: entering and leaving is on the path of every task.
_get, _put = _slot.get, _slot.put

_CALLS_ANOTHER = frozenset("rand rand_like randint randint_like randn randn_like randperm".split())
"""Operators that have overloads without a generator, and call another operator to draw. (``native_dropout`` does so,
too, but on an accelerator it is in every layer and draws itself, so it has no kernel here.)"""


class OwnDraws:
    """A context in which this thread draws from the generators of this object. May be nested, also in itself."""

    __slots__ = ("_outer",)

    def __init__(self) -> None:
        self._outer: list[OwnDraws | None] = []

    def generator(self, device: torch.device) -> torch.Generator | None:
        """What draws on ``device``; ``None`` if its default generator is right there."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if DRAWS is not None and not _libraries:
            _register(DRAWS)
        self._outer.append(_get())
        _put(self)
        if DRAWS is not None:
            DRAWS.switch(True)
        return self

    def __exit__(self, *_: object) -> None:
        outer = self._outer.pop()
        if outer is None and DRAWS is not None:
            DRAWS.switch(False)
        _put(outer)


def own_draws() -> OwnDraws | None:
    """What this thread draws from, if not from the default generators."""
    found: OwnDraws | None = _get()
    return found


class _StandIn:
    """In ``torch.random``, the generator of the calling thread: its own one for a CPU, or torch's default generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_cpu_generator(own_draws()), name)


_lock = threading.Lock()
_stand_in = _StandIn()
_users = 0


def replace_torch_random() -> None:
    """From now on ``torch.random`` uses the calling thread's own generator, until ``restore_torch_random``."""
    global _users
    with _lock:
        _users += 1
        torch.random.__dict__["default_generator"] = _stand_in


def restore_torch_random() -> None:
    """Undo one ``replace_torch_random``; the last one puts torch's default generator back."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            torch.random.__dict__["default_generator"] = torch.default_generator


def _cpu_generator(draws: OwnDraws | None) -> torch.Generator:
    return (draws and draws.generator(torch.device("cpu"))) or torch.default_generator


_libraries: list[torch.library.Library] = []
"""What holds the kernels."""


def _register(key: DrawsKey) -> None:
    """Give the operators that draw their kernels for the key, once."""

    def kernel_for(name: str, arguments: Sequence[Any]) -> Callable[..., Any] | None:
        if any(argument.name == "generator" for argument in arguments):
            return _filling_in(key, [each.name for each in arguments if not each.kwarg_only])
        return _lending(key) if name in _CALLS_ANOTHER else None

    with _lock:
        if not _libraries:
            _libraries.extend(key.register(kernel_for))
            key.wrap_python_calls(torch.ops.aten.native_dropout.default, _lending_inside_python(key))


def _filling_in(key: DrawsKey, positional: list[str]) -> Callable[..., Any]:
    """The kernel for an operator with a generator."""
    place = positional.index("generator") if "generator" in positional else len(positional)

    def kernel(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("generator")
        draws = _get()
        if draws is not None and (given is None or is_default_generator(given)) and not key.is_tracing(keys):
            device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if device is not None and (own := draws.generator(device)) is not None:
                args, kwargs["generator"] = args[:place], own
        return key.redispatch(operator, keys, *args, **kwargs)

    return kernel


def _lending(key: DrawsKey) -> Callable[..., Any]:
    """The kernel for an operator without a generator that calls one with it, perhaps through Python code."""

    def kernel(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not key.runs_python(keys) or key.is_tracing(keys):
            return key.redispatch(operator, keys, *args, **kwargs)
        with _lent(_cpu_generator(own_draws())):
            return key.redispatch(operator, keys, *args, **kwargs)

    return kernel


def _lending_inside_python(key: DrawsKey) -> Callable[..., Any]:
    """The same for one without a kernel: around its call by a dispatch mode or ``__torch_dispatch__``."""

    def call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _get() is None or not key.is_off_in_python() or key.is_tracing():
            return operator(*args, **kwargs)
        with _lent(_cpu_generator(own_draws())):
            return operator(*args, **kwargs)

    return call


_lending_lock = threading.RLock()


@contextmanager
def _lent(own: torch.Generator) -> Iterator[None]:
    """The default generator draws what ``own`` would."""
    default = torch.default_generator
    if own is default:
        yield
        return
    with _lending_lock:
        outside = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(outside)
