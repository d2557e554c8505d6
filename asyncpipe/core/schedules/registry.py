"""Find a schedule by name, by entry point, as ``module:Class``, in a CSV file, or as an object.

A name may have options: ``eager-1f1b(cap=5)`` is ``EagerOneFOneB(cap=5)``.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import entry_points

from asyncpipe.core.checks import similar
from asyncpipe.core.schedules.csv_notation import read_schedule
from asyncpipe.core.schedules.protocol import HintedSchedule, OrderedSchedule, Schedule
from asyncpipe.errors import AsyncpipeError, OptionError, ScheduleError, UnknownScheduleError

__all__ = ["could_be_schedule", "find_schedule", "known_schedules"]

ENTRY_POINT_GROUP = "asyncpipe.schedules"

_PACKAGE = "asyncpipe.core.schedules"
BUILT_IN = {
    "gpipe": f"{_PACKAGE}.gpipe:GPipeSchedule",
    "1f1b": f"{_PACKAGE}.one_f_one_b:OneFOneB",
    "eager-1f1b": f"{_PACKAGE}.one_f_one_b:EagerOneFOneB",
    "interleaved": f"{_PACKAGE}.interleaved:Interleaved",
    "looped-bfs": f"{_PACKAGE}.interleaved:LoopedBreadthFirst",
    "interleaved-zb": f"{_PACKAGE}.zero_bubble:InterleavedZeroBubble",
    "zb-h1": f"{_PACKAGE}.zero_bubble:ZBH1",
    "zb-h2": f"{_PACKAGE}.zero_bubble:ZBH2",
    "zbv": f"{_PACKAGE}.v_shaped:ZeroBubbleV",
    "v-half": f"{_PACKAGE}.v_shaped:VHalf",
    "v-min": f"{_PACKAGE}.v_shaped:VMin",
    "dualpipev": f"{_PACKAGE}.dualpipev:DualPipeV",
    "hanayo": f"{_PACKAGE}.hanayo:Hanayo",
    "backward-first": f"{_PACKAGE}.backward_first:BackwardFirst",
}


def known_schedules() -> list[str]:
    """The names of the built-in schedules and of those of installed packages."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def could_be_schedule(name: str) -> bool:
    """Whether ``name`` is known or has the form of ``module:Class`` or ``csv:FILE``; nothing is imported or read."""
    bare = re.sub(r"\(.*\)$", "", name)
    return bare in known_schedules() or re.fullmatch(r"csv:.+|[A-Za-z_][\w.]*:[A-Za-z_]\w*", bare) is not None


def find_schedule(schedule: str | Schedule, *, order: str = "strict") -> Schedule:
    """The schedule of this name, or the instance itself; with ``order="hint"``, as a ``HintedSchedule``.

    A name is that of a built-in schedule, an entry point of the group ``asyncpipe.schedules`` (built-in names win),
    ``module:Class`` or ``csv:FILE``. All but the last may have integer options, as in ``name(cap=5)``.

    Raises ``UnknownScheduleError`` with the known names, ``ScheduleError`` if a plug-in cannot be loaded or is not a
    ``Schedule``, and ``OptionError`` for any other ``order``.
    """
    if order not in ("strict", "hint"):
        raise OptionError(f"order must be 'strict' or 'hint', got {order!r}")
    found = schedule if isinstance(schedule, Schedule) else _named(schedule)
    if order == "strict":
        return found
    if not isinstance(found, OrderedSchedule):
        raise ScheduleError(f"schedule {found.name!r} decides by a rule; only an ordered schedule can be a hint")
    return HintedSchedule(found)


def _named(name: object) -> Schedule:
    if not isinstance(name, str):
        raise ScheduleError(f"schedule must be a name or a Schedule instance, got {name!r}")
    if name.startswith("csv:"):
        return read_schedule(name.removeprefix("csv:"))
    called = re.fullmatch(r"([^()]+)\((.*)\)", name)
    options = {} if called is None else _options(name, called[2])
    bare = name if called is None else called[1]
    factory = _imported(BUILT_IN.get(bare, bare)) if bare in BUILT_IN or ":" in bare else _from_entry_point(bare)
    return _made(name, factory, options)


def _options(name: str, text: str) -> dict[str, int]:
    """The options in ``cap=5, waves=2``."""
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(-?\d+)\s*", item) for item in text.split(",") if item.strip()]
    if not all(pairs):
        raise ScheduleError(f"schedule {name!r}: options are integers by name, as in eager-1f1b(cap=5)")
    return {pair[1]: int(pair[2]) for pair in pairs if pair is not None}


def _made(name: str, factory: object, options: dict[str, int]) -> Schedule:
    """The schedule that ``factory`` is, or returns when it is called with ``options``."""
    if isinstance(factory, Schedule):
        return factory
    try:
        made = factory(**options)  # type: ignore[operator]
    except AsyncpipeError:
        raise
    except Exception as error:
        raise ScheduleError(f"schedule {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Schedule):
        raise ScheduleError(f"schedule {name!r} gives {made!r}, which is not a Schedule")
    return made


def _imported(path: str) -> object:
    """The object at ``module:attribute``."""
    module, _, attribute = path.partition(":")
    try:
        found: object = getattr(import_module(module), attribute)
    except Exception as error:
        raise UnknownScheduleError(
            f"schedule {path!r} cannot be imported: {type(error).__name__}: {error}; give module:Class, where the "
            "module is on Python's path"
        ) from error
    return found


def _from_entry_point(name: str) -> object:
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return entry.load()
        except Exception as error:
            raise ScheduleError(
                f"schedule {name!r}: its entry point {entry.value!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    known = known_schedules()
    raise UnknownScheduleError(
        f"unknown schedule {name!r}; {similar(name, known)}known schedules: {', '.join(known)}; "
        "or give module:Class or csv:FILE"
    )
