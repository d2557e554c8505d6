"""Converts a job file, as ``asyncpipe train`` reads it, into a submission for a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncpipe.train.job_file import load_job

__all__ = ["read_submission"]

SET_BY_SERVICE = {"folder", "resume"}
"""Keys of ``[snapshots]`` that a service sets: it has a folder for each job, and always resumes."""


def read_submission(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The submission for the job file at ``path``, as JSON, and the keys of the file that a service ignores.

    Keys that the file leaves out are left out, so that the service's defaults apply. Raises ``JobFileError``.
    """
    job = load_job(path)
    tables = job.model_dump(mode="json", exclude_unset=True)
    ignored = [f"observe.{key}" for key in tables.pop("observe", {})]
    here = [key for key in ("workers", "transport") if tables["pipeline"].pop(key, None) is not None]
    ignored += [f"pipeline.{key}" for key in here]
    snapshots = tables.pop("snapshots", None) or {}
    ignored += [f"snapshots.{key}" for key in snapshots if key in SET_BY_SERVICE]
    submission = {"name": tables.pop("name"), **tables.pop("job"), **tables}
    chosen = {key: value for key, value in snapshots.items() if key not in SET_BY_SERVICE}
    return ({**submission, "snapshots": chosen} if chosen else submission), ignored
