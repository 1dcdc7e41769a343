"""``flotilla run``: two at once, from a spec to checkpoints that load; Ctrl-C at any moment."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flotilla.importers.metrics import RECORDED
from shared.weights.image import default_directories
from tests.fleet import FLOTILLA, ROOT, make_experiment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

PATIENCE_SECONDS = 240
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


class Run:
    """A ``flotilla run`` in a process of its own, recognisable by a mark in its environment."""

    def __init__(self, spec: dict[str, Any], directory: Path, runs: Path, *options: str) -> None:
        path = directory / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        self.mark = f"mark-{time.monotonic_ns()}"
        self.output = directory / f"{self.mark}.out"
        self.runs = runs
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*FLOTILLA, "run", str(path), "--plain", "--runs", str(runs), *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "FLOTILLA_REDIS_URL": "", "FLOTILLA_TEST_MARK": self.mark},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def until_it_says(self, pattern: str) -> None:
        until(
            lambda: re.search(pattern, self.said()) or self.process.poll() is not None,
            PATIENCE_SECONDS,
            f"{pattern} to be said",
        )
        assert re.search(pattern, self.said())

    def family(self) -> dict[int, list[str]]:
        """Find its processes that have not ended: process id to command line."""
        found = {}
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("FLOTILLA_TEST_MARK") == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.cmdline()
            except psutil.Error:
                continue
        return found

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)


def images_of(pids: set[int]) -> set[Path]:
    """Find the weight images that processes made, which may be gone."""
    found = set()
    for directory in default_directories():
        for path in directory.glob("flotilla-*"):
            owners = [part for part in path.name.split("-") if part.isdigit()]
            if owners and int(owners[0]) in pids:
                found.add(path)
    return found


def an_evaluated_spec(directory: Path, **sections: Any) -> dict[str, Any]:
    evaluation = {"path": str(directory / "heldout.jsonl"), "max_rows": 32, "every_versions": 3}
    return make_experiment(directory, evaluation=evaluation, **sections)


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


def test_two_runs_at_once_end_with_summaries_and_checkpoints_that_load(tmp_path: Path) -> None:
    spec = an_evaluated_spec(tmp_path, optimisation={"steps": 6})
    runs = [Run(spec, tmp_path, tmp_path / "runs", "--fresh") for _ in range(2)]

    assert [run.wait(2 * PATIENCE_SECONDS) for run in runs] == [0, 0], [run.said() for run in runs]

    assert [run.family() for run in runs] == [{}, {}]
    directories = [path.parent for path in (tmp_path / "runs").glob("*/summary.json")]
    summaries = [check_summary(directory) for directory in directories]
    assert len({each["checkpoint"] for each in summaries}) == len(directories) == 2
    check_metrics(metrics_of(directories[0]), steps=6, groups=4, samples=16, max_lag=2)
    loads = (
        "import sys, transformers\n"
        "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", loads, summaries[0]["checkpoint"]]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def check_summary(run_directory: Path) -> dict[str, Any]:
    """Check that a run of six steps tells all that the documentation promises; return its summary."""
    summary: dict[str, Any] = json.loads((run_directory / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("completed", 6, 6)
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["outstanding"] == 0
    assert summary["ledger"]["trained"] == 24
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    assert summary["max_lag_trained"] <= 2
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert (run_directory / "plot.png").read_bytes().startswith(b"\x89PNG")
    return summary


@pytest.mark.parametrize(
    "pattern",
    [
        "prepared",
        pytest.param("gateway    http", marks=pytest.mark.long),
        "starting",
        r"running +step ([3-9]|\d\d)",
    ],
)
def test_ctrl_c_at_any_moment_leaves_nothing_behind(tmp_path: Path, pattern: str) -> None:
    spec = an_evaluated_spec(tmp_path, optimisation={"steps": 5000}, checkpoint={"every_steps": 1})
    run = Run(spec, tmp_path, tmp_path / "runs")
    run.until_it_says(pattern)
    pids = set(run.family())

    def has_ended() -> bool:
        pids.update(run.family())
        return run.process.poll() is not None

    run.process.send_signal(signal.SIGINT)
    until(has_ended, PATIENCE_SECONDS, "the end of the run")

    assert run.process.returncode == 130, run.said()
    assert "Traceback" not in run.said()
    assert run.family() == {}
    assert images_of(pids) == set()
    for checkpoint in (tmp_path / "runs").rglob("checkpoints/*"):
        assert (checkpoint / "state.json").is_file(), f"{checkpoint} is half written"


def test_a_killed_run_takes_its_processes_with_it(tmp_path: Path) -> None:
    run = Run(an_evaluated_spec(tmp_path, optimisation={"steps": 5000}), tmp_path, tmp_path / "runs")
    run.until_it_says(r"running +step ([2-9]|\d\d)")

    run.process.kill()

    run.wait(60)
    until(lambda: run.family() == {}, PATIENCE_SECONDS, "every process to end with its owner")
