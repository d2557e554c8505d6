"""How many file descriptors a service needs, and the process's limit on them, which is raised to that where it may be.

A process that is out of descriptors cannot take a snapshot, write its store or even answer a probe. So connections,
which clients open as they like, get what is left when everything else has its part: the connections of the API are
capped below the limit, and a flood of them takes nothing away from a job. ::

    |◀──────────────────────────── limit ────────────────────────────▶|
    | service | jobs | workers | metrics | probes | being turned away | connections of the API |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.service.settings.service_settings import ServiceSettings

__all__ = ["PROBES", "DescriptorBudget", "budget_descriptors", "raise_limit"]

SERVICE = 64
"""The store, logs, event loops, listening sockets, and modules while they are imported; 24 are open when it rests."""
JOB = 32
"""Of a running job: its log, its losses, a snapshot that is written while another is read, its data; 6 are usual."""
WORKER = 16
"""Of a worker process, or of a job's own: pipes, its connection, shared memory."""
PROBES = 32
"""Connections beyond the cap that are kept for a moment, since they may be a probe's."""
CLOSING = 128
"""Connections that have been turned away, and are not closed yet."""
CONNECTION = 2
"""Its socket, and the file that it reads from: a job's log, or a model that is downloaded."""
METRICS = 16
"""Of the metrics' server: a connection for each scrape that is under way."""
FEWEST = 16
"""With fewer connections than this a service is of no use."""


@dataclass(frozen=True)
class DescriptorBudget:
    """Who may have how many of the process's descriptors."""

    limit: int
    service: int
    jobs: int
    workers: int
    metrics: int
    probes: int
    connections: int

    def __str__(self) -> str:
        parts = {
            f"{self.connections} connections": CONNECTION * self.connections,
            "jobs": self.jobs,
            "workers": self.workers,
            "metrics": self.metrics,
            "probes and refusals": self.probes,
            "the service itself": self.service,
        }
        return f"{self.limit} descriptors: " + ", ".join(f"{count} for {who}" for who, count in parts.items() if count)


def budget_descriptors(settings: ServiceSettings, limit: int | None) -> DescriptorBudget:
    """The budget of a service with ``settings``, whose process may have ``limit`` descriptors; ``None`` is any number.

    Without room for all connections there are fewer, unless the operator has set ``max_connections``: then, and where
    nothing useful is left, this raises ``OptionError``, which says what would do.
    """
    jobs = (JOB + (WORKER if settings.is_isolated else 0)) * settings.max_running
    workers = 0 if settings.workers == "threads" else WORKER * len(settings.devices)
    metrics = 0 if settings.metrics_port is None else METRICS
    probes = PROBES * (1 if settings.probe_port is None else 2) + CLOSING
    kept = SERVICE + jobs + workers + metrics + probes
    wanted = kept + CONNECTION * settings.max_connections
    limit = wanted if limit is None else min(limit, wanted)
    connections = (limit - kept) // CONNECTION
    is_chosen = "max_connections" in settings.model_fields_set
    if connections < (settings.max_connections if is_chosen else min(FEWEST, settings.max_connections)):
        least = wanted if is_chosen else kept + CONNECTION * FEWEST
        raise OptionError(
            f"this process may open {limit} files, and needs {least}: {kept} for jobs, metrics, probes and itself, "
            f"{least - kept} for connections; raise the hard limit (ulimit -Hn, LimitNOFILE=), "
            f"or lower max_connections or max_running"
        )
    return DescriptorBudget(limit, SERVICE, jobs, workers, metrics, probes, connections)


def raise_limit(settings: ServiceSettings) -> DescriptorBudget:
    """The budget of this process, whose soft limit is raised to it, if it is lower and the hard one allows that.

    Raises as ``budget_descriptors``. Where a process has no such limit (Windows), the budget is what is needed.
    """
    try:
        import resource
    except ImportError:
        return budget_descriptors(settings, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    budget = budget_descriptors(settings, None if hard == unlimited else hard)
    if soft != unlimited and soft < budget.limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (budget.limit, hard))
    return budget
