"""A tool, in front of the user: a model that guesses learns to call a calculator, and is right by it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from flotilla.shared.samples.table import to_groups
from tests.fleet import FLOTILLA, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_the_example_learns_to_call_its_tool(tmp_path: Path) -> None:
    from pyarrow import parquet

    words = [*FLOTILLA, "run", "examples/tool_use/experiment.yaml", "--plain", "--runs", str(tmp_path)]
    result = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=880, env={**os.environ, "FLOTILLA_REDIS_URL": ""}
    )

    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "tool_use" / "summary.json").read_text())
    assert summary["success_before"] <= 0.3
    assert summary["success_after"] >= summary["success_before"] + 0.3
    steps = sorted((tmp_path / "tool_use").rglob("step-*.parquet"))
    called = []
    for path in (steps[0], steps[-1]):
        trajectories = [t for kept in to_groups(parquet.read_table(path)) for t in kept.group.trajectories]
        called.append(sum(len(each.turns) > 1 for each in trajectories) / len(trajectories))
        for each in trajectories:
            if each.reward == 1.0 and len(each.turns) > 1:
                # What the calculator answered was shown, and the policy said it.
                result_shown = each.turns[1].observation
                assert each.turns[-1].text.endswith(f"#### {result_shown}")
    assert called[1] >= called[0] + 0.3
