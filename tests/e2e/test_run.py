"""``flotilla run``: two at once, from a spec to checkpoints that load; Ctrl-C at any moment."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flotilla.shared.weights.image.files import default_directories
from tests.e2e.records import check_loads, check_metrics, check_summary, metrics_of
from tests.fleet import FLOTILLA, ROOT, make_experiment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

PATIENCE_SECONDS = 240


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


@pytest.mark.long
def test_two_runs_at_once_end_with_summaries_and_checkpoints_that_load(tmp_path: Path) -> None:
    spec = an_evaluated_spec(tmp_path, optimisation={"steps": 6})
    runs = [Run(spec, tmp_path, tmp_path / "runs", "--fresh") for _ in range(2)]

    assert [run.wait(2 * PATIENCE_SECONDS) for run in runs] == [0, 0], [run.said() for run in runs]

    assert [run.family() for run in runs] == [{}, {}]
    directories = [path.parent for path in (tmp_path / "runs").glob("*/summary.json")]
    summaries = [check_summary(directory, steps=6, groups=4) for directory in directories]
    assert len({each["checkpoint"] for each in summaries}) == len(directories) == 2
    check_metrics(metrics_of(directories[0]), steps=6, groups=4, samples=16, max_lag=2)
    check_loads(summaries[0]["checkpoint"])


@pytest.mark.parametrize(
    "pattern",
    [
        "prepared",
        pytest.param("gateway    http", marks=pytest.mark.long),
        pytest.param("starting", marks=pytest.mark.long),
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


def a_prepared_run(directory: Path, program: str) -> Run:
    """Begin a run whose launch file has a preparation: a program in the launch file's folder."""
    (directory / "make.py").write_text(program)
    prepare = {"command": ["python", "make.py"], "output": "made"}
    return Run(make_experiment(directory, optimisation={"steps": 2}, prepare=prepare), directory, directory / "runs")


HELD = """
import pathlib, time
print("holding", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fleet_starts_while_a_model_is_prepared_and_ends_with_it(tmp_path: Path, number: int) -> None:
    run = a_prepared_run(tmp_path, HELD)
    run.until_it_says("prepare    holding")
    # Though the preparation goes on.
    run.until_it_says(r"gateway +pid")
    fleet = tmp_path / "runs" / "trial" / "fleet" / "fleet.json"
    until(fleet.is_file, PATIENCE_SECONDS, "the fleet")

    run.process.send_signal(number)

    assert run.wait(PATIENCE_SECONDS) == 130, run.said()
    assert "ended before an experiment was created" in run.said()
    assert "Traceback" not in run.said()
    assert run.family() == {}


@pytest.mark.parametrize("failing", ["raise SystemExit('no such model')", HELD + "raise SystemExit('no such model')"])
def test_a_preparation_that_fails_ends_the_fleet_with_its_last_word(tmp_path: Path, failing: str) -> None:
    run = a_prepared_run(tmp_path, failing)
    if failing.startswith(HELD):
        until((tmp_path / "runs" / "trial" / "fleet" / "fleet.json").is_file, PATIENCE_SECONDS, "the fleet")
        (tmp_path / "go").touch()

    assert run.wait(PATIENCE_SECONDS) == 1, run.said()

    assert run.said().rstrip().endswith("flotilla: prepare ended with exit code 1: no such model")
    assert "Traceback" not in run.said()
    assert run.family() == {}
