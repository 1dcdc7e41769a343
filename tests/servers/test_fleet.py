"""The arithmetic example with real servers: it learns, whatever updates do to samples, and whoever is killed."""

import json
import os
import signal
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from services.rollout.engines.servers import leftovers
from services.rollout.engines.servers.model import PREFIX
from services.rollout.engines.sglang import arguments as sglang
from services.rollout.engines.vllm import arguments as vllm
from tests.contract.engine.conftest import python_of
from tests.e2e.test_run import Run
from tests.fleet import ROOT, until
from tests.servers.recording import files_asked_for

pytestmark = pytest.mark.timeout(1700)

IN_FLEETS = Path(__file__).with_name("in_fleets")
KINDS = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
MODULES = {sglang.MODULE, vllm.MODULE}

EXAMPLE = ROOT / "examples" / "arithmetic"
START_SECONDS = 900
RUN_SECONDS = 1500


@pytest.fixture(autouse=True)
def rollouts_write_down_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    if files_asked_for():
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (IN_FLEETS, ROOT))))


def a_spec(kind: str, mode: str, *, steps: int, rollouts: int) -> dict[str, Any]:
    """Take the example as it is, but for the engine; vLLM's has wider heads."""
    python_of(kind)
    text = (EXAMPLE / ("vllm.yaml" if kind == "vllm" else "experiment.yaml")).read_text()
    text = text.replace("{seed}", "0").replace("prepared/", f"{EXAMPLE}/prepared/")
    spec: dict[str, Any] = yaml.safe_load(text.replace("prepare.py", str(EXAMPLE / "prepare.py")))
    spec["name"] = "arithmetic"
    if kind == "sglang":
        spec["rollout"]["engine"] = {"kind": kind, "slots": 64, "context_tokens": 128}
    spec["optimisation"]["steps"] = steps
    spec["asynchrony"]["on_weight_update"] = mode
    if mode == "drain":
        spec["asynchrony"]["staleness_threshold"] = 0.0
    spec["resources"] = {"rollouts": {"min": rollouts, "max": rollouts}}
    return spec


def servers_of(run: Run) -> list[int]:
    """Find the first processes of the servers: children of the keepers of rollouts, which do not get our mark."""
    rollouts = [pid for pid, words in run.family().items() if "services.rollout" in words]
    found = []
    for pid in rollouts:
        with suppress(psutil.Error):
            servers = [server for keeper in psutil.Process(pid).children() for server in keeper.children()]
            found += [server.pid for server in servers if MODULES & set(server.cmdline())]
    return found


def shared_memory_of(server: int) -> list[Path]:
    """Find what a rollout has noted of its server, which is started in its directory."""
    with suppress(OSError, psutil.Error):
        notes = Path(psutil.Process(server).cwd()) / leftovers.NOTES
        return [leftovers.SHARED_MEMORY / name for name in notes.read_text().splitlines()]
    return []


def summary_of(run: Run) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run.runs / "arithmetic" / "summary.json").read_text())
    return summary


def members_of_committed(run: Run) -> list[list[dict[str, Any]]]:
    """Read who took part in each committed publication."""
    with closing(sqlite3.connect(run.runs / "arithmetic" / "fleet" / "gateway.sqlite")) as database:
        rows = database.execute("SELECT members FROM publications WHERE phase = 'committed'")
        return [json.loads(members) for (members,) in rows]


def end(run: Run) -> None:
    """End a run that a test gave up."""
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
        run.process.wait(120)


def finish(run: Run) -> dict[str, Any]:
    """Wait for its end; nothing of it is left, and its ledger is exact."""
    assert run.wait(RUN_SECONDS) == 0, run.said()
    until(lambda: not run.family(), 30, "all its processes to end")
    summary = summary_of(run)
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["outstanding"] == 0
    print(run.said())
    return summary


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_while_a_server_is_killed_and_replaced(tmp_path: Path, kind: str) -> None:
    run = Run(a_spec(kind, "interrupt", steps=40, rollouts=2), tmp_path, tmp_path / "runs")
    try:
        until(lambda: len(servers_of(run)) == 2 or run.process.poll() is not None, START_SECONDS, "two servers")
        run.until_it_says(r"step [1-9]\d*/")
        victim = servers_of(run)[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(servers_of(run)) - {victim}) == 2, START_SECONDS, "another server")

        servers = servers_of(run)
        summary = finish(run)
    finally:
        end(run)

    assert not any(psutil.pid_exists(server) for server in servers)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_on_drained_weights(tmp_path: Path, kind: str) -> None:
    run = Run(a_spec(kind, "drain", steps=12, rollouts=1), tmp_path, tmp_path / "runs")
    try:
        summary = finish(run)
    finally:
        end(run)

    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_on_weights_swapped_in_place_though_a_rollout_is_killed_and_leaves_no_server(
    tmp_path: Path, kind: str
) -> None:
    run = Run(a_spec(kind, "continue", steps=16, rollouts=1), tmp_path, tmp_path / "runs")
    try:
        until(lambda: servers_of(run) or run.process.poll() is not None, START_SECONDS, "a server")
        [server] = servers_of(run)
        keeper = psutil.Process(server).parent()
        assert keeper is not None
        rollout = keeper.parent()
        assert rollout is not None
        descendants = [keeper, *psutil.Process(server).children(recursive=True)]
        places = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{rollout.pid}-*"))
        until(lambda: shared_memory_of(server) or kind != "sglang", START_SECONDS, "its shared memory to be noted")
        left = shared_memory_of(server)
        rollout.kill()
        until(lambda: not psutil.pid_exists(server), 30, "its server to end")
        until(lambda: not any(each.is_running() for each in descendants), 30, "its server's children to end")
        # The rollout that the fleet starts again tidies up.
        until(lambda: not any(path.exists() for path in [*places, *left]), 120, "what the server left to be removed")

        summary = finish(run)
    finally:
        end(run)

    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05


@pytest.mark.sglang
def test_it_learns_from_weights_that_the_trainer_sends_to_servers_of_which_one_is_killed(tmp_path: Path) -> None:
    spec = a_spec("sglang", "interrupt", steps=30, rollouts=2)
    spec["rollout"]["engine"]["update_weights_from"] = "distributed"
    run = Run(spec, tmp_path, tmp_path / "runs")
    try:
        until(lambda: len(servers_of(run)) == 2 or run.process.poll() is not None, START_SECONDS, "two servers")
        run.until_it_says(r"step [1-9]\d*/")
        os.kill(servers_of(run)[0], signal.SIGKILL)
        summary = finish(run)
    finally:
        end(run)

    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05
    members = members_of_committed(run)
    assert {member["transport"] for each in members for member in each} == {"engine"}
    ranks = [[member["rank"] for member in each] for each in members]
    assert [1, 2] in ranks, "both were members before"
    assert [1] in ranks, "the other one went on alone"
    assert len(ranks) == summary["policy_version"]
