"""The output of a process, taken as a job's or as that of a service with jobs on threads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asyncpipe.service.jobs.isolation.job_output import JobOutput
from asyncpipe.service.jobs.run_log import Saying

__all__ = ["taken"]


@contextmanager
def taken(saying: Saying | None) -> Iterator[None]:
    """The standard streams and the root logger are a job's."""
    root, streams = logging.getLogger(), (sys.stdout, sys.stderr)
    handlers, root.handlers[:] = root.handlers[:], []
    output = JobOutput(saying)
    try:
        yield
        output.end()
    finally:
        sys.stdout, sys.stderr = streams
        root.handlers[:] = handlers
