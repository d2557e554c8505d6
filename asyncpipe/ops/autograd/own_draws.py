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

Nothing is registered until the first use. What stays then is a key without effect.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from asyncpipe.ops import DRAWS_KEY

__all__ = ["OwnDraws", "own_draws", "replace_torch_random", "restore_torch_random"]

_KEY = torch._C._dispatch_key_parse(DRAWS_KEY)
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_PYTHON = torch._C.DispatchKey.Python
_TRACING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_SLOT = "asyncpipe: own draws"

_CALLS_ANOTHER = frozenset("native_dropout rand rand_like randint randint_like randn randn_like randperm".split())
"""Operators that have overloads without a generator, and call another operator to draw."""


def _balanced(put: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """``put``, taking a reference for the slot. Up to torch 2.11 it takes none, but drops one when the slot changes."""
    take = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

    def put_with_reference(slot: str, value: object) -> None:
        take(value)
        put(slot, value)

    probe = object()
    before = sys.getrefcount(probe)
    put_with_reference(_SLOT, probe)
    # Where torch takes its own reference, too, this probe is never freed.
    balanced = put if sys.getrefcount(probe) == before + 2 else put_with_reference
    balanced(_SLOT, None)
    return balanced


# Looked up once: entering and leaving is on the path of every task.
_get, _put = torch._C._get_obj_in_tls, _balanced(torch._C._stash_obj_in_tls)
_has = torch._C._is_key_in_tls
_remove: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)
_switch = torch._C._dispatch_tls_set_dispatch_key_included


def _empty_slot() -> None:
    # Not ``None`` in it, where torch can help it: a thread that ends drops what is there, for which it needs the
    # interpreter. That may be at its end, and the process would abort.
    if _remove is not None:
        _remove(_SLOT)
    else:
        _put(_SLOT, None)


class OwnDraws:
    """A context in which this thread draws from the generators of this object. May be nested, also in itself."""

    __slots__ = ("_outer",)

    def __init__(self) -> None:
        self._outer: list[OwnDraws | None] = []

    def generator(self, device: torch.device) -> torch.Generator | None:
        """What draws on ``device``; ``None`` if its default generator is right there."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if not _libraries:
            _register()
        self._outer.append(own_draws())
        _put(_SLOT, self)
        _switch(_KEY, True)
        return self

    def __exit__(self, *_: object) -> None:
        outer = self._outer.pop()
        if outer is None:
            _switch(_KEY, False)
            _empty_slot()
        else:
            _put(_SLOT, outer)


def own_draws() -> OwnDraws | None:
    """What this thread draws from, if not from the default generators."""
    found: OwnDraws | None = _get(_SLOT) if _has(_SLOT) else None
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


def _register() -> None:
    """Give the operators that draw their kernels for the key, once."""
    with _lock:
        if not _libraries:
            _libraries.extend(_make_libraries())


def _make_libraries() -> list[torch.library.Library]:
    library_of: Any = torch.library.Library
    others = library_of("_", "IMPL", DRAWS_KEY)
    others.fallback(torch.library.fallthrough_kernel)
    # Higher-order operators (torch.cond) do not know the dispatcher's fallbacks.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    for higher in torch._ops._higher_order_ops.values():
        higher.fallthrough(_KEY)  # type: ignore[no-untyped-call]
    library = library_of("aten", "IMPL", DRAWS_KEY)
    known = set(torch._C._dispatch_get_all_op_names())
    for schema in torch._C._jit_get_all_schemas():
        full_name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or full_name not in known or _is_composite(full_name):
            continue
        make = _filling_in if any(a.name == "generator" for a in schema.arguments) else _lending
        if make is _filling_in or name in _CALLS_ANOTHER:
            operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
            library.impl(operator, make(operator), with_keyset=True)
    return [others, library]


def _is_composite(name: str) -> bool:
    """Whether an operator always consists of others, so that the key sees those."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return found


def _filling_in(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel for an operator with a generator."""
    positional = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    place = positional.index("generator") if "generator" in positional else len(positional)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("generator")
        draws = own_draws()
        if draws is not None and (given is None or _is_default(given)) and not _is_tracing(keys):
            device = next((v.device for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            own = device and draws.generator(device)
            if own is not None:
                args, kwargs = args[:place], {**kwargs, "generator": own}
        return operator.redispatch(keys & _BELOW, *args, **kwargs)

    return kernel


def _is_default(generator: Any) -> bool:
    # The dispatcher makes another Python object of it.
    return bool(generator._cdata == torch.default_generator._cdata)  # type: ignore[attr-defined]


def _lending(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel for an operator without a generator that calls one with it, perhaps through Python code."""

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        own = _cpu_generator(own_draws())
        if own is torch.default_generator or not keys.has(_PYTHON) or _is_tracing(keys):
            return operator.redispatch(keys & _BELOW, *args, **kwargs)
        with _lent(own):
            return operator.redispatch(keys & _BELOW, *args, **kwargs)

    return kernel


_lending_lock = threading.RLock()


@contextmanager
def _lent(own: torch.Generator) -> Iterator[None]:
    """The default generator draws what ``own`` would."""
    default = torch.default_generator
    with _lending_lock:
        outside = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(outside)


def _is_tracing(keys: torch._C.DispatchKeySet) -> bool:
    """Whether the operator is not computed, but recorded: a generator must not get into the recording."""
    return keys.has(_PYTHON) and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)
