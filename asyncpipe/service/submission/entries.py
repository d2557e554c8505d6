"""The entries that jobs may name: the operator's factories, and the parameters that clients may give to each.

::

    settings.entries ── imported once, at the start ──▶ factory ── its signature ──▶ a pydantic model of its parameters
                                                                                        │
    a client's parameters (JSON) ──────── validate: strict, no unknown keys ────────────┘
                                                │
                                                ▼
                                  make ──▶ factory(**fixed, **parameters) ──▶ Workload

Clients may give a parameter if JSON can express it (numbers, texts, lists, tables, ``Literal``, ``Enum``) and it is not
a path. A text must not look like a path that leads elsewhere or a URL, and must have no control characters.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NotRequired, Required, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict  # Pydantic reads typing's own from Python 3.12 on.

from asyncpipe.core.checks import similar
from asyncpipe.errors import OptionError
from asyncpipe.service.settings.service_settings import ServiceSettings, SettingsError
from asyncpipe.service.submission.entry_code import EntryCode, changed_files
from asyncpipe.service.submission.parameter_rules import can_be_given, unsafe_values
from asyncpipe.train.entry import named_function
from asyncpipe.train.import_path import import_path
from asyncpipe.train.validation import WrongKey, adapter_wrong_keys
from asyncpipe.train.workload import Workload

__all__ = ["Entries", "EntryError", "Factory"]

_T = TypeVar("_T")

Factory = Callable[..., Workload]
"""The function that an entry names."""


class EntryError(OptionError):
    """An entry cannot make a workload from these parameters; the message says why."""


class Entries:
    """The registered factories by name. Immutable; any thread may use it.

    ``factories`` are functions whose parameters can be given by keyword; ``fixed`` has the arguments that the operator
    sets, by entry. Raises ``SettingsError`` with a line for each entry that cannot be used.
    """

    def __init__(
        self, factories: Mapping[str, Factory], fixed: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    ) -> None:
        self.is_fresh = False
        """Whether each job imports its entry anew, in a process of its own."""
        there = {name: sys.modules[module] for name in factories if (module := name.partition(":")[0]) in sys.modules}
        self._code = {name: EntryCode(each) for name, each in there.items() if getattr(each, "__file__", None)}
        self._entries = _for_each(factories, lambda name: _RegisteredEntry(name, factories[name], fixed.get(name, {})))

    @classmethod
    def load(cls, settings: ServiceSettings) -> Entries:
        """Import the modules of ``settings.entries``, which runs their code. Blocks.

        ``settings.entry_path`` is the first item of ``sys.path`` during the imports only. Raises ``SettingsError``.
        """
        with nullcontext() if settings.entry_path is None else import_path(settings.entry_path.resolve()):
            factories = _for_each(settings.entries, _imported)
        entries = cls(factories, {name: entry.fixed for name, entry in settings.entries.items()})
        entries.is_fresh = settings.is_isolated
        return entries

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def schema(self, entry: str) -> dict[str, Any]:
        """The JSON schema of the parameters that clients may give. Raises ``EntryError`` for an unknown entry."""
        return self._find(entry).schema()

    def validate(self, entry: str, parameters: Mapping[str, Any]) -> list[WrongKey]:
        """The wrong keys of ``parameters``. Raises ``EntryError`` for an unknown entry."""
        return self._find(entry).read(parameters)[1]

    def code(self, entry: str) -> str | None:
        """The content of the code that a job of ``entry`` runs if it begins now, as ``EntryCode`` has it. Blocks.

        ``None`` for an unknown entry, and where the module of an entry has no file.
        """
        code = self._code.get(entry)
        return None if code is None else code.now() if self.is_fresh else code.imported

    def changed(self, entry: str, before: str | None, since: str = "it") -> str:
        """A sentence if the code of ``entry`` is not that of ``before``, as ``code`` has it; else nothing. Blocks."""
        names = changed_files(before, self.code(entry))
        return f"its entry has changed since {since} was submitted: {', '.join(names)}" if names else ""

    def make(self, entry: str, parameters: Mapping[str, Any]) -> Callable[[], Workload]:
        """A function that makes the workload, which may take long. Raises ``EntryError`` for wrong parameters.

        It can be pickled if the factory is a function of a module. It raises ``EntryError`` if the factory raises
        ``OptionError``, to reject a value, or does not return a ``Workload``. Other errors of the factory pass through.
        """
        found = self._find(entry)
        arguments, problems = found.read(parameters)
        if problems:
            raise EntryError(f"entry {entry}: {'; '.join(map(str, problems))}")
        return _Make(entry, found.factory, arguments)

    def _find(self, entry: str) -> _RegisteredEntry:
        try:
            return self._entries[entry]
        except KeyError:
            raise EntryError(f"entry {entry!r:.100} is not registered; {', '.join(self.names)} are") from None


@dataclass(frozen=True, slots=True)
class _Make:
    """Makes a workload, here or in another process."""

    entry: str
    factory: Factory
    arguments: Mapping[str, Any]

    def __call__(self) -> Workload:
        try:
            made: object = self.factory(**self.arguments)
        except OptionError as error:
            raise EntryError(f"entry {self.entry}: parameters: {error}") from error
        if isinstance(made, Workload):
            return made
        raise EntryError(f"entry {self.entry} must return a Workload, not {type(made).__name__}")


class _RegisteredEntry:
    """One factory, with the model of the parameters that clients may give."""

    def __init__(self, name: str, factory: Factory, fixed: Mapping[str, Any]) -> None:
        self._name = name
        self.factory = factory
        self._parameters = dict(_named_parameters(name, factory))
        hints = _hints(name, factory)
        self._fixed = self._read_fixed(fixed, hints)
        self._open = {
            key: hints.get(key, _UNANNOTATED)
            for key in self._parameters
            if key not in fixed and can_be_given(hints.get(key, _UNANNOTATED))
        }
        for key, parameter in self._parameters.items():
            if parameter.default is parameter.empty and key not in self._open and key not in fixed:
                raise self._unusable(f"clients cannot give parameter {key!r}, which has no default: set it in fixed")
        self._model = self._make_model()

    def _make_model(self) -> TypeAdapter[dict[str, Any]]:
        """The model of the open parameters: a ``TypedDict``, since a pydantic model forbids some field names."""
        fields = {
            key: (Required if self._parameters[key].default is inspect.Parameter.empty else NotRequired)[hint]
            for key, hint in self._open.items()
        }
        make_table: Any = TypedDict
        table = make_table(self._name.partition(":")[2], fields)
        table.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        try:
            return TypeAdapter(table)
        except (PydanticUserError, TypeError) as error:
            raise self._unusable(f"its annotations cannot be validated: {error}") from error

    def _read_fixed(self, fixed: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
        """The operator's arguments, converted as the annotations say: a text becomes a ``Path`` if one is expected."""
        read: dict[str, Any] = {}
        for key, value in fixed.items():
            if key not in self._parameters:
                raise self._unusable(f"fixed.{key}: {similar(key, self._parameters)}it takes {self._listed()}")
            try:
                adapter = TypeAdapter[Any](hints.get(key, Any))
            except PydanticUserError:
                read[key] = value  # A type that pydantic does not know.
                continue
            try:
                read[key] = adapter.validate_python(value)
            except ValidationError as error:
                problem = adapter_wrong_keys(error, f"fixed.{key}", value)[0]
                raise self._unusable(str(problem)) from None
        return read

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the open parameters, with the factory's docstring and defaults that JSON can express."""
        schema = self._model.json_schema()
        schema["description"] = inspect.getdoc(self.factory) or ""
        for key, described in schema.get("properties", {}).items():
            default = self._parameters[key].default
            if default is None or isinstance(default, str | int | float | bool):
                described["default"] = default
        return schema

    def read(self, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[WrongKey]]:
        """The factory's arguments; or nothing, and the wrong keys."""
        unknown = [self._refused(key) for key in parameters if key not in self._open][:10]
        if unknown:
            return {}, unknown
        if unsafe := list(unsafe_values("parameters", parameters)):
            return {}, unsafe
        try:
            # As JSON text, where a list may become a tuple or a set, and a text a member of an enum.
            text = json.dumps(dict(parameters), allow_nan=False)
            arguments = self._model.validate_json(text)
        except ValidationError as error:
            return {}, adapter_wrong_keys(error, "parameters", parameters)
        except (ValueError, TypeError, RecursionError):
            return {}, [WrongKey("parameters", "must be JSON, with finite numbers")]
        return {**arguments, **self._fixed}, []

    def _refused(self, key: str) -> WrongKey:
        place = f"parameters.{key[:60].encode('ascii', 'backslashreplace').decode()}"
        if key in self._parameters:
            return WrongKey(place, "is set by the operator of the service; leave it out")
        return WrongKey(place, f"unknown parameter; {similar(key, self._open)}the entry takes: {self._listed()}")

    def _listed(self) -> str:
        return ", ".join(getattr(self, "_open", self._parameters)) or "none"

    def _unusable(self, problem: str) -> SettingsError:
        return SettingsError(f"entries.{self._name}: {problem}")


_UNANNOTATED = bool | int | float | str | None


def _for_each(names: Iterable[str], make: Callable[[str], _T]) -> dict[str, _T]:
    """What ``make`` returns for each name. Raises ``SettingsError`` with a line for each name that it refuses."""
    made: dict[str, _T] = {}
    problems: list[str] = []
    for name in names:
        try:
            made[name] = make(name)
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    return made


def _imported(name: str) -> Factory:
    try:
        return named_function(name)
    except OptionError as error:
        raise SettingsError(f"entries.{name}: {error}") from error


def _named_parameters(name: str, factory: Factory) -> Iterator[tuple[str, inspect.Parameter]]:
    """The parameters that can be given by keyword."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise SettingsError(f"entries.{name}: its signature cannot be read: {error}") from error
    for key, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise SettingsError(f"entries.{name}: parameter {key!r} cannot be given by keyword, as all must be")
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield key, parameter


def _hints(name: str, factory: Factory) -> dict[str, Any]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    if not hasattr(target, "__annotations__") and callable(target):
        target = type(target).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except Exception as error:  # Evaluating annotations runs code.
        problem = f"its annotations cannot be read: {type(error).__name__}: {error}"
        raise SettingsError(f"entries.{name}: {problem}") from error
