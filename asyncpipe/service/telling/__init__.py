"""How people hear what becomes of jobs when they do not ask: lines in the log, and messages to a webhook.

::

    job_lines.py    a line in the log for each change of a job, with its ids and the reason
    webhook.py      ``Webhook``: sends messages about jobs that end badly, until they arrive. Start here.
    message.py      what a message says, and its signature: pure
    post.py         one POST over asyncio
    told_file.py    how far the webhook was told, on disk

Alerts are rules of Prometheus over the service's metrics (``jobs/service_metrics.py``, ``dashboards/rules.py``). May
import ``store`` and ``settings``.
"""
