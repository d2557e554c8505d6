"""Grafana dashboards, Prometheus rules, and the runbook that they link to.

``python -m dashboards.build`` writes the JSON and YAML files of this folder from the Python files:

- ``pipeline.py``, ``details.py``: the dashboard *Pipeline*; ``service.py``, ``jobs.py``: the dashboard *Service*
- ``rules.py``: recording rules and alerts
- ``panels.py``, ``board.py``: kinds of panels, and the grid around them; ``queries.py``, ``states.py``: PromQL
- ``runbook.py``: ``RUNBOOK.md`` as panels

Imports ``asyncpipe`` for the metrics that it serves and the colours of task kinds.
"""

import warnings

# On import the SDK warns that classic dashboards are deprecated, in favour of a format that only recent versions of
# Grafana read. All versions can provision the classic format from a file, so it is used.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Prefer using dashboardv2", category=DeprecationWarning)
    from grafana_foundation_sdk.builders import barchart, dashboard  # noqa: F401
