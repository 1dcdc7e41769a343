"""MLflow as a tracker: a run with the experiment's id and the cursor as tags."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flotilla.services.gateway.tracking.base import Record, TrackedRun
from flotilla.shared.config.sections.tracking import MlflowTrackerConfig

ID_TAG = "flotilla.experiment"
CURSOR_TAG = "flotilla.cursor"
MOST_METRICS = 900
MOST_PARAMS = 100
LONGEST_PARAM = 500
"""Bounds of one request to a server."""


def plain_name(name: str) -> str:
    """Replace what a server of MLflow refuses in a name: ``pass@4`` is ``pass_at_4`` there, as verl has it."""
    return name.replace("@", "_at_")


class MlflowTracker:
    """Logs a batch in one request together with its cursor, so that a batch arrives whole or not at all."""

    def __init__(self, config: MlflowTrackerConfig, run: TrackedRun) -> None:
        from mlflow import MlflowClient  # an optional package, imported where it is used

        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        found = self._client.get_experiment_by_name(config.experiment)
        owner = found.experiment_id if found is not None else self._client.create_experiment(config.experiment)
        runs = self._client.search_runs([owner], filter_string=f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._cursor = int(runs[0].data.tags.get(CURSOR_TAG, "0"))
        else:
            self._run_id = self._client.create_run(owner, run_name=run.name, tags={ID_TAG: run.id}).info.run_id
            self._cursor = 0
            self._log_spec(run.spec)

    def _log_spec(self, spec: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in _leaves(spec)]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MOST_PARAMS])

    def cursor(self) -> int:
        """Return the cursor in the run's tags."""
        return self._cursor

    def write(self, records: Sequence[Record]) -> None:
        """Log the records, some to a request."""
        from mlflow.entities import Metric, RunTag

        for record in records:
            at = int(record.at * 1000)
            metrics = [Metric(plain_name(name), value, at, record.step) for name, value in record.values.items()]
            *first, last = [metrics[at : at + MOST_METRICS] for at in range(0, len(metrics), MOST_METRICS)]
            for part in first:
                self._client.log_batch(self._run_id, metrics=part)
            tags = [RunTag(CURSOR_TAG, str(record.cursor))]
            self._client.log_batch(self._run_id, metrics=last, tags=tags)
            self._cursor = record.cursor

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
