"""Counts of what the sandbox did, as Prometheus reads them."""

from collections import Counter

from shared.schemas.sandbox import IsolationLevel, RunStatus


class SandboxMetrics:
    """Counters since the service started."""

    def __init__(self) -> None:
        self._runs: Counter[tuple[str, RunStatus]] = Counter()
        self._refused: Counter[str] = Counter()
        self._run_seconds = 0.0

    def count_run(self, language: str, status: RunStatus, seconds: float) -> None:
        """Count a program that had its turn."""
        self._runs[language, status] += 1
        self._run_seconds += seconds

    def count_refused(self, code: str) -> None:
        """Count a call that got no turn, by the code of its problem."""
        self._refused[code] += 1

    def render(self, level: IsolationLevel, *, num_running: int, num_waiting: int) -> str:
        """Write the text format, version 0.0.4."""
        lines = ["# TYPE flotilla_sandbox_runs_total counter"]
        for (language, status), number in sorted(self._runs.items()):
            labels = f'language="{language}",status="{status.value}"'
            lines.append(f"flotilla_sandbox_runs_total{{{labels}}} {number}")
        lines.append("# TYPE flotilla_sandbox_refused_total counter")
        lines += [f'flotilla_sandbox_refused_total{{code="{c}"}} {n}' for c, n in sorted(self._refused.items())]
        lines += [
            "# TYPE flotilla_sandbox_run_seconds_total counter",
            f"flotilla_sandbox_run_seconds_total {self._run_seconds:.6f}",
            "# TYPE flotilla_sandbox_running gauge",
            f"flotilla_sandbox_running {num_running}",
            "# TYPE flotilla_sandbox_waiting gauge",
            f"flotilla_sandbox_waiting {num_waiting}",
            "# TYPE flotilla_sandbox_isolation gauge",
            f'flotilla_sandbox_isolation{{level="{level.value}"}} 1',
        ]
        return "\n".join(lines) + "\n"
