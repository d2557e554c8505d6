"""Prometheus metrics of a job's steps.

Read in this order:

- ``metric_table.py``: names, help texts and labels of all metrics
- ``collector.py``: ``PipelineCollector``, an observer of steps that Prometheus scrapes
- ``step_arrays.py``, ``graph_arrays.py``: a step's times and its task graph as arrays
- ``fold.py``, ``idle_time.py``: what steps add; why devices were idle, by ``core/predict/idle_reasons.py``
- ``totals.py``: the sums; ``server.py``: a server for ``/metrics``

Imports ``core``, numpy and prometheus_client. A new metric takes its row in ``metric_table.py`` and its sum in
``fold.py``.
"""

from asyncpipe.observe.metrics.collector import MergedCollector, PipelineCollector
from asyncpipe.observe.metrics.server import MetricsServer, serve_metrics

__all__ = ["MergedCollector", "MetricsServer", "PipelineCollector", "serve_metrics"]
