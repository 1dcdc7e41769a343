"""A whole experiment through a real gateway, a real data plane and scripted services."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.client.client import GatewayClient
from tests.integration.gateway.fleet import (
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_gateway,
    a_spec,
    until,
)


def settings_of(tmp_path: Path, redis_url: str) -> GatewaySettings:
    return GatewaySettings(token=TOKEN, redis_url=redis_url, data=tmp_path / "data")


async def path_when_ended(client: GatewayClient, spec: dict[str, Any]) -> str:
    """Start an experiment, wait for its end, and give its path."""
    created = await client.call("POST", "/v1/experiments", body=spec, params={"start": True})
    path = f"/v1/experiments/{created['id']}"

    async def ended() -> bool:
        return (await client.call("GET", path))["state"] in {"completed", "failed"}

    await until(ended)
    return path


async def test_an_experiment_trains_evaluates_and_completes(tmp_path: Path, redis_url: str) -> None:
    spec = a_spec(tmp_path, evaluation={"path": str(tmp_path / "heldout.jsonl"), "every_versions": 1})
    async with (
        a_gateway(settings_of(tmp_path, redis_url)) as (url, _),
        GatewayClient(url, TOKEN) as client,
        ScriptedRollout(url, redis_url),
        ScriptedReward(url, redis_url),
        ScriptedTrainer(url, redis_url) as trainer,
    ):
        path = await path_when_ended(client, spec)
        view = await client.call("GET", path)
        ledger = await client.call("GET", f"{path}/ledger")
        metrics = (await client.call("GET", f"{path}/metrics"))["items"]
    assert view["state"] == "completed", view
    assert (view["step"], view["policy_version"], view["problem"], view["services"]) == (2, 2, None, {})
    train, evaluation = ledger["train"], ledger["evaluation"]
    assert train["balanced"] and evaluation["balanced"]
    assert (train["issued"], train["trained"], train["outstanding"]) == (4, 4, 0)
    assert isinstance(trainer, ScriptedTrainer)
    assert sorted(each for step in trainer.trained for each in step) == [0, 1, 2, 3]
    assert trainer.lags == [0, 0, 0, 0]
    accuracy = {m["version"]: m["value"] for m in metrics if m["name"] == "evaluation/accuracy"}
    assert accuracy[0] == pytest.approx(1.0) and accuracy[2] == pytest.approx(1.0)
    assert [m["step"] for m in metrics if m["name"] == "loss"] == [1, 2]


async def test_an_evaluation_alone_completes_without_a_trainer(tmp_path: Path, redis_url: str) -> None:
    spec = a_spec(tmp_path, job={"kind": "evaluation"}, data={}, evaluation={"path": str(tmp_path / "heldout.jsonl")})
    del spec["optimisation"], spec["checkpoint"]
    async with (
        a_gateway(settings_of(tmp_path, redis_url)) as (url, _),
        GatewayClient(url, TOKEN) as client,
        ScriptedRollout(url, redis_url),
        ScriptedReward(url, redis_url),
    ):
        path = await path_when_ended(client, spec)
        view = await client.call("GET", path)
        ledger = await client.call("GET", f"{path}/ledger")
        metrics = (await client.call("GET", f"{path}/metrics"))["items"]
        with pytest.raises(InvalidSpec, match=r"optimisation\.steps"):
            await client.call("POST", f"{path}/extend", body={"steps": 3})
    assert view["state"] == "completed", view
    assert (view["step"], view["total_steps"], view["policy_version"], view["services"]) == (0, 0, 0, {})
    assert ledger["evaluation"]["trained"] == 3 and ledger["evaluation"]["balanced"]
    assert ledger["train"]["issued"] == 0
    assert {m["name"]: m["value"] for m in metrics}["evaluation/accuracy"] == pytest.approx(1.0)
