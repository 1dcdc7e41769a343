"""Counts of what the sandbox did, as Prometheus reads them."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from flotilla.shared.schemas.sandbox import RunStatus


class SandboxMetrics:
    """Counters since the service started."""

    def __init__(self) -> None:
        self._runs: Counter[tuple[str, RunStatus]] = Counter()
        self._refused: Counter[str] = Counter()
        self._run_seconds = 0.0
        self._sessions_ended: Counter[str] = Counter()
        self._cells: Counter[RunStatus] = Counter()

    def count_run(self, language: str, status: RunStatus, seconds: float) -> None:
        """Count a program that had its turn."""
        self._runs[language, status] += 1
        self._run_seconds += seconds

    def count_cell(self, status: RunStatus) -> None:
        """Count a cell of a session."""
        self._cells[status] += 1

    def count_session_end(self, cause: str) -> None:
        """Count a session that has ended, by its cause in a word."""
        self._sessions_ended[cause] += 1

    def count_refused(self, code: str) -> None:
        """Count a call that got no turn, by the code of its problem."""
        self._refused[code] += 1

    def load(self) -> dict[str, float]:
        """Return the counts that the fleet's page shows, as the service reports them."""
        errors = sum(number for (_, status), number in self._runs.items() if status is RunStatus.SANDBOX_ERROR)
        return {
            "runs": float(sum(self._runs.values())),
            "run_errors": float(errors),
            "run_seconds": round(self._run_seconds, 3),
            "refused_calls": float(sum(self._refused.values())),
            "cells": float(sum(self._cells.values())),
        }

    def families(self) -> Iterator[Metric]:
        """Make the metrics of what was counted here."""
        runs = CounterMetricFamily(
            "flotilla_sandbox_runs", "Programs that had their turn", labels=("language", "status")
        )
        for (language, status), number in sorted(self._runs.items()):
            runs.add_metric((language, status.value), number)
        refused = CounterMetricFamily("flotilla_sandbox_refused", "Calls that got no turn", labels=("code",))
        for code, number in sorted(self._refused.items()):
            refused.add_metric((code,), number)
        cells = CounterMetricFamily("flotilla_sandbox_cells", "Cells that sessions ran", labels=("status",))
        for outcome, number in sorted(self._cells.items()):
            cells.add_metric((outcome.value,), number)
        ended = CounterMetricFamily("flotilla_sandbox_sessions_ended", "Sessions that ended", labels=("cause",))
        for cause, number in sorted(self._sessions_ended.items()):
            ended.add_metric((cause,), number)
        yield from (runs, refused, cells, ended)
        yield CounterMetricFamily("flotilla_sandbox_run_seconds", "Time that programs ran", value=self._run_seconds)
