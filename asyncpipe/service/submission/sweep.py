"""A sweep: one submission that becomes many jobs, a grid of values or a list of them.

::

    {"training.learning_rate": [1e-3, 3e-4], "parameters.width": [64, 128]}     a grid: every combination, 4 jobs
    [{"training.learning_rate": 1e-3, "parameters.width": 64}, {…}]             a list: one job for each

Keys are those of a submission, dotted or as nested tables; keys of job files (``job.parameters.width``) mean the same.
Each job has a name and tags that say its values, and all are in one group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from itertools import product
from math import prod
from secrets import token_hex
from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field, JsonValue

from asyncpipe.service.job_states import MAX_NAME, MAX_TAGS, is_tag
from asyncpipe.service.submission.submission import Submission, SubmissionError

__all__ = ["MOST_SWEPT", "SubmittedSweep", "SweepInput", "group_of", "swept"]

MOST_SWEPT = 1000
"""Jobs of one sweep."""
SweepInput: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""A grid, or a list."""

_RULE = "must be a table with a list of values for each key (a grid), or a list of tables (one for each job)"
_NOT_SWEPT = ("name", "group", "sweep")


class SubmittedSweep(Submission):
    """A job as a client submits it, and which of its keys have which values."""

    model_config = ConfigDict(title="Sweep")

    sweep: dict[str, JsonValue] | Annotated[list[dict[str, JsonValue]], Field(min_length=1, max_length=MOST_SWEPT)] = (
        Field(description="must be a table with a list of values for each key, or a list of tables, one for each job")
    )
    """Keys are dotted (``training.learning_rate``) or nested tables."""


def group_of(name: str, key: str | None) -> str:
    """The name of the group of a sweep: that of its submission, and an end that follows from the idempotency key."""
    end = token_hex(3) if key is None else sha256(key.encode()).hexdigest()[:6]
    return f"{name[: MAX_NAME - 7]}-{end}"


def swept(submission: Mapping[str, Any], sweep: SweepInput, group: str) -> list[dict[str, Any]]:
    """The submissions of ``sweep``, in its order. Raises ``SubmissionError``."""
    found = []
    for values in _cells(sweep):
        one: dict[str, Any] = deepcopy(dict(submission))
        for key, value in values.items():
            _put(one, key, value)
        said = [f"{key.rpartition('.')[2]}={_short(value)}" for key, value in values.items()]
        if isinstance(name := one.get("name"), str):
            one["name"] = f"{name} {', '.join(said)}"[:MAX_NAME].rstrip()
        if isinstance(tags := one.get("tags", []), list):
            one["tags"] = list(dict.fromkeys([*tags, *filter(is_tag, said)]))[:MAX_TAGS]
        one["group"] = submission.get("group") or group
        found.append(one)
    return found


def _cells(sweep: SweepInput) -> list[dict[str, Any]]:
    """The values of each job, by key."""
    if isinstance(sweep, Mapping):
        axes = dict(_flat(sweep))
        if not axes or not all(isinstance(values, list) and values for values in axes.values()):
            raise SubmissionError([("sweep", _RULE)])
        if prod(len(values) for values in axes.values()) <= MOST_SWEPT:
            return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    elif isinstance(sweep, Sequence) and sweep and all(isinstance(each, Mapping) and each for each in sweep):
        if len(sweep) <= MOST_SWEPT:
            return [dict(_flat(each)) for each in sweep]
    else:
        raise SubmissionError([("sweep", _RULE)])
    raise SubmissionError([("sweep", f"must be at most {MOST_SWEPT} jobs")])


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield re.sub(r"^job\.", "", f"{before}{key}"), value


def _put(submission: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    if (tables or [last])[0] in _NOT_SWEPT or not all([*tables, last]):
        raise SubmissionError([(f"sweep.{key}", "must be a key of a submission other than its name and group")])
    at = submission
    for table in tables:
        at = at.setdefault(table, {})
        if not isinstance(at, dict):
            raise SubmissionError([(f"sweep.{key}", f"must be a key of a submission, and {table} is no table")])
    at[last] = value


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
