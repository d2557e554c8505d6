"""Skip connections: a layer of a sequence passes a tensor directly to a later layer.

A sequence passes one value from layer to layer, so a U-shaped network would carry every skip through every layer, and
in a pipeline through every stage. With skips, a layer stashes a tensor under a name, and a later layer pops it::

    Down ──▶ Middle ──▶ Up        Down:  yield stash("a", x)
      └────── "a" ──────▲         Up:    a = yield pop("a")

    @skippable(stash=["a"])                    @skippable(pop=["a"])
    class Down(nn.Module):                     class Up(nn.Module):
        def forward(self, x):                      def forward(self, x):
            yield stash("a", x)                        a = yield pop("a")
            return self.conv(x)                        return self.conv(x) + a

The names are declared on the class, so the stages between which skips travel are known before anything runs
(``skip_layout.py``). Who runs the layers chooses the store that keeps the tensors (``use_skips``). Without a pipeline
it is a store of the thread, so the model also works alone. Tensors are neither detached nor copied.

The decorator changes a class in place: its modules can still be pickled and copied, and their state dicts keep their
names. It replaces ``forward`` by a function that runs the generator and returns its value, so hooks and
``super().forward(x)`` get values too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast
from uuid import UUID, uuid4

from torch import Tensor, nn

from asyncpipe.errors import ArgumentTypeError, OptionError, SkipError

__all__ = [
    "Namespace",
    "SkipKey",
    "SkipStore",
    "Skippable",
    "describe_skip",
    "pop",
    "skippable",
    "stash",
    "use_skips",
]

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound="Skippable")


@dataclass(frozen=True, slots=True, eq=False)
class stash:
    """A command that a forward yields to store ``tensor`` (or None) as ``name``. The ``yield`` returns None."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:
    """A command that a forward yields to take what was stashed as ``name``. The ``yield`` returns it."""

    name: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """Keeps skips of the same name apart: only layers that share a namespace see each other's skips.

    Two namespaces differ, but one equals its copies, pickled ones too: a copied layer shares skips with the others.
    """

    id: UUID = field(default_factory=uuid4, init=False)
    """Equal in copies."""


SkipKey = tuple[Namespace | None, str]
"""What identifies a skip in a model: its namespace (None where the layer is not isolated) and its name."""


class SkipStore:
    """The skips of one run of some layers: those that earlier layers stashed, and those for later layers.

    For one thread at a time.
    """

    def __init__(self, incoming: Mapping[SkipKey, Tensor | None] | None = None) -> None:
        self.incoming: dict[SkipKey, Tensor | None] = dict(incoming or {})
        """What earlier layers stashed. A pop does not remove it."""
        self.outgoing: dict[SkipKey, Tensor | None] = {}
        """What these layers stashed and did not pop."""
        self._taken: set[SkipKey] = set()

    def stash(self, key: SkipKey, tensor: Tensor | None) -> None:
        """Store ``tensor`` under ``key``. Raises ``SkipError`` if one is stored there that was not popped."""
        if key in self.outgoing:
            raise SkipError(
                f"{describe_skip(key)} is stashed again before it was popped; pop it first, or isolate one of them"
            )
        self.outgoing[key] = tensor

    def pop(self, key: SkipKey) -> Tensor | None:
        """What these or earlier layers stashed under ``key``. Raises ``SkipError`` if nothing, or if popped before."""
        if key in self.outgoing:
            return self.outgoing.pop(key)
        if key in self._taken:
            raise SkipError(
                f"{describe_skip(key)} is popped a second time; stash it under one name for each layer that pops"
            )
        if key not in self.incoming:
            raise SkipError(f"{describe_skip(key)} is popped, but no layer before has stashed it")
        self._taken.add(key)
        return self.incoming[key]


class _ThreadStore(SkipStore):
    """A thread's own store. A stash may replace another one, which a failed forward can have left."""

    def stash(self, key: SkipKey, tensor: Tensor | None) -> None:
        self.outgoing[key] = tensor


class _ThreadState(threading.local):
    """What each thread has: the store in use, and the forward that is running."""

    def __init__(self) -> None:
        self.store: SkipStore = _ThreadStore()
        self.call: _SkippableForward | None = None


_local = _ThreadState()


@contextmanager
def use_skips(store: SkipStore) -> Iterator[SkipStore]:
    """Inside, the stashes and pops of this thread use ``store``."""
    before = _local.store
    _local.store = store
    try:
        yield store
    finally:
        _local.store = before


class Skippable:
    """The base class that ``skippable`` adds to the classes that it decorates.

    Name it as a base yourself, after ``nn.Module``, only if a type checker should know ``isolate``.
    """

    skip_stashes: ClassVar[tuple[str, ...]] = ()
    """The names that ``forward`` stashes."""
    skip_pops: ClassVar[tuple[str, ...]] = ()
    """The names that ``forward`` pops."""
    skip_namespaces: Mapping[str, Namespace] = MappingProxyType({})
    """By name, for the names that are isolated in this module."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _drive_forward(cls)

    def isolate(self: S, namespace: Namespace, *, only: Iterable[str] | None = None) -> S:
        """Put the skips of this module (all, or those named in ``only``) into ``namespace``; returns the module.

        Layers see only the skips of their own namespace, so a block with skips can be used twice in one model. Raises
        ``OptionError`` for a name that the class does not declare.
        """
        if not isinstance(namespace, Namespace):
            raise OptionError(f"a skip is isolated in a Namespace(), got {namespace!r}")
        declared = [*dict.fromkeys((*self.skip_stashes, *self.skip_pops))]
        names = declared if only is None else _names(only, "only")
        if unknown := [name for name in names if name not in declared]:
            raise OptionError(f"{type(self).__name__} cannot isolate {unknown}; the names that it declares: {declared}")
        self.skip_namespaces = {**self.skip_namespaces, **dict.fromkeys(names, namespace)}
        return self

    def skip_key(self, name: str) -> SkipKey:
        """The key of this module's skip ``name``."""
        return self.skip_namespaces.get(name), name


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """A decorator for the class of a module whose forward yields ``stash`` and ``pop`` commands with these names.

    The class is changed in place: ``Skippable`` becomes one of its bases, which adds ``isolate``, and its ``forward``
    returns the value of the generator. A forward that does not use every name exactly once raises ``SkipError``.

    A subclass has the same names, unless it is decorated itself with other names. It may override ``forward`` with a
    generator or an ordinary function. In that, ``super().forward(x)`` returns a value (so ``yield from`` is wrong), and
    the names that it uses count as used.
    """
    stashes, pops = _names(stash, "stash"), _names(pop, "pop")

    def decorate(cls: type[M]) -> type[M]:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ArgumentTypeError(f"@skippable decorates a subclass of nn.Module, got {cls!r}")
        if not issubclass(cls, Skippable):
            # Not a derived class of the same name: super(Name, self).__init__() in its methods would call itself.
            cls.__bases__ = (*cls.__bases__, Skippable)
        marked = cast("type[Skippable]", cls)
        marked.skip_stashes, marked.skip_pops = stashes, pops
        _drive_forward(marked)
        return cls

    return decorate


def _names(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Each name once, in the order given."""
    listed = tuple(dict.fromkeys(names))
    if isinstance(names, str) or not all(isinstance(name, str) for name in listed):
        raise OptionError(f"{option} must be a list of names such as ['a'], got {names!r}")
    return listed


def describe_skip(key: SkipKey) -> str:
    """What error messages call a skip."""
    namespace, name = key
    return f"skip {name!r}" if namespace is None else f"skip {name!r} in {namespace!r}"


# Running a forward

_DRIVES = "__drives_skips__"


def _drive_forward(cls: type[Any]) -> None:
    """Replace ``cls.forward``, own or inherited, by one that runs the generator which it may return."""
    written = cls.forward
    if getattr(written, _DRIVES, None) is written:
        return

    @functools.wraps(written)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = _local.call
        if outer is not None and outer.module is self and outer.written is not written:
            # super().forward() of an overriding class: its commands belong to the forward that runs already. (The same
            # function again would be a module that calls itself.)
            return outer.value_of(written(self, *args, **kwargs))
        call = _local.call = _SkippableForward(self, written)
        try:
            value = call.value_of(written(self, *args, **kwargs))
        finally:
            _local.call = outer
        call.check_all_used()
        return value

    # The mark is the function itself, because a wrapper (functools.wraps) copies the attribute but is another function.
    forward.__dict__[_DRIVES] = forward
    cls.forward = forward


class _SkippableForward:
    """One forward of one module: executes the commands that it yields, and knows which names it has used."""

    __slots__ = ("_class", "_popped", "_stashed", "module", "written")

    def __init__(self, module: Skippable, written: Callable[..., Any]) -> None:
        self.module = module
        self.written = written
        self._class = type(module).__name__
        self._stashed: set[str] = set()
        self._popped: set[str] = set()

    def value_of(self, output: Any) -> Any:
        """``output``, or if it is a generator, its return value. Errors are raised inside it, at the ``yield``."""
        if not isinstance(output, Generator):
            return output
        resume: Callable[[Any], Any] = output.send
        answer: Any = None
        try:
            while True:
                command = resume(answer)
                try:
                    resume, answer = output.send, self._answer(command)
                except (SkipError, TypeError) as error:
                    resume, answer = output.throw, type(error)(f"in the forward of {self._class}: {error}")
        except StopIteration as stop:
            # Not ``stop.value``, which torch's compiler does not follow.
            return stop.args[0] if stop.args else None

    def _answer(self, command: object) -> Tensor | None:
        if isinstance(command, stash):
            key = self._use("stash", command.name, self.module.skip_stashes, self._stashed)
            _local.store.stash(key, command.tensor)
            return None
        if isinstance(command, pop):
            return _local.store.pop(self._use("pop", command.name, self.module.skip_pops, self._popped))
        right = "yield stash(name, tensor) or pop(name), and call super().forward(...) without 'yield from'"
        raise ArgumentTypeError(f"yielded a value of type {type(command).__name__}; {right}")

    def _use(self, verb: str, name: str, declared: Sequence[str], used: set[str]) -> SkipKey:
        if name not in declared:
            stashes, pops = list(self.module.skip_stashes), list(self.module.skip_pops)
            raise SkipError(f"{verb}({name!r}) is not declared; the class has @skippable(stash={stashes}, pop={pops})")
        if name in used:
            raise SkipError(f"{verb}({name!r}) was yielded twice; use a name for each tensor")
        used.add(name)
        return self.module.skip_key(name)

    def check_all_used(self) -> None:
        """Raise ``SkipError`` if a declared name was not yielded."""
        unused = [f"stash({name!r})" for name in self.module.skip_stashes if name not in self._stashed]
        unused += [f"pop({name!r})" for name in self.module.skip_pops if name not in self._popped]
        if unused:
            raise SkipError(
                f"in the forward of {self._class}: {', '.join(unused)} is declared but was not yielded; "
                f"yield every declared name once, with None where there is no tensor"
            )
