"""Two experiments on one fleet of scripted services: a rollout changes hands and back, and both ledgers are exact."""

from pathlib import Path

import pytest

from flotilla.services.gateway.state import GatewayState
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import FleetView
from tests.integration.gateway.fleet import (
    Scripted,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_spec,
    until,
)

pytestmark = pytest.mark.long

KINDS = (ScriptedRollout, ScriptedRollout, ScriptedRollout, ScriptedReward, ScriptedReward)
STEPS = 40


async def start(client: GatewayClient, folder: Path, name: str, **sections: object) -> str:
    optimisation = {"steps": STEPS, "groups_per_mini_batch": 2}
    spec = a_spec(folder, **({"name": name, "optimisation": optimisation} | sections))
    created = await client.call("POST", "/v1/experiments", body=spec, params={"start": True})
    return str(created["id"])


async def test_a_rollout_changes_hands_and_back_and_both_ledgers_are_exact(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, gateway = served
    async with a_fleet(url, redis_url, *KINDS, ScriptedTrainer, ScriptedTrainer) as services:
        trainers = [service for service in services if isinstance(service, ScriptedTrainer)]
        for trainer in trainers:
            trainer.waits_before = 5  # until all shares were seen
        only_rollouts = {"rewards": {"max": 1}}
        first = await start(client, tmp_path, "first", resources=only_rollouts | {"weight": 2.0})

        async def shares() -> dict[str, tuple[int, int]]:
            view = FleetView.model_validate(await client.call("GET", "/v1/fleet"))
            kinds = [(each.experiment_id, each.kinds["rollout"]) for each in view.experiments]
            return {name: (len(kind.services) - len(kind.leaving), kind.share) for name, kind in kinds}

        async def are(expected: dict[str, tuple[int, int]]) -> bool:
            return await shares() == expected

        await until(lambda: are({first: (3, 3)}))
        second = await start(client, tmp_path, "second", resources=only_rollouts)
        await until(lambda: are({first: (2, 2), second: (1, 1)}))
        for trainer in trainers:
            trainer.waits_before = None

        async def ended(name: str) -> bool:
            return (await client.call("GET", f"/v1/experiments/{name}"))["state"] in {"completed", "failed"}

        await until(lambda: ended(first))
        await until(lambda: ended(second))

        for name in (first, second):
            view = await client.call("GET", f"/v1/experiments/{name}")
            ledger = (await client.call("GET", f"/v1/experiments/{name}/ledger"))["train"]
            assert (view["state"], view["step"], view["policy_version"]) == ("completed", STEPS, STEPS), view
            assert ledger["balanced"] and (ledger["trained"], ledger["outstanding"]) == (2 * STEPS, 0)
        events = await gateway.store.events(first, after=0, limit=1000)
        asked = [event.data["reason"] for event in events if event.type == "service_asked_to_leave"]
        assert asked == ["another experiment needs it for its minimum"]
    for trainer in trainers:
        groups = [group for step in trainer.trained for group in step]
        assert sorted(groups) == list(range(2 * STEPS))


async def test_a_second_experiment_without_a_trainer_says_who_has_it(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, _ = served
    async with a_fleet(url, redis_url, *KINDS, ScriptedTrainer) as services:
        trainer = next(service for service in services if isinstance(service, ScriptedTrainer))
        trainer.waits_before = 3  # it has the trainer until it is stopped
        first = await start(client, tmp_path, "first")
        await until(lambda: trainer.step)
        second = await start(client, tmp_path, "second")

        async def problem() -> str | None:
            found = (await client.call("GET", f"/v1/experiments/{second}"))["problem"]
            return found["cause"] if found else None

        cause = await until(problem)
        assert cause == f"waiting for 1 trainer to register or to fall free: {first} has 1 trainer"
        patched = await client.call("PATCH", f"/v1/experiments/{first}", body={"resources": {"rollouts": {"max": 1}}})
        assert patched["spec"]["resources"]["rollouts"] == {"min": 1, "max": 1, "devices": "auto", "on_demand": 0}
        assert patched["revision"] == 1

        async def is_changed() -> bool:
            share = FleetView.model_validate(await client.call("GET", "/v1/fleet")).experiments[0].kinds["rollout"]
            return (len(share.services), share.max) == (1, 1)

        await until(is_changed)
        await client.call("POST", f"/v1/experiments/{first}/stop")

        async def runs() -> bool:
            return (await client.call("GET", f"/v1/experiments/{second}"))["state"] == "running"

        await until(runs)
        assert isinstance(services[0], Scripted)
