"""On-policy with a fixed seed, faults outside the trainer change nothing: the same groups in the same order, the same
losses, step by step, whatever dies.

The completions have to be the same to the last bit for that: their randomness is a function of seed, group, index and
position, and ``rollout.engine.batch_invariant`` makes the arithmetic independent of what else is in the batch.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.faults import test_continue as continuing
from tests.faults.test_kill import patiently, until_completed, until_step
from tests.fleet import RunningFleet, hold_back, make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

STEPS_BETWEEN = 3
LAST_STEPS = 5
KILLED_RUNS_STEPS = 8
VICTIMS = (
    "flotilla.services.rollout",
    "flotilla.services.rollout.engines.process.child",
    "flotilla.services.reward",
    "flotilla.services.gateway",
    "valkey-server",
    "flotilla.services.rollout.engines.process.child",
    "valkey-server",
)
"""Each process, and some again."""
COMPARED = ("loss/total", "grad_norm", "reward/mean", "completion_tokens/mean", "advantage/mean_square")
TOLERANCE = 1e-6


async def curve_of(
    client: GatewayClient, experiment_id: str, steps: int, names: Sequence[str] = COMPARED
) -> dict[int, dict[str, Any]]:
    """Read what each step trained, and with which result."""
    curve: dict[int, dict[str, Any]] = {}
    for step in range(1, steps + 1):
        plan = await patiently(client, f"/v1/experiments/{experiment_id}/steps/{step}")
        curve[step] = {"groups": plan["group_ids"], "version": plan["version"], "tokens": plan["token_count"]}
    page = await client.call(
        "GET", f"/v1/experiments/{experiment_id}/metrics", params={"names": ",".join(names), "limit": 2000}
    )
    for point in page["items"]:
        curve[point["step"]][point["name"]] = point["value"]
    return curve


async def start(client: GatewayClient, spec: dict[str, Any]) -> str:
    view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
    await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
    return str(view["id"])


async def kill_in_turn(
    fleet: RunningFleet, client: GatewayClient, experiment_id: str, victims: Sequence[str], held_steps: int
) -> None:
    """Kill one process after the other while training goes on."""
    step = 1
    for victim in victims:
        view = await until_step(client, experiment_id, step)
        fleet.kill(victim)
        await asyncio.sleep(0.05)
        step = min(view["step"] + STEPS_BETWEEN, held_steps)


@pytest.fixture(scope="module")
def quiet() -> continuing.Curve:
    """What is measured of a run that nothing ends: filled by the first test, empty where another is run alone."""
    return {}


async def test_faults_do_not_change_the_losses(tmp_path: Path, quiet: continuing.Curve) -> None:
    # The last steps wait until everybody was killed.
    held_steps = STEPS_BETWEEN * len(VICTIMS) - 1
    steps = held_steps + LAST_STEPS
    spec = make_experiment(
        tmp_path,
        rollout={"engine": {"slots": 16, "context_tokens": 128, "batch_invariant": True}},
        resources={"rollouts": {"min": 2}},
        optimisation={"steps": steps, "learning_rate": 1e-3},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
    )
    with running_fleet(tmp_path / "fleet", rollouts=2) as fleet:
        async with fleet.client() as client:
            undisturbed = await start(client, spec)
            await until_completed(client, undisturbed)
            without = await curve_of(client, undisturbed, steps)
            quiet |= {step: {name: found[name] for name in continuing.COMPARED} for step, found in without.items()}
            hold = hold_back(spec, tmp_path, after_step=held_steps)
            faulty = await start(client, spec)
            await kill_in_turn(fleet, client, faulty, VICTIMS, held_steps)
            hold.unlink()
            view = await until_completed(client, faulty)
            under = await curve_of(client, faulty, steps)
            ledger = (await patiently(client, f"/v1/experiments/{faulty}/ledger"))["train"]

    assert view["step"] == steps
    assert ledger["balanced"]
    assert ledger["trained"] == steps * spec["optimisation"]["groups_per_mini_batch"]
    for step in range(1, steps + 1):
        assert {**without[step], **dict.fromkeys(COMPARED)} == {**under[step], **dict.fromkeys(COMPARED)}
        for name in COMPARED:
            assert under[step][name] == pytest.approx(without[step][name], abs=TOLERANCE, rel=TOLERANCE), (step, name)
    # A curve that stood still would be equal, too.
    assert len({without[step]["loss/total"] for step in without}) > steps // 2


def test_a_killed_run_takes_its_processes_with_it_and_goes_on(tmp_path: Path, quiet: continuing.Curve) -> None:
    with continuing.a_terminal(tmp_path) as terminal:
        continuing.end_at((("kill its owner", 3),), terminal, KILLED_RUNS_STEPS, quiet or None)
