"""The shipped example: a model with a weak start visibly learns, and the run leaves what the documentation promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.records import check_loads, check_metrics, check_summary, metrics_of
from tests.fleet import FLOTILLA, ROOT

NUM_STEPS = 15
"""Of the example's 60: by then nine of ten answers are right."""
EXAMPLE = ROOT / "examples" / "arithmetic"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]


def test_the_arithmetic_example_learns(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *FLOTILLA,
            "run",
            "examples/arithmetic/experiment.yaml",
            "--plain",
            "--runs",
            str(tmp_path),
            "--set",
            f"optimisation.steps={NUM_STEPS}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
        env={**os.environ, "FLOTILLA_REDIS_URL": ""},
    )

    assert result.returncode == 0, result.stdout + result.stderr
    summary = check_summary(tmp_path / "arithmetic", steps=NUM_STEPS, groups=16)
    assert 0.10 <= summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.85
    assert len(summary["accuracy"]) >= 4
    metrics = metrics_of(tmp_path / "arithmetic")
    check_metrics(metrics, steps=NUM_STEPS, groups=16, samples=128, max_lag=2)
    check_loads(summary["checkpoint"])

    directory = EXAMPLE / "prepared" / "standard-0"
    prepared = json.loads((directory / "prepared.json").read_text())
    assert prepared["phase_1"]["pass_rate"] > 0.7
    again = subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), "--output", str(directory)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert again.stdout.startswith("already prepared")
