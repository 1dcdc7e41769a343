"""What a run leaves behind, and whether it is all that the documentation promises."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flotilla.importers.coverage import RECORDED

SUMMARY_KEYS = {
    "status",
    "steps",
    "policy_version",
    "accuracy_before",
    "accuracy_after",
    "wall_seconds",
    "tokens_generated",
    "tokens_trained",
    "max_lag_trained",
    "ledger",
    "checkpoint",
}


def metrics_of(run_directory: Path) -> dict[str, dict[int, float]]:
    """Read a run's metrics from its gateway's database: name -> step -> value."""
    found: dict[str, dict[int, float]] = {}
    with closing(sqlite3.connect(run_directory / "fleet" / "gateway.sqlite")) as database:
        for name, step, value in database.execute("SELECT name, step, value FROM metrics"):
            found.setdefault(name, {})[step] = value
    return found


def check_metrics(metrics: dict[str, dict[int, float]], *, steps: int, groups: int, samples: int, max_lag: int) -> None:
    """Check that everything is recorded which the documentation promises, and that the figures go together."""
    every_step = set(range(1, steps + 1))
    per_step = [name for name in RECORDED if name.startswith("fully_async/")] + ["lag/max", "trainer/idle_ratio"]
    assert {name: set(metrics[name]) for name in per_step} == dict.fromkeys(per_step, every_step)
    # A rollout's first report may come after its first switch, and the last version's parts may never end.
    for name in ("rollouter/idle_ratio", "admission/wait_seconds"):
        assert len(metrics[name]) >= steps - 2, (name, metrics[name])
        assert set(metrics[name]) <= every_step
    for part in ("prepare", "transfer", "commit"):
        assert len(metrics[f"publication/{part}_seconds"]) >= steps - 1
    for name in ("trainer/idle_ratio", "rollouter/idle_ratio", "fully_async/partial/partial_ratio"):
        assert all(0 <= value <= 1 for value in metrics[name].values()), (name, metrics[name])
    seconds = [name for name in metrics if name.endswith("_seconds")]
    assert all(0 <= value < 120 for name in seconds for value in metrics[name].values())
    assert max(metrics["admission/wait_seconds"].values()) > 0
    assert max(metrics["publication/commit_seconds"].values()) > 0
    for step in every_step:
        lags = {int(name.rpartition("/")[2]): found[step] for name, found in by_lag(metrics) if step in found}
        assert max(lags) == metrics["lag/max"][step] <= max_lag
        assert sum(lags.values()) == metrics["tokens/trained_in_step"][step]
        assert metrics["fully_async/partial/max_partial_span"][step] <= max_lag
        partial = metrics["fully_async/partial/total_partial_num"][step]
        assert partial / samples == pytest.approx(metrics["fully_async/partial/partial_ratio"][step])
        assert 0 <= metrics["fully_async/count/stale_samples_processed"][step] <= groups * step
        assert 0 <= metrics["fully_async/count/stale_trajectory_processed"][step] <= samples * step
    lag_of_evaluations = metrics["evaluation/lag_versions"]
    assert lag_of_evaluations.keys() == metrics["evaluation/accuracy"].keys()
    assert all(0 <= lag <= steps for lag in lag_of_evaluations.values())


def by_lag(metrics: dict[str, dict[int, float]]) -> list[tuple[str, dict[int, float]]]:
    return [(name, found) for name, found in metrics.items() if name.startswith("lag/tokens/")]


def check_summary(run_directory: Path, *, steps: int, groups: int) -> dict[str, Any]:
    """Check that a run tells all that the documentation promises; return its summary."""
    summary: dict[str, Any] = json.loads((run_directory / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("completed", steps, steps)
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["outstanding"] == 0
    assert summary["ledger"]["trained"] == steps * groups
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    assert summary["max_lag_trained"] <= 2
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert (run_directory / "plot.png").read_bytes().startswith(b"\x89PNG")
    return summary


def check_loads(checkpoint: str) -> None:
    """Check that a checkpoint is a directory that transformers loads."""
    loads = (
        "import sys, transformers\n"
        "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", loads, checkpoint], check=True, capture_output=True, timeout=120)
