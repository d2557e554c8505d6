"""Grafana dashboards, Prometheus rules, and the runbook that they link to.

``python -m dashboards.build`` writes the JSON and YAML files of this folder from the Python files:

- ``pipeline.py``, ``details.py``: the dashboard *Pipeline*; ``service.py``, ``jobs.py``: the dashboard *Service*
- ``rules.py``, ``service_rules.py``: recording rules and alerts, of the types in ``rule.py``
- ``panels.py``, ``board.py``: kinds of panels, and the grid around them; ``queries.py``, ``states.py``: PromQL
- ``runbook.py``: ``RUNBOOK.md`` as panels; ``sdk.py``: what is used of grafana-foundation-sdk

Imports ``asyncpipe`` for the metrics that it serves and the colours of task kinds.
"""
