"""Skip connections: a layer of a sequence hands a tensor to a later layer, past those in between.

A sequence passes one value from layer to layer, so a U-shaped network would carry every skip through every
layer, and in a pipeline through every stage. Here a layer says by name what it puts aside and what it takes::

    Down ──▶ Middle ──▶ Up        Down:  yield stash("a", x)
      └────── "a" ──────▲         Up:    a = yield pop("a")

    @skippable(stash=["a"])                    @skippable(pop=["a"])
    class Down(nn.Module):                     class Up(nn.Module):
        def forward(self, x):                      def forward(self, x):
            yield stash("a", x)                        a = yield pop("a")
            return self.conv(x)                        return self.conv(x) + a

The names are declared on the class, so that it is known before anything runs which stage sends a skip to which
(``skip_layout``). What runs a layer decides where the tensors are kept (``use_skips``); without a pipeline that
is a store of the thread, and the model works as it is. Tensors flow as they are: nothing is detached or copied.

A decorated class stays the class that it was, changed in place: its modules can be pickled and copied, and the
names in their state dicts do not change. Only ``forward`` is replaced, by one that drives the generator and
returns its value, so that hooks and ``super().forward(x)`` see values too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor, nn

from asyncpipe.errors import ArgumentTypeError, OptionError, SkipError, SkipLayoutError

__all__ = [
    "Namespace",
    "SkipKey",
    "SkipStore",
    "Skippable",
    "pop",
    "skip_layout",
    "skippable",
    "stash",
    "use_skips",
    "verify_skippables",
]

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound="Skippable")


@dataclass(frozen=True, slots=True, eq=False)
class stash:
    """What a forward yields to put ``tensor`` (or None) aside as ``name``; the ``yield`` gives None."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:
    """What a forward yields to take what was stashed as ``name``; the ``yield`` gives it."""

    name: str


class Namespace:
    """An identity that keeps skips of one name apart: layers that share it see each other's skips.

    Two namespaces are never equal. Layers that share one still do after their whole model was copied or pickled.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Namespace({id(self):#x})"


SkipKey = tuple[Namespace | None, str]
"""What names a skip in a model: its namespace, None where the layer was not isolated, and its name."""


class SkipStore:
    """Where the skips of one run of some layers are: what came in, and what they leave for others.

    Used by one thread at a time.
    """

    def __init__(self, incoming: Mapping[SkipKey, Tensor | None] | None = None) -> None:
        self.incoming: dict[SkipKey, Tensor | None] = dict(incoming or {})
        """What earlier layers stashed; it stays as it was given, popped or not."""
        self.outgoing: dict[SkipKey, Tensor | None] = {}
        """What was stashed and not popped here."""
        self._taken: set[SkipKey] = set()

    def stash(self, key: SkipKey, tensor: Tensor | None) -> None:
        """``tensor`` is outgoing under ``key``; ``SkipError`` if another one is that nobody popped."""
        if key in self.outgoing:
            raise SkipError(f"{_skip(key)} is stashed again before it was popped; pop it first, or isolate one of them")
        self.outgoing[key] = tensor

    def pop(self, key: SkipKey) -> Tensor | None:
        """What was stashed here under ``key``, else what came in; ``SkipError`` if neither or popped already."""
        if key in self.outgoing:
            return self.outgoing.pop(key)
        if key in self._taken:
            raise SkipError(f"{_skip(key)} is popped a second time; stash it under one name for each layer that pops")
        if key not in self.incoming:
            raise SkipError(f"{_skip(key)} is popped, but no layer before has stashed it")
        self._taken.add(key)
        return self.incoming[key]


class _ThreadStore(SkipStore):
    """A thread's own store. A forward that failed may have left skips in it, so that a new one replaces an old one."""

    def stash(self, key: SkipKey, tensor: Tensor | None) -> None:
        self.outgoing[key] = tensor


class _ThreadState(threading.local):
    """What each thread has: the store in use, and the forward that is being run."""

    def __init__(self) -> None:
        self.store: SkipStore = _ThreadStore()
        self.call: _SkippableForward | None = None


_local = _ThreadState()


@contextmanager
def use_skips(store: SkipStore) -> Iterator[SkipStore]:
    """``store`` serves this thread's stashes and pops inside; the former one does again afterwards."""
    before = _local.store
    _local.store = store
    try:
        yield store
    finally:
        _local.store = before


class Skippable:
    """A base that ``skippable`` gives the classes that it decorates, so that their modules are known by it.

    Name it as a base yourself, beside ``nn.Module``, only where a type checker should know ``isolate``.
    """

    skip_stashes: ClassVar[tuple[str, ...]] = ()
    skip_pops: ClassVar[tuple[str, ...]] = ()
    skip_namespaces: Mapping[str, Namespace] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _drive_forward(cls)

    def isolate(self: S, namespace: Namespace, *, only: Iterable[str] | None = None) -> S:
        """This module, whose skips (all, or those named in ``only``) are in ``namespace`` from now on.

        Layers see each other's skips only within one namespace, so that a block with skips can be used twice.
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


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """A decorator for a module's class whose forward yields ``stash`` and ``pop`` commands of these names.

    The class is changed in place: ``Skippable`` becomes a base of it, which adds ``isolate``, and its ``forward``
    returns the generator's value. Every forward must use every name once, else it raises ``SkipError``.

    A subclass has the same names unless it is decorated itself: its own names then replace them. It may override
    forward with a generator or an ordinary function, in which ``super().forward(x)`` returns a value (so there is
    no ``yield from``) and uses up the names that it stashes and pops.
    """
    stashes, pops = _names(stash, "stash"), _names(pop, "pop")

    def decorate(cls: type[M]) -> type[M]:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ArgumentTypeError(f"@skippable decorates a subclass of nn.Module, got {cls!r}")
        if not issubclass(cls, Skippable):
            # A class derived from this one would have to take its name, and then super(Name, self).__init__() in
            # its methods would call itself.
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


def _skip(key: SkipKey) -> str:
    namespace, name = key
    return f"skip {name!r}" if namespace is None else f"skip {name!r} in {namespace!r}"


# Running a forward

_DRIVES = "__drives_skips__"


def _drive_forward(cls: type[Any]) -> None:
    """Have ``cls.forward``, own or inherited, return the value of the generator that it may be."""
    written = cls.forward
    if getattr(written, _DRIVES, None) is written:
        return

    @functools.wraps(written)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = _local.call
        if outer is not None and outer.module is self and outer.written is not written:
            # super().forward() of an overriding class: the names belong to the one forward that runs. The same
            # function once more is no such call but a module that calls itself.
            return outer.value_of(written(self, *args, **kwargs))
        call = _local.call = _SkippableForward(self, written)
        try:
            value = call.value_of(written(self, *args, **kwargs))
        finally:
            _local.call = outer
        call.check_all_used()
        return value

    # Whoever wraps this function copies its attributes: only on the function itself does the mark hold.
    forward.__dict__[_DRIVES] = forward
    cls.forward = forward


class _SkippableForward:
    """One forward of one module: answers what it yields, and knows which declared names it has used."""

    __slots__ = ("_class", "_popped", "_stashed", "module", "written")

    def __init__(self, module: Skippable, written: Callable[..., Any]) -> None:
        self.module = module
        self.written = written
        self._class = type(module).__name__
        self._stashed: set[str] = set()
        self._popped: set[str] = set()

    def value_of(self, output: Any) -> Any:
        """``output``, or what it returns if it is a generator. Errors are raised where the generator yielded."""
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
            return stop.value

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
        return self.module.skip_namespaces.get(name), name

    def check_all_used(self) -> None:
        """``SkipError`` that names what is declared and was not yielded."""
        unused = [f"stash({name!r})" for name in self.module.skip_stashes if name not in self._stashed]
        unused += [f"pop({name!r})" for name in self.module.skip_pops if name not in self._popped]
        if unused:
            raise SkipError(
                f"in the forward of {self._class}: {', '.join(unused)} is declared but was not yielded; "
                f"yield every declared name once, with None where there is no tensor"
            )


# Matching stashes with pops


@dataclass(frozen=True, slots=True)
class _SkippableModule:
    """A module with skips: its number among them, its stage, what a message calls it, and its skips."""

    number: int
    stage: int
    label: str
    stashes: tuple[SkipKey, ...]
    pops: tuple[SkipKey, ...]


def verify_skippables(model: Iterable[nn.Module]) -> None:
    """Nothing, if every stash in ``model`` has exactly one pop after it; else ``SkipLayoutError`` with every mismatch.

    ``model`` is an ``nn.Sequential`` or any modules in the order in which they are called. Modules inside a layer
    count as called in the order of ``layer.modules()``. The message has one line for each mismatch, which calls
    a layer by its name, or by its position where it has none.
    """
    _matched(_places([model]))


def skip_layout(stages: Sequence[Iterable[nn.Module]]) -> dict[SkipKey, tuple[int, int]]:
    """For each skip, in the order of the stashes, the stage that stashes it and the stage that pops it.

    ``stages`` are the layers of each stage in call order; both stages are the same for a skip within a stage.
    ``SkipLayoutError`` as from ``verify_skippables`` for all layers together; positions are counted over all stages.
    """
    return {key: (source.stage, target.stage) for key, (source, target) in _matched(_places(stages)).items()}


def _places(stages: Sequence[Iterable[nn.Module]]) -> list[_SkippableModule]:
    """The modules with skips, in call order."""
    places: list[_SkippableModule] = []
    position = 0
    for stage, layers in enumerate(stages):
        for name, layer in _named(layers, position):
            position += 1
            if not isinstance(layer, nn.Module):
                raise ArgumentTypeError(f"layer {name} must be an nn.Module, got a {type(layer).__name__}")
            for path, module in layer.named_modules(prefix=name):
                if isinstance(module, Skippable):
                    label = f"layer {path} ({type(module).__name__})"
                    stashes, pops = _keys(module, module.skip_stashes), _keys(module, module.skip_pops)
                    places.append(_SkippableModule(len(places), stage, label, stashes, pops))
    return places


def _named(layers: Iterable[nn.Module], first: int) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        # Not named_children(), which leaves out a layer that is there twice.
        return zip(layers._modules, layers, strict=True)
    return ((str(position), layer) for position, layer in enumerate(layers, first))


def _keys(module: Skippable, names: Iterable[str]) -> tuple[SkipKey, ...]:
    return tuple((module.skip_namespaces.get(name), name) for name in names)


def _matched(places: Sequence[_SkippableModule]) -> dict[SkipKey, tuple[_SkippableModule, _SkippableModule]]:
    """Who stashes and who pops each skip, or ``SkipLayoutError``.

    The first stash of a skip and the first pop after it are a pair, so that a mistake does not make others.
    """
    sources: dict[SkipKey, _SkippableModule] = {}
    targets: dict[SkipKey, _SkippableModule] = {}
    wrong: list[tuple[int, str]] = []
    for place in places:
        for key in place.pops:
            if key in place.stashes:
                wrong.append((place.number, f"{place.label} both stashes and pops {_skip(key)}"))
            elif key not in sources:
                wrong.append((place.number, f"{place.label} pops {_skip(key)}, which no layer before it stashes"))
            elif targets.setdefault(key, place) is not place:
                wrong.append((place.number, f"{place.label} pops {_skip(key)}, as {targets[key].label} does"))
        for key in place.stashes:
            if key in place.pops:
                continue
            if sources.setdefault(key, place) is not place:
                wrong.append((place.number, f"{place.label} stashes {_skip(key)}, as {sources[key].label} does"))
    for key, place in sources.items():
        if key not in targets:
            wrong.append((place.number, f"{place.label} stashes {_skip(key)}, which no layer after it pops"))
    if wrong:
        lines = "".join(f"\n  {line}" for _, line in sorted(wrong, key=lambda entry: entry[0]))
        raise SkipLayoutError(
            f"stashes and pops do not match:{lines}\nEvery skip needs one stash and one pop in a later layer; where a "
            f"name is used by several pairs, give each pair its own with isolate(Namespace())."
        )
    return {key: (source, targets[key]) for key, source in sources.items()}
