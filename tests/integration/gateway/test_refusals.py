"""A Redis server that refuses for a reason of its own: the experiment waits, says why, and goes on."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.redis_server import LocalRedis
from flotilla.services.gateway.runtime import data_plane
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.net.client.client import GatewayClient
from tests.integration.gateway.fleet import (
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_gateway,
    a_spec,
    until,
)
from tests.integration.gateway.test_faults import optimisation, started, wait_for
from tests.integration.streams.refusals import REFUSALS, small_disk


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "DEADLINE_SECONDS", 1.0)


async def problem_of(client: GatewayClient, path: str, component: str | None) -> dict[str, Any]:
    """Wait until the experiment has a problem of this component, or none; return the view."""

    async def look() -> Any:
        view = await client.call("GET", path)
        assert view["state"] not in {"failed", "completed"}, view["problem"]
        return view if (view["problem"] or {}).get("component") == component else None

    view: dict[str, Any] = await until(look)
    return view


@pytest.mark.parametrize(
    "code",
    ["MISCONF", "BUSY", *(pytest.param(code, marks=pytest.mark.long) for code in ("NOREPLICAS", "READONLY", "OOM"))],
)
async def test_an_experiment_waits_names_the_condition_and_goes_on(tmp_path: Path, code: str) -> None:
    refusal, name = REFUSALS[code]
    with small_disk(tmp_path / "disk") as disk, LocalRedis(disk / "redis") as server:
        settings = GatewaySettings(token=TOKEN, redis_url=server.url, data=tmp_path / "data", teardown_seconds=5.0)
        async with (
            a_gateway(settings) as (url, _),
            GatewayClient(url, TOKEN) as client,
            a_fleet(url, server.url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services,
        ):
            trainer = services[2]
            trainer.waits_before = 4
            path = await started(client, a_spec(tmp_path, optimisation=optimisation(8)))
            await until(lambda: trainer.step == 3)

            async with refusal(server.url, disk / "redis"):
                named = await problem_of(client, path, "redis")
            after = await problem_of(client, path, None)
            trainer.waits_before = None

            view = await wait_for(client, path, "completed", "failed")
            ledger = (await client.call("GET", f"{path}/ledger"))["train"]
    assert name in named["problem"]["cause"]
    assert (named["state"], after["state"]) == ("running", "running")
    assert view["state"] == "completed", view["problem"]
    assert ledger["balanced"] and (ledger["trained"], ledger["outstanding"]) == (16, 0)


async def test_an_experiment_that_is_stopped_meanwhile_ends_when_there_is_room(tmp_path: Path) -> None:
    refusal, name = REFUSALS["MISCONF"]
    with small_disk(tmp_path / "disk") as disk, LocalRedis(disk / "redis") as server:
        settings = GatewaySettings(token=TOKEN, redis_url=server.url, data=tmp_path / "data", teardown_seconds=1.0)
        async with (
            a_gateway(settings) as (url, _),
            GatewayClient(url, TOKEN) as client,
            a_fleet(url, server.url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services,
        ):
            trainer = services[2]
            trainer.waits_before = 4
            path = await started(client, a_spec(tmp_path, optimisation=optimisation(8)))
            await until(lambda: trainer.step == 3)

            async with refusal(server.url, disk / "redis"):
                await client.call("POST", f"{path}/stop")
                named = await problem_of(client, path, "redis")

            view = await wait_for(client, path, "stopped", "failed")
            ledger = (await client.call("GET", f"{path}/ledger"))["train"]
    assert name in named["problem"]["cause"]
    assert (view["state"], view["problem"]) == ("stopped", None)
    assert ledger["balanced"] and ledger["outstanding"] == 0
