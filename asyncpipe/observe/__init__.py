"""What a user sees of steps: folds over their journals, measured or simulated.

- ``metrics/``: Prometheus metrics, by ``PipelineCollector``
- ``pictures/``: timelines as text, SVG and HTML, and Chrome traces
- ``live/``: a page that shows a run while it runs
- ``otel.py``: a span per step for OpenTelemetry
- ``scalars.py``: figures of each step for other programs: ``tensorboard.py``, ``mlflow.py``
- ``http_hosts.py``: which requests asyncpipe's HTTP servers answer

An observer has one method, ``step_completed(record)``. It is called on the scheduler's loop, so the observers here only
store the record there and compute elsewhere. Imports ``core`` and ``errors``; no torch.
"""
