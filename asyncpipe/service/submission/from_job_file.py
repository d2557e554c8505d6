"""From a job file, as ``asyncpipe train`` takes it, to what a client submits to a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncpipe.train.job_file import load_job

__all__ = ["read_submission"]

SERVICE_HAS = {"folder", "resume"}
"""Of ``[snapshots]``: a service has a folder for each job, and always goes on from what is in it."""


def read_submission(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What to submit for the job file at ``path``, as JSON has it, and the keys in it that do not apply to a service.

    Says only what the file says, so that the service's defaults apply to the rest. Raises ``JobFileError``.
    """
    job = load_job(path)
    tables = job.model_dump(mode="json", exclude_unset=True)
    ignored = [f"observe.{key}" for key in tables.pop("observe", {})]
    snapshots = tables.pop("snapshots", None) or {}
    ignored += [f"snapshots.{key}" for key in snapshots if key in SERVICE_HAS]
    submission = {"name": tables.pop("name"), **tables.pop("job"), **tables}
    chosen = {key: value for key, value in snapshots.items() if key not in SERVICE_HAS}
    return ({**submission, "snapshots": chosen} if chosen else submission), ignored
