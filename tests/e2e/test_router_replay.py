"""A whole fleet replays the experts that its engine chose: on-policy, and while answers are interrupted."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.net.client.client import GatewayClient
from tests.e2e.test_parallel_fleets import TOLERANCE, an_experiment, with_model
from tests.faults.test_kill import patiently, until_completed
from tests.fleet import running_fleet
from tests.integration.trainer.architectures import ARCHITECTURES

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 4
SCORED, DISAGREEMENT, BYTES = "correction/log_ppl_abs_diff", "router/disagreement", "router/record_bytes_per_token"


async def measured(client: GatewayClient, spec: dict[str, Any]) -> dict[str, list[float]]:
    """Run an experiment to its end; nothing of it may have failed. Return its series of what concerns routers."""
    view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
    path = f"/v1/experiments/{view['id']}"
    await client.call("POST", f"{path}/start", deadline_seconds=60)
    await until_completed(client, view["id"])
    ledger = (await patiently(client, f"{path}/ledger"))["train"]
    assert ledger["balanced"]
    assert not ledger["failed"]
    names = ",".join((SCORED, DISAGREEMENT, BYTES))
    page = await client.call("GET", f"{path}/metrics", params={"names": names, "limit": 2000})
    found: dict[str, list[float]] = {}
    for point in page["items"]:
        found.setdefault(point["name"], []).append(point["value"])
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys((SCORED, DISAGREEMENT, BYTES), STEPS)
    return found


async def test_a_fleet_replays_what_its_engine_chose(tmp_path: Path) -> None:
    model = with_model(tmp_path / "experts", ARCHITECTURES["Qwen3-MoE"])
    replayed = {"algorithm": {"old_log_probs": "recompute", "router_replay": "R3"}}
    on_policy = an_experiment(tmp_path, model, replayed)
    on_policy["optimisation"]["steps"] = on_policy["checkpoint"]["every_steps"] = STEPS
    interrupted = an_experiment(tmp_path, model, replayed)
    interrupted["optimisation"] |= {"steps": STEPS, "learning_rate": 1e-2}
    interrupted["checkpoint"]["every_steps"] = STEPS
    interrupted["asynchrony"] = {"staleness_threshold": 1.0, "on_weight_update": "interrupt"}
    interrupted["rollout"]["engine"]["slots"] = 8

    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            alike = await measured(client, on_policy)
            apart = await measured(client, interrupted)

    assert max(alike[SCORED]) <= TOLERANCE
    # Two scores that are equal but for rounding may still change places.
    assert max(alike[DISAGREEMENT]) < 0.01
    # Two layers, two experts of each, and what compression makes of it.
    assert 0 < max(alike[BYTES] + apart[BYTES]) < 40
    assert max(apart[DISAGREEMENT]) > 0
