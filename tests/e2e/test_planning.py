"""A spec that has not run is probed by a fleet of its own, and planned from what that recorded."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.fleet import FLOTILLA, ROOT, make_experiment

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def test_a_spec_is_planned_from_a_probe_of_which_nothing_is_left(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(make_experiment(tmp_path)))
    options = ["--probe", "3", "--grading", "50", "--json"]

    done = subprocess.run(
        [*FLOTILLA, "plan", str(spec), *options],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measured"]["step_seconds"] > 0 and found["measured"]["tokens_per_second"] > 0
    assert found["predicted"]["step_seconds"] >= found["measured"]["step_seconds"]
    assert "step 3/3" in done.stderr, "the probe's own lines"
