"""The specification of a job with other values, for a job that is retried or copied."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from asyncpipe.service.job_states import JobRecord, JobSpec
from asyncpipe.service.settings.service_settings import ServiceSettings
from asyncpipe.service.submission.entries import Entries
from asyncpipe.service.submission.submission import SubmissionError, check_submission

__all__ = ["changed_spec"]


def changed_spec(
    record: JobRecord,
    changes: Mapping[str, Any],
    settings: ServiceSettings,
    entries: Entries,
    *,
    fixed: tuple[str, ...],
) -> JobSpec:
    """The specification of ``record`` with ``changes``, by dotted keys as ``training.learning_rate``; checked as new.

    A value of ``None`` brings a key's default back. Raises ``SubmissionError`` that names every wrong key, also the
    ``fixed`` ones, which cannot be changed.
    """
    spec = record.spec
    document: dict[str, Any] = deepcopy(dict(spec.document))
    document |= {"name": spec.name, "entry": spec.entry, "weight": spec.weight, "tags": list(spec.tags)}
    document |= {"priority_class": str(spec.priority_class), "deadline": spec.deadline}
    problems = [(key, "cannot be changed here; submit a new job") for key in changes if key.split(".")[0] in fixed]
    for key, value in changes.items():
        if not _set(document, key, value):
            problems.append((key[:100], "must be the key of a value, as training.learning_rate"))
    if problems:
        raise SubmissionError(problems)
    return check_submission(document, settings, entries)


def _set(table: dict[str, Any], key: str, value: Any) -> bool:
    *path, last = key.split(".")
    for name in path:
        following = table.setdefault(name, {})
        if not isinstance(following, dict):
            return False
        table = following
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value
    return bool(last)
