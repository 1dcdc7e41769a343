"""The comparison with TRL in small: every part runs on a whole fleet, and its figures can be true."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.end_to_end import PARTS
from benchmarks.trainer import TRL_PYTHON
from tests.fleet import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_every_part_compares_two_runs(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--quick", "--seeds", "0", "--part", *PARTS]
    command += ["--json", str(report)]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)

    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert [(each["part"], each["mode"]) for each in found] == [
        ("equal_work", "on_policy"),
        ("equal_work", "behind"),
        ("accuracy", "preset"),
        ("real_size", "default"),
        ("large", "lora"),
        ("large", "full"),
    ]
    for each in found:
        if each["part"] == "accuracy":
            assert set(each["curve"]) == {"2", "4"}
            assert all(0 <= value <= 1 for value in each["curve"].values())
        else:
            assert 0 < each["computed"] < each["flotilla"] * 1.5
            assert each["tokens"] > 32
        if TRL_PYTHON in os.environ and each["part"] != "accuracy":
            assert each["ratio"] == pytest.approx(each["trl"] / each["flotilla"])
            assert each["trl_tokens"] > 32
