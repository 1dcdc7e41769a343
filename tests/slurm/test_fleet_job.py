"""A fleet as a job of a real Slurm: it learns, stops with a checkpoint at its time limit, and goes on when queued."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from tests.fleet import make_experiment
from tests.slurm.cluster import Cluster, missing_programs, running_cluster, wait_for

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: {', '.join(missing_programs())}"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "fleet.sbatch"
GRADER = '''
"""The share of digits in an answer: a random model has something to learn. Groups beyond a mark have to wait."""
import asyncio
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


async def score(sample):
    while int(sample.id.partition("/")[0]) >= held_from():
        await asyncio.sleep(0.05)
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


def held_from():
    try:
        return float(HOLD.read_text())
    except FileNotFoundError:
        return float("inf")
'''
GROUPS = 8
ACTION_SECONDS = 240.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with running_cluster(folder) as started:
        yield started


class Job:
    """One submission of the script, with a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path, *, steps: int, held_from_step: int) -> None:
        self.cluster, self.folder = cluster, folder
        self.hold = folder / "hold"
        self.hold.write_text(str(held_from_step * GROUPS))
        (folder / "digits.py").write_text(GRADER)
        grader = {"kind": "custom", "path": f"{folder / 'digits.py'}:score", "timeout_seconds": 600}
        optimisation = {"steps": steps, "groups_per_mini_batch": GROUPS, "learning_rate": 3e-3}
        changes: dict[str, Any] = {
            "reward": {"components": [grader]},
            "optimisation": optimisation,
            "checkpoint": {"every_steps": 1000},
        }
        spec = make_experiment(folder, **changes)
        spec["rollout"]["group_size"] = 8
        (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
        self.number = ""

    def submit(self, *arguments: str) -> None:
        environment = {
            "FLEET_PYTHON": sys.executable,
            "FLOTILLA_DATA": str(self.folder / "data"),
            "FLOTILLA_CODE_FOLDERS": str(self.folder),
            "FLOTILLA_DATA_FOLDERS": str(self.folder),
            "FLOTILLA_START_PATIENCE": "4",
        }
        options = (f"--output={self.folder / 'job.log'}", *arguments)
        self.number = self.cluster.submit(*options, str(SCRIPT), "spec.yaml", cwd=self.folder, environment=environment)

    @property
    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def step(self) -> int:
        return max((int(step) for step in re.findall(r" step (\d+)/\d+ ", self.log)), default=0)

    def until(self, *states: str) -> None:
        wait_for(lambda: self.state() in states, ACTION_SECONDS, lambda: f"{self.state()}\n{self.told()}")

    def until_step(self, step: int) -> None:
        def there() -> bool:
            assert self.state() in {"PENDING", "RUNNING"}, self.told()
            return self.step() >= step

        wait_for(there, ACTION_SECONDS, self.told)

    def told(self) -> str:
        logs = sorted((self.folder / "data" / "logs").glob("*.log"))
        parts = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs]
        return "\n".join([self.log[-3000:], *parts])

    def checkpoints(self) -> list[int]:
        [experiment] = (self.folder / "data" / "experiments").iterdir()
        return sorted(each.step for each in complete(experiment / CHECKPOINTS))

    def rewards(self) -> dict[int, float]:
        found = re.findall(r" step (\d+)/\d+ .*? reward ([\d.]+) ", self.log)
        return {int(step): float(reward) for step, reward in found}


def test_a_job_learns_and_goes_on_after_its_time_limit_where_it_had_to_stop(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, steps=40, held_from_step=12)
    # One minute and not five: the limit below is of minutes.
    job.submit("--cpus-per-task=4", "--signal=B:USR1@60", "--time=30")
    job.until_step(12)

    # The limit comes nearer, as time would bring it; Slurm sends the signal by itself.
    elapsed = cluster.job(job.number)["RunTime"]
    hours, minutes, _ = (int(part) for part in elapsed.split(":"))
    cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={hours * 60 + minutes + 1}")
    job.until("PENDING")

    assert job.checkpoints() == [12]
    assert "asked to leave (requeue)" in job.log
    job.hold.unlink()
    # It would wait for two minutes, as Slurm lets jobs that are queued again.
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30", "StartTime=now")
    job.until("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    assert job.state() == "COMPLETED", job.told()
    assert cluster.job(job.number)["Restarts"] == "1"
    assert job.checkpoints()[-1] == 40
    rewards = job.rewards()
    early = [reward for step, reward in rewards.items() if step <= 12]
    late = [reward for step, reward in rewards.items() if step > 32]
    assert sum(late) / len(late) > sum(early) / len(early) + 0.1, rewards
    (experiment,) = {json.loads((tmp_path / "data" / "started.json").read_text())["id"]}
    assert experiment == (tmp_path / "data" / "experiment").read_text().strip(), "it is the same experiment"


def test_a_heterogeneous_job_has_services_trainers_and_rollouts_apart_and_ends_with_a_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, steps=1000, held_from_step=3)
    job.submit("--cpus-per-task=2", "--time=30", ":", "--cpus-per-task=2", ":", "--cpus-per-task=2")
    job.until_step(3)
    parts = cluster.run("scontrol", "--oneliner", "show", "job", job.number).splitlines()
    steps = cluster.run("squeue", "--steps", "--noheader", "--format=%i %j")

    cluster.run("scancel", "--batch", "--signal=TERM", job.number)
    job.until("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    assert len(parts) == 3
    assert {line.split()[0].partition(".")[0] for line in steps.splitlines() if "bash" in line} != set(), steps
    assert job.checkpoints() == [3]
    assert cluster.job(job.number)["Restarts"] == "0", "who ends a job does not want it back"
    assert "asked to leave (end)" in job.log
