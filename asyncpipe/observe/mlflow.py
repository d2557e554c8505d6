"""MLflow: figures of each step as metrics of a run, at a tracking server or in a store of one's own.

::

    add ──▶ a queue (bounded: when it is full, new rows are dropped) ──▶ a thread: begins the run, logs batches

MLflow's own asynchronous logging is not used: its queue is unbounded, and its threads keep the process from ending
while a server does not answer.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

from asyncpipe.errors import missing_package
from asyncpipe.observe.scalars import CLOSE_SECONDS, RunEnd, ScalarObserver

__all__ = ["MLflowObserver"]

KEY = "asyncpipe.key"
"""The tag by which a run is found that is to be continued."""
MOST_METRICS = 1000
"""Most metrics of one request to MLflow."""
MOST_PARAMS = 100
LONGEST_PARAM = 500
BATCH = 100
"""Most steps of one request to MLflow."""
MOST_ROWS = 10_000
"""Steps that wait for a server that does not answer."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}

_NOT_A_NAME = re.compile(r"[^\w.\- :/]")

_logger = logging.getLogger(__name__)


class _Row(NamedTuple):
    """Figures of one step."""

    step: int
    at: float
    """Unix time in seconds."""
    values: Mapping[str, float]


class MLflowObserver(ScalarObserver):
    """Logs to a run ``name`` of ``experiment``, both of which are made; see ``ScalarObserver``.

    ``uri`` is the tracking server's or store's, by default that of MLflow's environment. ``params`` are the run's.
    ``key`` identifies what is trained: with ``goes_on``, the newest run with the same key is continued. Credentials are
    MLflow's (``MLFLOW_TRACKING_TOKEN`` …). A server that does not answer delays nothing: MLflow's client tries again
    for some minutes (``MLFLOW_HTTP_REQUEST_MAX_RETRIES``) while the next steps wait. ``failed`` is called with a
    reason, from any thread, when steps are lost for the first time. Requires mlflow or mlflow-skinny; raises
    ``OptionError`` without.
    """

    def __init__(
        self,
        name: str,
        *,
        uri: str | None = None,
        experiment: str = "asyncpipe",
        params: Mapping[str, object] | None = None,
        key: str | None = None,
        goes_on: bool = False,
        failed: Callable[[str], object] = lambda reason: None,
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_package("MLflowObserver needs mlflow", "mlflow") from error
        self._make_client: Callable[[], Any] = lambda: MlflowClient(uri)
        self._name = name
        self._experiment = experiment
        self._params = dict(params or {})
        self._key = None if key is None else key.replace("'", "_")  # It is quoted in searches.
        self._goes_on = goes_on
        self._failed = failed
        self._client: Any = None
        self._run: str | None = None
        self._rows: SimpleQueue[_Row | None] = SimpleQueue()
        """``None`` is the end."""
        self._lost = 0
        self._end: RunEnd = "finished"
        self._ending = Event()
        self._thread = Thread(target=self._serve, name="asyncpipe MLflow", daemon=True)
        self._thread.start()

    def add(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Log ``values`` by name, of ``step``, at a Unix time (default: now). Quick; from any thread."""
        if self._ending.is_set():
            return
        if self._rows.qsize() < MOST_ROWS:
            self._rows.put(_Row(step, time.time() if at is None else at, dict(values)))
        else:
            self._lose(1, "dropped", "does not keep up")

    def close(self, end: RunEnd = "finished") -> None:
        """Log what is left and end the run. Blocks, for ``CLOSE_SECONDS`` at most; may be called again."""
        if not self._ending.is_set():
            self._end = end
            self._ending.set()
            self._rows.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("MLflow does not answer; its thread is left behind")

    # On the thread

    def _serve(self) -> None:
        while rows := self._taken():
            try:
                self._log(rows)
            except Exception as error:  # noqa: BLE001 - whatever a store raises
                self._lose(len(rows), "raised", f"cannot be written: {error}")
        if self._lost:
            _logger.error("MLflow lacks %d steps", self._lost)
        try:
            if self._run is not None:
                self._client.set_terminated(self._run, STATUS[self._end])
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            _logger.error("MLflow's run cannot be ended: %s", error)

    def _taken(self) -> list[_Row]:
        """The rows that wait, at least one; none when the end has come."""
        rows: list[_Row] = []
        while (row := self._rows.get()) is not None:
            rows.append(row)
            if len(rows) == BATCH or self._rows.empty():
                return rows
        self._rows.put(None)  # After these rows, the end is read once more.
        return rows

    def _lose(self, steps: int, reason: str, why: str) -> None:
        if not self._lost:
            _logger.warning("MLflow does not get every step: it %s", why)
            self._failed(reason)
        self._lost += steps

    def _log(self, rows: Sequence[_Row]) -> None:
        from mlflow.entities import Metric

        run = self._run or self._begun()
        metrics = [
            Metric(_NOT_A_NAME.sub("_", name), value, round(row.at * 1e3), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(run, metrics=metrics[first : first + MOST_METRICS])

    def _begun(self) -> str:
        """The id of the run, which is made or goes on."""
        from mlflow.entities import Param, RunTag

        self._client = self._client or self._make_client()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run = self._found(experiment)
        if run is not None:
            self._client.update_run(run, status="RUNNING")
        else:
            run = str(self._client.create_run(experiment, run_name=self._name).info.run_id)
            tags = [] if self._key is None else [RunTag(KEY, self._key)]
            params = [
                Param(_NOT_A_NAME.sub("_", name), str(value)[:LONGEST_PARAM]) for name, value in self._params.items()
            ]
            self._client.log_batch(run, params=params[:MOST_PARAMS], tags=tags)
        self._run = run
        return run

    def _found(self, experiment: str) -> str | None:
        if self._key is None or not self._goes_on:
            return None
        runs = self._client.search_runs([experiment], f"tags.`{KEY}` = '{self._key}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None
