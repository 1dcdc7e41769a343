"""A launch file over REST: the command line makes what it needs and prints the spec that the gateway takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec

LAUNCH = """
name: trial
prepare: {command: [python, make.py, "made/{seed}"], output: "made/{seed}"}
model: {path: "made/{seed}"}
data: {path: "made/{seed}/train.jsonl"}
reward: {components: [{kind: numeric}]}
optimisation: {steps: 5}
"""
MAKE = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(parents=True); print('made it')"


def test_preparing_makes_what_the_file_needs_and_prints_nothing_but_the_spec_to_send(tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text(LAUNCH)
    (tmp_path / "make.py").write_text(MAKE)
    command = [sys.executable, "-m", "flotilla", "prepare", str(tmp_path / "launch.yaml"), "--seed", "7"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    spec = validate_spec(json.loads(done.stdout))
    assert (spec.seed, spec.model.path) == (7, str(tmp_path / "made" / "7"))
    assert (tmp_path / "made" / "7").is_dir()
    assert "made it" in done.stderr


def test_a_launch_file_sent_as_it_is_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidSpec, match="flotilla prepare FILE"):
        validate_spec({"name": "trial", "prepare": {"command": ["python"], "output": "made"}})
