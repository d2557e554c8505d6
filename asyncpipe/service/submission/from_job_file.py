"""Converts a job file, as ``asyncpipe train`` reads it, into a submission for a service."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncpipe.core.checks import similar
from asyncpipe.train.job_file import job_file_error, load_job_for_service

__all__ = ["read_submission"]

SET_BY_SERVICE = {"folder", "resume"}
"""Keys of ``[snapshots]`` that a service sets: it has a folder for each job, and always resumes."""


FOR_SERVICE = ("tags", "deadline", "priority_class", "weight", "priority", "memory", "code")
"""Keys of ``[service]``."""


def read_submission(path: Path, changes: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """The submission for the job file at ``path``, as JSON, and the keys of the file that a service ignores.

    ``changes`` are as for ``load_job``, also of ``[service]``: ``{"service.weight": 2}``.

    Keys that the file leaves out are left out, so that the service's defaults
    apply. Raises ``JobFileError``.
    """
    job, service, asked = load_job_for_service(path, changes)
    tables = job.model_dump(mode="json", exclude_unset=True)
    if asked is not None:
        tables["pipeline"]["devices"] = asked
    ignored = [f"observe.{key}" for key in tables.pop("observe", {})]
    here = [key for key in ("workers", "transport") if tables["pipeline"].pop(key, None) is not None]
    ignored += [f"pipeline.{key}" for key in here]
    snapshots = tables.pop("snapshots", None) or {}
    ignored += [f"snapshots.{key}" for key in snapshots if key in SET_BY_SERVICE]
    submission = {"name": tables.pop("name"), **tables.pop("job"), **tables}
    chosen = {key: value for key, value in snapshots.items() if key not in SET_BY_SERVICE}
    submission |= {"snapshots": chosen} if chosen else {}
    return {**submission, **_for_service(path, service)}, ignored


def _for_service(path: Path, table: Any) -> dict[str, Any]:
    allowed = f"[service] may have {', '.join(FOR_SERVICE)}"
    if not isinstance(table, dict):
        raise job_file_error(path, f"service: {allowed}")
    if unknown := [key for key in table if key not in FOR_SERVICE]:
        raise job_file_error(path, f"service.{unknown[0]}: {similar(unknown[0], FOR_SERVICE)}{allowed}")
    deadline = table.get("deadline")
    return table | ({"deadline": deadline.timestamp()} if isinstance(deadline, datetime) else {})
