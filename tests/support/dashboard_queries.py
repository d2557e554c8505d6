"""The queries of all panels and the expressions of all rules, as Prometheus gets them."""

from __future__ import annotations

import re
from typing import NamedTuple

from asyncpipe.errors import OptionError
from dashboards.build import built
from dashboards.rules import ALERTS, RECORDINGS, WINDOW, rates_over


class Expression(NamedTuple):
    """One query of one panel, with Grafana's variables."""

    dashboard: str
    panel: str
    ref: str
    expr: str


def panel_expressions() -> list[Expression]:
    """Every query of every panel; it contains Grafana's variables, which ``substituted`` replaces."""
    return [
        Expression(name, panel.title or "", target.ref_id or "", target.expr)
        for name, dashboard in built().items()
        for panel in dashboard.panels or ()
        for target in getattr(panel, "targets", None) or ()
    ]


def rule_expressions(window: str = WINDOW) -> dict[str, str]:
    """Every expression that has data while a job trains, by name: recording rules and the values of alerts."""
    alerts = {" ".join((alert.name, *alert.labels.values())): alert.value for alert in ALERTS}
    return {name: rates_over(window, expression) for name, expression in {**RECORDINGS, **alerts}.items()}


def substituted(expression: str, rate_interval: str = "1m", **variables: str) -> str:
    """``expression`` as Prometheus gets it: Grafana's macros and variables are replaced.

    A variable is replaced by its value in ``variables``, or by ``.*``, which stands for all. ``range`` and
    ``interval`` there are the values of ``$__range`` and ``$__interval``. Raises ``OptionError`` for an unknown macro.
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
