"""The commands of a fleet that stays, as they are typed: from ``up --detach`` to ``down``."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.fleet import FLOTILLA, ROOT, make_experiment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Shell:
    """Types ``flotilla`` commands for the fleet of one data directory."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def run(self, *words: str, code: int = 0) -> str:
        result = subprocess.run(
            [*FLOTILLA, *words, "--data", str(self.data)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=150,
            env={**os.environ, "FLOTILLA_REDIS_URL": "", "FLOTILLA_GATEWAY_URL": "", "COLUMNS": "200"},
        )
        assert result.returncode == code, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result.stdout + result.stderr

    def status(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.run("status", "--json"))
        return content

    def experiment(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["experiments"][0]
        return found


def test_a_fleet_lives_through_its_commands(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "fleet")
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(make_experiment(tmp_path, optimisation={"steps": 5000})))

    assert "is up" in shell.run("up", "--port", "0", "--rollouts", "2", "--detach")
    try:
        assert "runs already" in shell.run("up", "--port", "0", "--detach", code=1)
        assert stat.S_IMODE((shell.data / "token").stat().st_mode) == 0o600
        services = shell.status()["services"]
        assert sorted(each["kind"] for each in services) == ["reward", "rollout", "rollout", "sandbox", "trainer"]
        assert all(
            psutil.pid_exists(each["pid"]) and each["address"].startswith("http://127.0.0.1:") for each in services
        )

        assert "starts" in shell.run("start", str(spec))
        until(lambda: shell.experiment()["step"] >= 2, 120, "the first steps")
        (share,) = shell.status()["shares"]
        rollouts = share["kinds"]["rollout"]
        assert (rollouts["min"], rollouts["max"], rollouts["share"], share["waiting"]) == (1, None, 2, None)
        assert len(rollouts["services"]) == 2
        assert "starts" in shell.run("start", str(spec))
        until(lambda: len(shell.status()["shares"]) == 2, 10, "the second experiment")
        waits = shell.status()["shares"][1]
        assert "waiting for 1 trainer and 1 reward to register or to fall free" in waits["waiting"]
        said = shell.run("status")
        assert "2 of 2 (1 to any)" in said and "1 trainer and 1 reward to register" in said
        shell.run("stop", waits["experiment_id"])
        until(lambda: len(shell.status()["shares"]) == 1, 30, "the end of the second experiment")

        shell.run("pause")
        until(lambda: shell.experiment()["state"] == "paused", 30, "the pause")
        until(lambda: settled(shell), 60, "work in hand to be finished")
        paused_at = shell.experiment()["step"]

        shell.run("resume")
        until(lambda: shell.experiment()["step"] > paused_at, 60, "a step after the pause")

        ledger = json.loads(shell.run("ledger", "--json"))
        assert ledger["train"]["balanced"]
        assert "issued" in shell.run("ledger")
        diagnosis = json.loads(shell.run("diagnose", "--json"))
        assert diagnosis["evidence"]["looks"] >= 0
        assert "bottleneck" in shell.run("diagnose")
        assert "pause" in shell.run("resume", code=1)

        shell.run("stop")
        until(lambda: shell.experiment()["state"] == "stopped", 60, "the end")
        first = shell.experiment()["id"]
        assert "stopped" in shell.run("watch", first, "--plain")
        ledger = json.loads(shell.run("ledger", first, "--json"))
        assert ledger["train"]["balanced"]
        assert ledger["train"]["outstanding"] == 0
        until(
            lambda: all(each["state"] == "idle" for each in shell.status()["services"]), 60, "services to be free again"
        )
        pids = [each["pid"] for each in shell.status()["services"]]
    finally:
        said = shell.run("down")

    assert "is down" in said
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert "flotilla up" in shell.run("status", code=1)


def settled(shell: Shell) -> bool:
    """Whether two looks a moment apart see the same step and nothing claimed by rollouts or graders."""
    before = shell.experiment()["step"]
    claimed = json.loads(shell.run("ledger", "--json"))["train"]["claimed"]
    return claimed["tasks"] == 0 and claimed["generated"] == 0 and shell.experiment()["step"] == before
