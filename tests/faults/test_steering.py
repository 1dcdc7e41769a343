"""Settings of a running experiment change, and its gateway is killed between the record and what comes of it."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.trainer.replay.replay import replay
from flotilla.services.trainer.replay.tokens import take_apart
from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import RunningFleet, hold_back, make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

PATIENCE_SECONDS = 200
BONUS = "reward.components.1.weight"
RATE, TEMPERATURE = "optimisation.learning_rate", "rollout.sampling.temperature"
FILTER = {"kind": "mean_in_range", "low": 3.3, "high": 3.9}
"""Of the changed rewards, each 3 or 4, keeps groups in which two or three answers are right."""
STEPS = 5
HELD_AFTER = 2


async def until_step(client: GatewayClient, path: str, step: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            view: dict[str, Any] = await client.call("GET", path, deadline_seconds=PATIENCE_SECONDS)
            assert view["state"] in {"starting", "running", "stopping", "completed"}, view["problem"]
            if min(view["step"], view["policy_version"]) >= step:
                return
            await asyncio.sleep(0.1)


async def rates_of(client: GatewayClient, path: str) -> dict[int, float]:
    """Return the learning rate by step, once the last step's is there: series are sent behind the steps."""
    async with asyncio.timeout(60):
        while True:
            points = (await client.call("GET", f"{path}/metrics", params={"limit": 1000}))["items"]
            rates = {point["step"]: point["value"] for point in points if point["name"] == "learning_rate"}
            if STEPS in rates:
                return rates
            await asyncio.sleep(0.2)


async def change_and_kill(fleet: RunningFleet, client: GatewayClient, path: str) -> list[dict[str, Any]]:
    """Change two settings, and kill the gateway before the trainer, which sleeps, can have heard of it."""
    changes = {
        "optimisation": {"learning_rate": 5e-5},
        "rollout": {"sampling": {"temperature": 0.5}},
        "data": {"sources": {"0": {"weight": 0}, "1": {"weight": 1}}},
        "reward": {"components": {"1": {"weight": 3}}, "group_filter": FILTER},
    }
    workers = fleet.pids("flotilla.services.trainer")
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    changed = await client.call("PATCH", path, body=changes, deadline_seconds=60)
    fleet.kill("flotilla.services.gateway")
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    found: list[dict[str, Any]] = changed["changes"]
    return found


async def test_a_change_is_in_record_series_lineage_and_checkpoint_though_the_gateway_is_killed(tmp_path: Path) -> None:
    spec = make_experiment(
        tmp_path,
        optimisation={"steps": STEPS, "learning_rate": 1e-4},
        asynchrony={"staleness_threshold": 0.0},
        checkpoint={"every_steps": 1, "keep": 9},
    )
    spec["asynchrony"].pop("on_weight_update")
    num_rows = len(Path(spec["data"]["path"]).read_text().splitlines())
    path = spec["data"].pop("path")
    spec["data"]["sources"] = [{"path": path, "weight": 1.0}, {"path": path, "weight": 0.0}]
    hold = hold_back(spec, tmp_path, after_step=HELD_AFTER)
    spec["reward"]["components"].append({"kind": "constant", "value": 1.0, "weight": 0.0})
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            made = await client.call("POST", "/v1/experiments", body=spec, params={"start": True}, deadline_seconds=60)
            path = f"/v1/experiments/{made['id']}"
            await until_step(client, path, HELD_AFTER)
            recorded = await change_and_kill(fleet, client, path)
            hold.unlink()
            await until_step(client, path, STEPS)

            found = {each["effect"]: each for each in (await client.call("GET", f"{path}/changes"))["items"]}
            rates = await rates_of(client, path)
            steps = [await client.call("GET", f"{path}/steps/{step}") for step in range(1, STEPS + 1)]
            events = {each["type"] for each in (await client.call("GET", f"{path}/log"))["items"]}

    # The record: the trainer's change waits for a version that it has not begun.
    assert {each["effect"]: each["version"] for each in recorded} == {"trainer": None, "group": HELD_AFTER}
    rate, temperature = found["trainer"], found["group"]
    assert rate["keys"] == [{"path": RATE, "before": 1e-4, "after": 5e-5}]
    assert {key["path"]: (key["before"], key["after"]) for key in temperature["keys"]} == {
        TEMPERATURE: (1.0, 0.5),
        "data.sources.0.weight": (1.0, 0.0),
        "data.sources.1.weight": (0.0, 1.0),
        BONUS: (0.0, 3.0),
        "reward.group_filter": (None, FILTER | {"keep_single": False, "metric": None}),
    }
    first = rate["version"]
    assert first in {HELD_AFTER, HELD_AFTER + 1} and temperature["version"] == HELD_AFTER
    assert {"settings_changed", "settings_held"} <= events

    # The series, and the steps' lineage: version V is trained by step V + 1.
    assert rates == {step: 1e-4 if step <= first else 5e-5 for step in range(1, STEPS + 1)}
    has_rate = [rate["id"] in {each["id"] for each in step["changes"]} for step in steps]
    assert has_rate == [step["version"] >= first for step in steps]

    # Checkpoints: the one of the version itself may have been written before the change began to hold.
    [experiment] = (tmp_path / "fleet" / "experiments").iterdir()
    kept = [json.loads(each.read_text()) for each in experiment.glob("checkpoints/step-*/state.json")]
    assert {state["step"] for state in kept} >= {HELD_AFTER, STEPS}
    for state in kept:
        assert state["spec"]["optimisation"]["learning_rate"] == rates[state["step"]]
        if state["version"] != first:
            assert (rate["id"] in {each["id"] for each in state.get("changes", ())}) is (state["version"] > first)

    # Groups carry the temperature that they were sampled at, at which the trainer scores them too.
    again = await asyncio.to_thread(replay, experiment, STEPS)
    assert again.is_equal and again.spec.optimisation.learning_rate == 5e-5
    assert {kept.group.task.settings.get(TEMPERATURE) for kept in again.groups} == {0.5}
    # Rows are of the source that has weight now, from the group on that the record names, and rewards likewise.
    assert temperature["group_id"] <= min(kept.group.task.group_id for kept in again.groups)
    assert all(kept.group.task.row >= num_rows for kept in again.groups)
    for kept in again.groups:
        for trajectory in kept.group.trajectories:
            assert trajectory.reward == trajectory.components["custom"] + 3 * trajectory.components["constant"]
        rewards = [trajectory.reward for trajectory in kept.group.trajectories]
        assert 3.3 < sum(map(float, rewards)) / len(rewards) < 3.9, "trained by the rules that the group carries"
    rows = [row for kept in again.groups for row in take_apart(again, kept.group.task.group_id, 0)]
    gaps = [abs(row.sampled - row.now) for row in rows if row.now is not None]
    assert gaps and max(gaps) < 1e-3
