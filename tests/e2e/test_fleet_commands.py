"""The commands of a fleet that stays, as they are typed: from ``up --detach`` to ``down``."""

import json
import os
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from flotilla.cli.exit_codes import ExitCode
from flotilla.connection import FleetInfo
from tests.fleet import FLOTILLA, LEFT_SECONDS, ROOT, is_running, make_experiment, until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(580)]


PATIENCE_SECONDS = 120


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

    def look(self, path: str) -> dict[str, Any]:
        """Ask the gateway itself: a command takes a second to start, too long for whoever waits for a state."""
        fleet = FleetInfo.read(self.data)
        answer = httpx.get(fleet.gateway_url + path, headers={"Authorization": f"Bearer {fleet.token}"}, timeout=60)
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
        return content

    def shares(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.look("/v1/fleet")["experiments"]
        return found


def test_a_fleet_lives_through_its_commands(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "fleet")
    spec = tmp_path / "spec.yaml"
    copied = make_experiment(tmp_path, optimisation={"steps": 5000})
    copied["checkpoint"]["upload_to"] = f"file://{tmp_path}/copies"
    spec.write_text(yaml.safe_dump(copied))

    assert "is up" in shell.run("up", "--port", "0", "--rollouts", "2", "--detach")
    try:
        assert "runs already" in shell.run("up", "--port", "0", "--detach", code=ExitCode.REFUSED)
        assert stat.S_IMODE((shell.data / "token").stat().st_mode) == 0o600
        services = shell.status()["services"]
        assert sorted(each["kind"] for each in services) == ["reward", "rollout", "rollout", "sandbox", "trainer"]
        assert all(
            psutil.pid_exists(each["pid"]) and each["address"].startswith("http://127.0.0.1:") for each in services
        )

        assert "starts" in shell.run("start", str(spec))
        (experiment,) = shell.status()["experiments"]
        first = experiment["id"]

        def seen() -> dict[str, Any]:
            return shell.look(f"/v1/experiments/{first}")

        until(lambda: seen()["step"] >= 2, PATIENCE_SECONDS, "the first steps")
        assert {each["kind"] for each in services if maps_torch(each["pid"])} == set()
        assert shown_secrets(FleetInfo.read(shell.data)) == []
        (share,) = shell.status()["shares"]
        rollouts = share["kinds"]["rollout"]
        assert (rollouts["min"], rollouts["max"], rollouts["share"], share["waiting"]) == (1, None, 2, None)
        assert len(rollouts["services"]) == 2
        assert "starts" in shell.run("start", str(spec))
        until(lambda: len(shell.shares()) == 2 and shell.shares()[1]["waiting"], PATIENCE_SECONDS, "the second one")
        waits = shell.status()["shares"][1]
        assert "waiting for 1 trainer and 1 reward to register or to fall free" in waits["waiting"]
        said = shell.run("status")
        assert "2 of 2 (1 to any)" in said and "1 trainer and 1 reward to register" in said
        shell.run("stop", waits["experiment_id"])
        until(lambda: len(shell.shares()) == 1, PATIENCE_SECONDS, "the end of the second experiment")

        shell.run("pause")
        until(lambda: seen()["state"] == "paused", PATIENCE_SECONDS, "the pause")
        until(lambda: settled(shell, first), PATIENCE_SECONDS, "work in hand to be finished")
        paused_at = seen()["step"]

        shell.run("resume")
        until(lambda: seen()["step"] > paused_at, PATIENCE_SECONDS, "a step after the pause")

        ledger = json.loads(shell.run("ledger", "--json"))
        assert ledger["train"]["balanced"]
        assert "issued" in shell.run("ledger")
        diagnosis = json.loads(shell.run("diagnose", "--json"))
        assert diagnosis["evidence"]["looks"] >= 0
        assert "bottleneck" in shell.run("diagnose")
        assert "pause" in shell.run("resume", code=ExitCode.REFUSED)

        shell.run("stop")
        until(lambda: seen()["state"] == "stopped", PATIENCE_SECONDS, "the end")
        assert "stopped" in shell.run("watch", first, "--plain")
        ledger = json.loads(shell.run("ledger", first, "--json"))
        assert ledger["train"]["balanced"]
        assert ledger["train"]["outstanding"] == 0
        look_at_what_is_kept(shell, first, waits["experiment_id"])
        until(lambda: all(is_idle(each) for each in services_of(shell)), PATIENCE_SECONDS, "services to be free again")
        services = shell.status()["services"]
        assert {each["state"] for each in services} == {"idle"}
        pids = [each["pid"] for each in services]
    finally:
        said = shell.run("down")

    assert "is down" in said
    until(lambda: not any(map(is_running, pids)), LEFT_SECONDS, f"the end of all of {pids}")
    assert "flotilla up" in shell.run("status", code=ExitCode.UNREACHABLE)


def shown_secrets(fleet: FleetInfo) -> list[str]:
    """Name the processes of a fleet at work whose environment shows the operator's token or the data plane's URL."""
    family = psutil.Process(fleet.pid).children(recursive=True)
    assert len(family) > 7, "services, their engines, the trainer's worker, the data plane's server"
    environments = [(each.name(), Path(f"/proc/{each.pid}/environ").read_bytes()) for each in family]
    secrets = (fleet.token.encode(), fleet.redis_url.encode())
    return [name for name, environment in environments if any(secret in environment for secret in secrets)]


def look_at_what_is_kept(shell: Shell, trained: str, untrained: str) -> None:
    """Type the commands that look at two experiments that were stopped, of one name; the second one is deleted."""
    assert [each["id"] for each in json.loads(shell.run("ls", "--json"))] == [untrained, trained]
    kept = json.loads(shell.run("checkpoints", trained, "--json", "--verify"))
    assert kept[-1]["is_newest"] and Path(kept[-1]["path"]).is_dir()
    copy = Path(kept[-1]["upload"]["url"].removeprefix("file://"))
    assert (kept[-1]["upload"]["state"], kept[-1]["copy"]["is_whole"]) == ("uploaded", True)
    assert {each.name for each in copy.parent.iterdir()} == {
        Path(each["path"]).name for each in kept if each["is_kept"]
    }
    (copy / "optimizer.safetensors").unlink()
    assert f"{copy} (lacks optimizer.safetensors)" in shell.run(
        "checkpoints", trained, "--verify", code=ExitCode.FAILED
    )
    report = json.loads(shell.run("report", trained, "--json"))
    assert report["ledger"]["balanced"] and Path(report["logs"]).samefile(shell.data / "logs")
    comparison = json.loads(shell.run("compare", trained, untrained, "--json"))
    assert (comparison["spec"], {each["step"] for each in comparison["metrics"]}) == ([], {None})
    lines = [json.loads(line) for line in shell.run("logs", "trainer", "--json").splitlines()]
    assert {line["process"] for line in lines} == {"trainer"}
    name = trained.rpartition("-")[0]
    assert f"{trained} (stopped), {untrained} (stopped)" in shell.run("delete", name, code=ExitCode.REFUSED)
    assert "its directory stays" in shell.run("delete", untrained)
    assert f"no experiment '{untrained}'" in shell.run("checkpoints", untrained, code=ExitCode.NOT_FOUND)


def maps_torch(pid: int) -> bool:
    """Whether a process has torch loaded: services leave it to their children."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def services_of(shell: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shell.look("/v1/services")["items"]
    return found


def is_idle(service: dict[str, Any]) -> bool:
    return bool(service["observed"]["state"] == "idle")


def settled(shell: Shell, experiment_id: str) -> bool:
    """Whether looks a moment apart see the same step and nothing claimed by rollouts or graders."""
    path = f"/v1/experiments/{experiment_id}"
    before = shell.look(path)["step"]
    claimed = shell.look(f"{path}/ledger")["train"]["claimed"]
    time.sleep(1)
    return claimed["tasks"] == claimed["generated"] == 0 and shell.look(path)["step"] == before
