"""Functions that write PromQL, so that all queries filter by the dashboards' variables and take rates the same way.

Metrics are named without their prefix ``asyncpipe_``. A name that asyncpipe does not serve raises an error when the
dashboards are built, instead of leaving a panel empty later.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics.metric_table import COUNTERS, GAUGES, HISTOGRAMS
from asyncpipe.service.job_states import JobRecord, JobState
from asyncpipe.service.jobs.service_metrics import ServiceMetrics

__all__ = [
    "OF_SERVICE",
    "SERVED",
    "increase",
    "mean",
    "quantile",
    "rate",
    "series",
    "total",
]


def _of_service() -> dict[str, tuple[str, ...]]:
    metrics = ServiceMetrics()
    # One that has workers, which have hosts, and a user.
    metrics.heartbeats, metrics.drained = (lambda: {"": 0.0}), (lambda: {"": False})
    metrics.users.queued(JobRecord("", {}, JobState.QUEUED, "", 0, 0, owner=""))
    return {
        sample.name.removeprefix("asyncpipe_"): tuple(sample.labels)
        for family in metrics.collect()
        for sample in family.samples
    }


OF_SERVICE = _of_service()
"""Every series about the service itself, which has no label ``job``, and its labels."""
HISTOGRAM_LABELS = {"bucket": ("le",), "sum": (), "count": ()}
SERVED: dict[str, tuple[str, ...]] = {
    **{f"{name}_total": labels for name, (_, labels) in COUNTERS.items()},
    **{name: labels for name, (_, labels) in GAUGES.items()},
    **{
        f"{name}_{suffix}": (*labels, *further)
        for name, (_, labels, _) in HISTOGRAMS.items()
        for suffix, further in HISTOGRAM_LABELS.items()
    },
    "build_info": ("version",),
    "job_running": (),
    "job_failure_timestamp_seconds": ("state",),
    **OF_SERVICE,
}
"""Every series that asyncpipe serves, without its prefix, and its labels besides the job."""
PHYSICAL = ("memory_", "streams")
"""How metrics begin whose label ``device`` is a physical device; the variable ``$device`` has logical ones."""


def series(metric: str, *matchers: str) -> str:
    """The selector of ``metric`` for the chosen jobs and, if it has the label ``device``, the chosen devices.

    Metrics about the service itself are not filtered. ``matchers`` are further conditions, such as
    ``'reason="copy"'``. Raises ``OptionError`` for a metric or a label that is not served.
    """
    labels = SERVED.get(metric)
    if labels is None:
        raise OptionError(f"asyncpipe serves no metric asyncpipe_{metric}; there are {', '.join(sorted(SERVED))}")
    for matcher in matchers:
        label = re.split(r"[=!]", matcher, maxsplit=1)[0]
        if label not in labels:
            there = labels if metric in OF_SERVICE else ("job", *labels)
            raise OptionError(f"asyncpipe_{metric} has no label {label}; it has {', '.join(there) or 'none'}")
    chosen = [] if metric in OF_SERVICE else ['job=~"$job"']
    if "device" in labels and not metric.startswith(PHYSICAL):
        chosen.append('device=~"$device"')
    selected = ", ".join((*chosen, *matchers))
    return f"asyncpipe_{metric}{{{selected}}}" if selected else f"asyncpipe_{metric}"


def rate(metric: str, *matchers: str) -> str:
    """The increase of a counter per second."""
    return f"rate({series(metric, *matchers)}[$__rate_interval])"


def increase(metric: str, *matchers: str) -> str:
    """The increase of a counter in the time range that is shown."""
    return f"increase({series(metric, *matchers)}[$__range])"


def total(by: str, expression: str) -> str:
    """The sums of ``expression`` by the labels in ``by`` (``"job, stage"``)."""
    return f"sum by ({by}) ({expression})"


def mean(histogram: str, by: str, *matchers: str) -> str:
    """The mean of a histogram's values, by the labels in ``by``: exact, and no series where there are no values."""
    counted = total(by, rate(f"{histogram}_count", *matchers))
    return f"{total(by, rate(f'{histogram}_sum', *matchers))}\n  / ({counted} > 0)"


def quantile(share: float, histogram: str, by: str = "", *matchers: str, over: Callable[..., str] = rate) -> str:
    """The quantile ``share`` of a histogram's values, by the labels in ``by``.

    ``over`` is ``rate`` for the latest values. For events that are too rare for an interval, ``increase`` counts the
    values of the time range that is shown, and ``series`` all values since the job began.
    """
    return f"histogram_quantile({share}, {total(f'{by}, le' if by else 'le', over(f'{histogram}_bucket', *matchers))})"
