"""PromQL in small pieces, so that every query filters by the dashboards' variables and takes its rates alike.

Metrics are named as they are served, without the prefix ``asyncpipe_``. A name that asyncpipe does not serve is an
error here, when the dashboards are built, and not an empty panel later.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from asyncpipe.errors import OptionError
from asyncpipe.observe.metrics.metric_table import COUNTERS, GAUGES, HISTOGRAMS
from asyncpipe.service.jobs.service_metrics import ServiceMetrics

__all__ = [
    "OF_SERVICE",
    "SERVED",
    "Expression",
    "increase",
    "mean",
    "quantile",
    "quantile_of_all",
    "quantile_of_range",
    "rate",
    "series",
    "substituted",
    "total",
]

OF_SERVICE: dict[str, tuple[str, ...]] = {
    sample.name.removeprefix("asyncpipe_"): tuple(sample.labels)
    for family in ServiceMetrics().collect()
    for sample in family.samples
}
"""Every series that a service tells of itself, and its labels: no job's. One without jobs serves no others."""
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
    **OF_SERVICE,
}
"""Every series that asyncpipe serves, without its prefix, and its labels besides the job."""
PHYSICAL = "memory_"
"""Begins the names of metrics whose device is a physical one: the variable has logical ones."""


class Expression(NamedTuple):
    """One query of one panel, its variables not yet replaced."""

    dashboard: str
    panel: str
    ref: str
    expr: str


def series(metric: str, *matchers: str) -> str:
    """The selector of ``metric`` for the jobs that are chosen, and for the devices where it has them.

    What a service tells of itself is there whatever is chosen. ``matchers`` are further conditions, such as
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
    """What a counter gains in a second."""
    return f"rate({series(metric, *matchers)}[$__rate_interval])"


def increase(metric: str, *matchers: str) -> str:
    """What a counter gains in the time range that is shown."""
    return f"increase({series(metric, *matchers)}[$__range])"


def total(by: str, expression: str) -> str:
    """The sums of ``expression`` by the labels in ``by`` (``"job, stage"``)."""
    return f"sum by ({by}) ({expression})"


def mean(histogram: str, by: str, *matchers: str) -> str:
    """The mean of what a histogram counted, by the labels in ``by``: exact, whatever its buckets; none of nothing."""
    counted = total(by, rate(f"{histogram}_count", *matchers))
    return f"{total(by, rate(f'{histogram}_sum', *matchers))}\n  / ({counted} > 0)"


def quantile(share: float, histogram: str, by: str, *matchers: str) -> str:
    """The value that ``share`` of what a histogram counted does not exceed, by the labels in ``by``."""
    return f"histogram_quantile({share}, {total(f'{by}, le', rate(f'{histogram}_bucket', *matchers))})"


def quantile_of_all(share: float, histogram: str, by: str, *matchers: str) -> str:
    """The same of everything since the job began: of what happens too rarely to be in every interval."""
    return f"histogram_quantile({share}, {total(f'{by}, le', series(f'{histogram}_bucket', *matchers))})"


def quantile_of_range(share: float, histogram: str, *matchers: str) -> str:
    """The same within the time range that is shown, over all that there is: of what happens a few times a day."""
    return f"histogram_quantile({share}, {total('le', increase(f'{histogram}_bucket', *matchers))})"


def substituted(expression: str, rate_interval: str = "1m", **variables: str) -> str:
    """``expression`` as Prometheus gets it: with Grafana's intervals filled in and variables replaced.

    A variable becomes what ``variables`` has under its name, or ``.*`` as if all were chosen. ``range`` and
    ``interval`` among them stand for ``$__range`` and ``$__interval``. Raises ``OptionError`` for an unknown macro.
    """
    macros = {
        "__rate_interval": rate_interval,
        "__range": variables.pop("range", "30m"),
        "__interval": variables.pop("interval", "15s"),
    }

    def value(found: re.Match[str]) -> str:
        name = found["bare"] or found["braced"]
        if name.startswith("__"):
            if name not in macros:
                raise OptionError(f"${name} in {expression!r} is none of the macros {', '.join(macros)}")
            return macros[name]
        return variables.get(name, ".*")

    return re.sub(r"\$(?:(?P<bare>\w+)|\{(?P<braced>\w+)(?::\w+)?\})", value, expression)
