"""A real run whose grader is gamed: its audit pauses it with examples, and its receipt holds until a byte changes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.receipts import FOLDER
from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from tests.fleet import FLOTILLA, ROOT, make_experiment, running_fleet, until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

MOST_VERSIONS = 10
GROUPS = 16
ENGINE = {"slots": 32, "context_tokens": 128, "threads": 1}
REWARD = {
    # Right is whatever has a last number; the audit wants the one that the problem has.
    "components": [{"kind": "regex", "pattern": r"\d\D*$"}],
    # More than are audited before a first version: something is trained, and so has a receipt.
    "audit": {"share": 0.5, "bound": 0.05, "min_groups": 20, "components": [{"kind": "numeric"}]},
}


def paused_run(directory: Path) -> dict[str, Any]:
    """Train until the audit has paused the run, with all steps published; gives the experiment's view."""
    spec = make_experiment(
        directory,
        rollout={"group_size": 8, "sampling": {"max_new_tokens": 24}, "engine": ENGINE},
        reward=REWARD,
        optimisation={"steps": 400, "groups_per_mini_batch": GROUPS},
        checkpoint={"every_steps": 1},
    )
    with running_fleet(directory / "fleet") as fleet:
        headers = {"Authorization": f"Bearer {fleet.token}"}
        with httpx.Client(base_url=fleet.url, headers=headers, timeout=30) as client:
            made = client.post("/v1/experiments?start=true", json=spec)
            assert made.is_success, made.text
            path = f"/v1/experiments/{made.json()['id']}"

            def rested() -> dict[str, Any] | None:
                view: dict[str, Any] = client.get(path).json()
                assert view["state"] in {"starting", "running", "paused"}, view
                if view["state"] != "paused" or view["policy_version"] != view["step"]:
                    return None
                # A trainer that waits for groups is at rest, too: nobody makes any.
                (rollout,) = view["services"]["rollout"]
                is_paused = client.get(f"/v1/services/{rollout}").json()["observed"]["state"] == "paused"
                return view if is_paused else None

            view: dict[str, Any] = until(rested, 200, "the audit's pause", pause_seconds=0.2)
    return view


def receipt(*arguments: object) -> tuple[int, dict[str, Any]]:
    command = [*FLOTILLA, "receipt", *map(str, arguments), "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_an_audit_pauses_a_gamed_run_at_a_version_and_its_receipt_finds_a_changed_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    view = paused_run(tmp_path)

    assert 1 <= view["policy_version"] <= MOST_VERSIONS
    finding = next(each for each in view["health"] if each["check"] == "graders_disagree")
    assert finding["figures"]["disagreement_at_least"] > REWARD["audit"]["bound"]  # type: ignore[index]
    assert finding["samples"]
    assert all(each["reward"] != each["audit_reward"] for each in finding["samples"])

    directory = Path(view["directory"])
    newest = next(iter(complete(directory / CHECKPOINTS)))
    # A step that was under way when it was paused ends with the fleet.
    assert view["step"] <= newest.step <= view["step"] + 1
    code, written = receipt(newest.path)
    assert (code, written["step"], written["missing_steps"]) == (0, newest.step, [])
    file = directory / FOLDER / f"{newest.path.name}.jsonl"
    code, checked = receipt("--verify", file)
    assert (code, checked["problems"]) == (0, [])

    weights = max(newest.path.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
    with weights.open("r+b") as content:
        content.seek(-1, 2)
        (last,) = content.read(1)
        content.seek(-1, 2)
        content.write(bytes([last ^ 1]))
    code, checked = receipt("--verify", file)
    assert code == 1
    assert any("weights" in problem for problem in checked["problems"])
