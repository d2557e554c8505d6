"""MLflow: figures of each step as metrics of a run, at a tracking server or in a store of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncpipe.errors import missing_package
from asyncpipe.observe.scalars import Row, RunEnd, ScalarObserver

__all__ = ["MLflowObserver"]

KEY = "asyncpipe.key"
"""The tag by which a run is found that is to be continued."""
MOST_METRICS = 1000
"""Most metrics of one request to MLflow."""
MOST_PARAMS = 100
LONGEST_PARAM = 500
STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}

_NOT_A_NAME = re.compile(r"[^\w.\- :/]")


class MLflowObserver(ScalarObserver):
    """Logs to a run ``name`` of ``experiment``, both of which are made; see ``ScalarObserver``.

    ``uri`` is the tracking server's or store's, by default that of MLflow's environment. ``params`` are the run's.
    ``key`` identifies what is trained: with ``goes_on``, the newest run with the same key is continued. Credentials are
    MLflow's (``MLFLOW_TRACKING_TOKEN`` …). A server that does not answer delays nothing: MLflow's client tries again
    for some minutes (``MLFLOW_HTTP_REQUEST_MAX_RETRIES``) while the next steps wait. Requires mlflow or mlflow-skinny;
    raises ``OptionError`` without.
    """

    store = "MLflow"

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
        self._client: Any = None
        self._run: str | None = None
        super().__init__(failed)

    def _write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        run = self._run or self._begun()
        metrics = [
            Metric(_NOT_A_NAME.sub("_", name), value, round(row.at * 1e3), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(run, metrics=metrics[first : first + MOST_METRICS])

    def _finish(self, end: RunEnd) -> None:
        if self._run is not None:
            self._client.set_terminated(self._run, STATUS[end])

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
