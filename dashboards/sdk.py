"""The parts of grafana-foundation-sdk that the dashboards use; all other modules import them from here.

On import the SDK warns that classic dashboards are deprecated, in favour of a format that only recent versions of
Grafana read. All versions can provision the classic format from a file, so it is used, and the warning is suppressed.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Prefer using dashboardv2", category=DeprecationWarning)
    from grafana_foundation_sdk.builders import (
        barchart,
        bargauge,
        common,
        heatmap,
        prometheus,
        stat,
        statetimeline,
        timeseries,
    )
    from grafana_foundation_sdk.builders import dashboard as build
    from grafana_foundation_sdk.builders import table as tables
    from grafana_foundation_sdk.builders import text as texts
    from grafana_foundation_sdk.cog.builder import Builder
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.variants import Dataquery
    from grafana_foundation_sdk.models import common as kinds
    from grafana_foundation_sdk.models import dashboard as model
    from grafana_foundation_sdk.models import heatmap as heat
    from grafana_foundation_sdk.models import prometheus as promql
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
    from grafana_foundation_sdk.models.text import TextMode

__all__ = [
    "Builder",
    "Dashboard",
    "Dataquery",
    "JSONEncoder",
    "Panel",
    "TextMode",
    "barchart",
    "bargauge",
    "build",
    "common",
    "heat",
    "heatmap",
    "kinds",
    "model",
    "prometheus",
    "promql",
    "stat",
    "statetimeline",
    "tables",
    "texts",
    "timeseries",
]
