"""Trainer and engine of a real run record the steps that the spec and a person chose, and no others."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import hold_back, make_experiment, running_fleet, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HELD, STEPS, BY_SPEC, BY_REST, ENGINE_STEPS = 2, 10, 2, 9, 3


def annotations(trace: dict[str, Any]) -> list[str]:
    """List the names of the steps that a trace has, one for each."""
    names = [each["name"] for each in trace["traceEvents"] if each.get("cat") == "user_annotation"]
    return [name for name in names if re.match(r"step \d+$|engine step", name)]


def test_a_run_has_traces_of_the_chosen_steps_alone(tmp_path: Path) -> None:
    spec = make_experiment(
        tmp_path,
        optimisation={"steps": STEPS, "groups_per_mini_batch": 4},
        tracking={"profiler": {"steps": [BY_SPEC], "engine_versions": [1], "engine_steps": ENGINE_STEPS}},
    )
    hold = hold_back(spec, tmp_path, after_step=HELD)
    with running_fleet(tmp_path / "fleet") as fleet:
        client = httpx.Client(base_url=fleet.url, headers={"Authorization": f"Bearer {fleet.token}"}, timeout=30)
        with client:
            made = client.post("/v1/experiments?start=true", json=spec)
            assert made.is_success, made.text
            path = f"/v1/experiments/{made.json()['id']}"

            def profiles() -> dict[str, Any]:
                return {each["name"]: each for each in client.get(f"{path}/profiles").json()["items"]}

            until(lambda: client.get(path).json()["step"] >= HELD, 150, "the first steps", pause_seconds=0.2)
            live = {"steps": [BY_SPEC, BY_REST], "engine_versions": [1, BY_REST - 1]}
            changed = client.patch(path, json={"tracking": {"profiler": live}})
            assert changed.is_success, changed.text
            hold.unlink()
            until(lambda: client.get(path).json()["state"] == "completed", 150, "the end", pause_seconds=0.5)
            until(lambda: len(profiles()) == 4, 30, "the last trace", pause_seconds=0.5)
            found = profiles()
            traces = {}
            for name, each in found.items():
                answer = client.get(f"{path}/profiles/{name}")
                assert answer.is_success and len(answer.content) == each["size_bytes"]
                assert Path(each["path"]).read_bytes() == answer.content
                traces[re.sub(r"-(rank|process).*", "", name)] = json.loads(gzip.decompress(answer.content))
            assert client.get(f"{path}/profiles/trainer-step00000001-rank0.json.gz").status_code == 404

    assert {name: set(annotations(trace)) for name, trace in traces.items()} == {
        f"trainer-step{BY_SPEC:08d}": {f"step {BY_SPEC}"},
        f"trainer-step{BY_REST:08d}": {f"step {BY_REST}"},
        "engine-version00000001": {"engine step, version 1"},
        f"engine-version{BY_REST - 1:08d}": {f"engine step, version {BY_REST - 1}"},
    }
    for name, trace in traces.items():
        # Fewer of the engine's where a busy machine takes long to end a recording.
        assert 1 <= len(annotations(trace)) <= (1 if name.startswith("trainer") else ENGINE_STEPS)
        operations = {each["name"] for each in trace["traceEvents"] if each.get("cat") == "cpu_op"}
        assert any(each.startswith("aten::") for each in operations)
        assert ("Optimizer" in " ".join(operations) or any("backward" in each.lower() for each in operations)) == (
            name.startswith("trainer")
        )
