"""The arithmetic example with real servers: it learns, whatever updates do to samples, and whoever is killed."""

import json
import os
import signal
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from flotilla.connection import FleetInfo
from flotilla.services.rollout.engines.servers import leftovers
from flotilla.services.rollout.engines.servers.model import PREFIX
from flotilla.services.rollout.engines.sglang import engine as sglang
from flotilla.services.rollout.engines.vllm import engine as vllm
from tests.contract.engine.conftest import python_of, python_with_torchvision
from tests.e2e.records import metrics_of
from tests.e2e.test_images import a_spec as pictures_spec
from tests.e2e.test_images import check_seen
from tests.e2e.test_run import Run
from tests.fleet import ROOT, until
from tests.servers.recording import files_asked_for
from tests.vision_models import COLOURS

pytestmark = pytest.mark.timeout(1700)

IN_FLEETS = Path(__file__).with_name("in_fleets")
KINDS = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
MODULES = {sglang.MODULE, vllm.MODULE}

EXAMPLE = ROOT / "examples" / "arithmetic"
START_SECONDS = 900
RUN_SECONDS = 1500
HELD_FROM = 80
"""The first group that waits: those before it are enough for some steps."""

HOLDING_GRADER = '''
"""Groups to train on wait for their reward from a certain one on, while there is a file; it adds nothing to it."""
import asyncio
import json
from pathlib import Path

HOLD = Path(__file__).with_name("hold")
HELD_OUT = {json.loads(line)["prompt"] for line in Path("HELD_OUT_FILE").read_text().splitlines()}


async def score(sample):
    while int(sample.id.partition("/")[0]) >= HELD_FROM and HOLD.exists():
        if sample.messages[-1].content in HELD_OUT:
            break
        await asyncio.sleep(0.1)
'''


@pytest.fixture(autouse=True)
def rollouts_write_down_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    if files_asked_for():
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (IN_FLEETS, ROOT))))


def a_spec(kind: str, mode: str, *, steps: int, rollouts: int) -> dict[str, Any]:
    """Take the example as it is, but for how long it trains and is evaluated: less shows the same."""
    python_of(kind)
    text = (EXAMPLE / f"{kind}.yaml").read_text()
    text = text.replace("{seed}", "0").replace("prepared/", f"{EXAMPLE}/prepared/")
    spec: dict[str, Any] = yaml.safe_load(text.replace("prepare.py", str(EXAMPLE / "prepare.py")))
    spec["name"] = "arithmetic"
    spec["optimisation"]["steps"] = steps
    spec["asynchrony"]["on_weight_update"] = mode
    if mode == "drain":
        spec["asynchrony"]["staleness_threshold"] = 0.0
    spec["evaluation"] |= {"every_versions": None, "max_rows": 256}
    spec["resources"] = {"rollouts": {"min": rollouts, "max": rollouts}}
    return spec


def hold_back(spec: dict[str, Any], directory: Path) -> Path:
    """Let a run make some steps, and go on when the file that is given is gone: a server takes a minute to start."""
    hold = directory / "hold"
    hold.touch()
    grader = HOLDING_GRADER.replace("HELD_OUT_FILE", spec["evaluation"]["path"]).replace("HELD_FROM", str(HELD_FROM))
    (directory / "hold.py").write_text(grader)
    path = f"{directory / 'hold.py'}:score"
    spec["reward"]["components"].append({"kind": "custom", "path": path, "timeout_seconds": RUN_SECONDS})
    return hold


def servers_of(run: Run) -> list[int]:
    """Find the first processes of the servers: children of the keepers of rollouts, which do not get our mark."""
    rollouts = [pid for pid, words in run.family().items() if "flotilla.services.rollout" in words]
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
    [path] = run.runs.glob("*/summary.json")
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def members_of_committed(run: Run) -> list[list[dict[str, Any]]]:
    """Read who took part in each committed publication."""
    with closing(sqlite3.connect(run.runs / "arithmetic" / "fleet" / "gateway.sqlite")) as database:
        rows = database.execute("SELECT members FROM publications WHERE phase = 'committed'")
        return [json.loads(members) for (members,) in rows]


def rollouts_of(run: Run) -> list[dict[str, Any]]:
    """Ask the gateway what its rollouts can do and what they say of themselves."""
    info = FleetInfo.read(run.runs / "arithmetic" / "fleet")
    headers = {"Authorization": f"Bearer {info.token}"}
    services = httpx.get(f"{info.gateway_url}/v1/services", headers=headers, timeout=60).raise_for_status().json()
    return [each for each in services["items"] if each["kind"] == "rollout"]


def serve_alike(run: Run) -> bool:
    """Whether every rollout serves the same version, and not the first one."""
    versions = {each["observed"]["policy_version"] for each in rollouts_of(run)}
    return len(versions) == 1 and bool(versions - {None, 0})


def soon(run: Run, condition: Callable[[], Any], what: str) -> None:
    """Wait for a state of a run that goes on; a look takes a part of what the run computes with."""

    def holds() -> Any:
        found = condition()
        assert found or run.process.poll() is None, run.said()
        return found

    until(holds, START_SECONDS, what, pause_seconds=1.0)


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
    spec = a_spec(kind, "interrupt", steps=16, rollouts=2)
    hold = hold_back(spec, tmp_path)
    run = Run(spec, tmp_path, tmp_path / "runs")
    try:
        soon(run, lambda: len(servers_of(run)) == 2, "two servers")
        run.until_it_says(r"step [1-9]\d*/")
        victim = servers_of(run)[0]
        os.kill(victim, signal.SIGKILL)
        soon(run, lambda: len(set(servers_of(run)) - {victim}) == 2, "another server")
        soon(run, lambda: serve_alike(run), "the rollout of the other server to have caught up")

        servers = servers_of(run)
        hold.unlink()
        summary = finish(run)
    finally:
        end(run)

    assert not any(psutil.pid_exists(server) for server in servers)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_on_drained_weights(tmp_path: Path, kind: str) -> None:
    run = Run(a_spec(kind, "drain", steps=10, rollouts=1), tmp_path, tmp_path / "runs")
    try:
        soon(run, lambda: servers_of(run), "a server")
        [found] = [each["capabilities"] for each in rollouts_of(run)]
        [offer] = [each for each in found["engines"] if each["kind"] == kind]
        assert offer["can_start"]
        assert ("sleep" in offer["capabilities"]) == bool(found["devices"]), "on a CPU it keeps its memory"

        summary = finish(run)
    finally:
        end(run)

    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_on_weights_swapped_in_place_though_a_rollout_is_killed_and_leaves_no_server(
    tmp_path: Path, kind: str
) -> None:
    run = Run(a_spec(kind, "continue", steps=10, rollouts=1), tmp_path, tmp_path / "runs")
    try:
        soon(run, lambda: servers_of(run), "a server")
        [server] = servers_of(run)
        keeper = psutil.Process(server).parent()
        assert keeper is not None
        rollout = keeper.parent()
        assert rollout is not None
        descendants = [keeper, *psutil.Process(server).children(recursive=True)]
        places = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{rollout.pid}-*"))
        soon(run, lambda: shared_memory_of(server) or kind != "sglang", "its shared memory to be noted")
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


SEEING_GRADER = f"""
def score(sample):
    named = [word for word in sample.response.split() if word in {list(COLOURS)}]
    return float(named[:1] == [sample.label])
"""
"""Whether the first colour that an answer names is the picture's."""


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_pictures_tell_though_answers_are_interrupted(tmp_path: Path, kind: str) -> None:
    python_with_torchvision(kind)
    # The narrowest heads and the smallest patches that both kinds have.
    spec = pictures_spec(tmp_path, hidden=128, patch=14)
    (tmp_path / "see.py").write_text(SEEING_GRADER)
    spec["reward"]["components"] = [{"kind": "custom", "path": f"{tmp_path / 'see.py'}:score"}]
    spec["rollout"] |= {"group_size": 8, "sampling": {"max_new_tokens": 16, "ignore_eos": True}}
    spec["rollout"]["engine"] = {"kind": kind, "slots": 64, "context_tokens": 128}
    spec["optimisation"]["steps"] = 20
    spec["evaluation"]["every_versions"] = None
    run = Run(spec, tmp_path, tmp_path / "runs")
    try:
        finish(run)
    finally:
        end(run)

    summary = check_seen(run, spec)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2, json.dumps(summary)
    metrics = metrics_of(run.runs / spec["name"])
    assert max(metrics["fully_async/partial/total_partial_num"].values()) > 0, "no answer was interrupted"


@pytest.mark.vllm
def test_it_learns_on_adapters_that_a_server_adds_itself_and_the_next_server_begins_with_the_current_ones(
    tmp_path: Path,
) -> None:
    spec = a_spec("vllm", "interrupt", steps=10, rollouts=1)
    spec["model"]["lora"] = {"rank": 16, "alpha": 32}
    spec["asynchrony"]["publication"] = {"lora": "adapters"}
    spec["optimisation"]["learning_rate"] = 1e-3
    hold = hold_back(spec, tmp_path)
    run = Run(spec, tmp_path, tmp_path / "runs")
    try:
        soon(run, lambda: servers_of(run), "a server")
        # An evaluation that is under way holds the version that it began with.
        soon(run, lambda: serve_alike(run), "a version of adapters to serve")
        [victim] = servers_of(run)
        os.kill(victim, signal.SIGKILL)
        soon(run, lambda: set(servers_of(run)) - {victim}, "another server")
        soon(run, lambda: serve_alike(run), "the rollout to have caught up")
        [observed] = [each["observed"] for each in rollouts_of(run)]
        assert observed["served"]["version"] == observed["policy_version"] and observed["served"]["digest"], observed
        hold.unlink()
        summary = finish(run)
    finally:
        end(run)

    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05


@pytest.mark.sglang
def test_it_learns_from_weights_that_the_trainer_sends_to_servers_of_which_one_is_killed(tmp_path: Path) -> None:
    spec = a_spec("sglang", "interrupt", steps=16, rollouts=2)
    spec["rollout"]["engine"]["update_weights_from"] = "distributed"
    run = Run(spec, tmp_path, tmp_path / "runs")
    try:
        soon(run, lambda: len(servers_of(run)) == 2, "two servers")
        run.until_it_says(r"step [1-9]\d*/")
        soon(run, lambda: any(len(each) == 2 for each in members_of_committed(run)), "a version for both")
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
