"""The job's entry: finds the function that a job file names, which makes the workload."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, cast

from asyncpipe.errors import OptionError
from asyncpipe.train.import_path import import_path
from asyncpipe.train.job_file import Job, blaming_key, job_file_error
from asyncpipe.train.workload import Workload

__all__ = ["find_entry", "named_function"]


def find_entry(job: Job) -> Callable[[], Workload]:
    """A function that makes the job's workload: the entry, called with the job's parameters.

    Imports the entry's module, which runs its code. Raises ``JobFileError`` if the module cannot be imported, has no
    such function, or the function does not take these parameters. The returned function raises it if the entry raises
    ``OptionError``, with which an entry rejects the value of a parameter, or returns something other than a
    ``Workload``. Other errors of the entry are not changed.
    """
    with blaming_key(job, "job.entry"), import_path(job.path.resolve().parent):
        function = named_function(job.job.entry)
    if problems := list(_wrong_parameters(function, job.job.parameters)):
        raise job_file_error(job.path, *problems)

    def make() -> Workload:
        with blaming_key(job, "job.parameters"):
            made = function(**job.job.parameters)
        if isinstance(made, Workload):
            return made
        raise job_file_error(job.path, f"job.entry: {job.job.entry} must return a Workload, not {type(made).__name__}")

    return make


def named_function(name: str) -> Callable[..., Any]:
    """The function that ``name`` (``module:function``) means. Imports its module, which runs its code.

    Raises ``OptionError``.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # The module's code may raise anything; parsing a command line exits.
        problem = f"module {module_name!r} could not be imported: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            problem = f"there is no module {error.name!r} on sys.path or next to the job file"
        raise OptionError(problem) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", None) or "a built-in module"
        raise OptionError(f"module {module_name!r} ({where}) has no function {function_name!r}")
    return cast("Callable[..., Any]", function)


def _wrong_parameters(function: Callable[..., object], given: dict[str, Any]) -> Iterator[str]:
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in sorted(given.keys() - named.keys()):
            known = ", ".join(named) or "none"
            yield f"job.parameters.{name}: unknown parameter; the entry takes: {known}"
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given:
            yield f"job.parameters.{name}: missing; the entry has no default for it"
