"""The section *Workers* of the dashboard *Pipeline*: worker processes, and what they send each other."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.board import Band
from dashboards.panels import PanelOptions, Query, lines
from dashboards.queries import increase, rate, series, total

__all__ = ["workers"]

WAY = "job, src, dst"
NAMED = "{{src}} → {{dst}}"


def workers() -> tuple[Band, ...]:
    """Which workers are up, what they hold, and their edges; empty for a job whose devices are threads."""
    return (
        Band(8, ((_up(), 8), (_losses(), 8), (_memory(), 8))),
        Band(8, ((_bytes(), 8), (_messages(), 5), (_credit(), 6), (_control(), 5))),
    )


def _up() -> Panel:
    options = PanelOptions(
        title="Workers up",
        about="1 while a worker process is up, 0 from its loss until another one has taken its place. Jobs of a "
        "service that share a worker have a line each.",
        unit="none",
        high=1,
        decimals=0,
        runbook=("AsyncpipeWorkerLost",),
    )
    return lines(options, Query(f"min by (job, worker) ({series('worker_up')})", "{{worker}} {{job}}"), held=True)


def _losses() -> Panel:
    options = PanelOptions(
        title="Lost and restarted workers",
        about="Workers within the time range that ended, were killed or did not answer, and those that were started "
        "in their places. A job that shares a worker with others counts its loss as well; the restart is counted once.",
        unit="none",
        decimals=0,
        runbook=("AsyncpipeWorkerLost",),
    )
    return lines(
        options,
        Query(total("worker", increase("worker_losses_total")), "lost {{worker}}"),
        Query(total("worker", increase("worker_restarts_total")), "restarted {{worker}}"),
        held=True,
    )


def _memory() -> Panel:
    options = PanelOptions(
        title="Memory of workers",
        about="Resident memory of each worker process after the last step: the interpreter and torch, some 300 MB, and "
        "its stages with their optimizers and activations.",
        unit="bytes",
        runbook=("AsyncpipeMemoryNearLimit",),
    )
    return lines(options, Query(f"max by (worker) ({series('worker_resident_bytes')})", "{{worker}}"))


def _bytes() -> Panel:
    options = PanelOptions(
        title="Edges",
        about="Bytes of tensors per second from one worker to another, through shared memory on one host.",
        unit="binBps",
        runbook=("Waiting for an edge",),
    )
    return lines(options, Query(total(WAY, rate("edge_bytes_total")), NAMED))


def _messages() -> Panel:
    options = PanelOptions(
        title="Messages on edges",
        about="Messages per second: one for each dependency that crosses from one worker to another, with the tensors "
        "that a copy brings, or with none.",
        unit="suffix: /s",
        runbook=("Waiting for an edge",),
    )
    return lines(options, Query(total(WAY, rate("edge_messages_total")), NAMED))


def _credit() -> Panel:
    options = PanelOptions(
        title="Waiting for credit",
        about="Share of the time in which a worker had a message for another one that held as many as it may. Above 0 "
        "the receiver does not take what has arrived.",
        unit="percentunit",
        runbook=("Waiting for an edge",),
    )
    return lines(options, Query(total(WAY, rate("edge_waiting_seconds_total")), NAMED))


def _control() -> Panel:
    options = PanelOptions(
        title="Round trip to workers",
        about="The shortest of the last pings from the controller to a worker and back, and how far the worker's clock "
        "is from the controller's (0 on one host); times of its tasks are shifted by that.",
        unit="s",
        low=None,
        runbook=("AsyncpipeWorkerLost",),
    )
    return lines(
        options,
        Query(f"max by (worker) ({series('worker_round_trip_seconds')})", "there and back {{worker}}"),
        Query(f"max by (worker) ({series('worker_clock_offset_seconds')})", "clock {{worker}}"),
    )
