"""Which calls of a trainer take the short way, and what they are answered."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.routes import trainer_calls
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.schemas.publication import PublicationReport, ReceiveState, Transport
from flotilla.shared.schemas.service import Capabilities, ObservedState, ServiceKind, WorkState
from tests.unit.gateway.builders import a_gateway, a_manifest, add_experiment, add_service, say, turns

BATCH = {"step": 1, "version": 0, "values": {"loss/total": 0.5}}
METRICS = "/v1/experiments/tiny-1/metrics"
PUBLICATIONS = "/v1/experiments/tiny-1/publications"
SHARED = Capabilities(shared_memory="here", live_changes=True)


class Trainer:
    """A gateway with an experiment, its trainer and a rollout, and the trainer's client."""

    def __init__(self, gateway: GatewayState, app: FastAPI, rollout: str, token: str) -> None:
        self.gateway, self.rollout = gateway, rollout
        self.routed: list[str] = []
        framework = FastAPI.build_middleware_stack

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"state": {"gateway": gateway}}, receive, send)

        def noting(app: FastAPI) -> Any:
            inner = framework(app)

            async def call(scope: Any, receive: Any, send: Any) -> None:
                self.routed.append(scope["path"])
                await inner(scope, receive, send)

            return call

        self.noting = noting
        headers = {"Authorization": f"Bearer {token}"}
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://x", headers=headers)

    async def receives(self, version: int) -> None:
        """Let the rollout say that it has mapped a version."""
        report = PublicationReport(
            version=version, epoch=1, state=ReceiveState.RECEIVED, checksum=a_manifest(version).checksum
        )
        observed = ObservedState(
            experiment_id="tiny-1", state=WorkState.RUNNING, policy_version=version - 1, publication=report
        )
        await say(self.gateway, self.rollout, observed)


@pytest.fixture
async def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    gateway = a_gateway()
    await add_experiment(gateway)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", "tiny-1", capabilities=SHARED)
    service = await add_service(gateway, ServiceKind.TRAINER, "t", "tiny-1", capabilities=SHARED)
    token = gateway.tokens.assignment_of(service, "tiny-1", 0)
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))
    made = Trainer(gateway, app, rollout, token)
    monkeypatch.setattr(FastAPI, "build_middleware_stack", made.noting)
    return made


def announcement(version: int = 1) -> dict[str, Any]:
    manifest = a_manifest(version).model_copy(update={"image_path": "/dev/shm/image"})
    return {"manifest": manifest.model_dump(mode="json"), "step": version}


async def test_figures_are_stored_without_the_framework_and_once_for_a_key(trainer: Trainer) -> None:
    headers = {"Idempotency-Key": "one"}
    first = await trainer.client.post(METRICS, json=BATCH, headers=headers)
    again = await trainer.client.post(METRICS, json=BATCH, headers=headers)
    other = await trainer.client.post(METRICS, json={**BATCH, "step": 2}, headers=headers)

    assert (first.status_code, first.json(), first.headers["content-type"]) == (201, {"stored": 1}, "application/json")
    assert (again.status_code, again.content) == (201, first.content)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
    assert trainer.routed == []
    rows = await trainer.gateway.store.metrics("tiny-1", names=[], after=0, limit=9)
    assert [(point.name, point.step) for _, point in rows] == [("loss/total", 1)]


async def test_a_version_is_announced_and_watched_as_by_the_routes(trainer: Trainer) -> None:
    first = await trainer.client.post(PUBLICATIONS, json=announcement())
    seen = first.json()
    query = {"wait": "5.0", "phase": seen["phase"], "epoch": seen["epoch"]}
    watching = asyncio.create_task(trainer.client.get(f"{PUBLICATIONS}/1", params=query))
    await turns()
    assert not watching.done()
    await trainer.receives(1)
    watched = await watching
    routed = await trainer.client.get(f"{PUBLICATIONS}/01", params={"other": "1"})

    assert first.status_code == 201
    assert seen["members"][0]["transport"] == Transport.SHARED_MEMORY.value
    assert watched.json()["phase"] == "committed"
    assert (watched.status_code, watched.json()) == (200, routed.json())
    assert trainer.routed == [f"{PUBLICATIONS}/01"]


async def test_an_announcement_may_wait_for_members_that_map_the_image(trainer: Trainer) -> None:
    headers = {"Idempotency-Key": "one"}
    announcing = asyncio.create_task(
        trainer.client.post(PUBLICATIONS, json=announcement(), params={"wait": 5.0}, headers=headers)
    )
    await turns()
    assert not announcing.done()
    await trainer.receives(1)
    answer = await announcing
    again = await trainer.client.post(PUBLICATIONS, json=announcement(), params={"wait": 5.0}, headers=headers)

    assert (answer.status_code, answer.json()["phase"]) == (201, "committed")
    # What it was at first: whoever sends it again watches it.
    assert (again.status_code, again.json()["phase"]) == (201, "transferring")


async def test_an_announcement_does_not_wait_where_the_trainer_has_to_send(trainer: Trainer) -> None:
    body = announcement()
    del body["manifest"]["image_path"]
    gloo = await add_service(
        trainer.gateway, ServiceKind.ROLLOUT, "g", "tiny-1", capabilities=Capabilities(transports=("gloo",))
    )
    service = trainer.gateway.registry.trainer_of("tiny-1")
    assert service is not None
    service.capabilities = Capabilities(transports=("gloo",))

    async with asyncio.timeout(30):
        answer = await trainer.client.post(PUBLICATIONS, json=body, params={"wait": 30.0})

    assert answer.json()["phase"] == "preparing"
    assert [(each["service_id"], each["rank"]) for each in answer.json()["members"]] == [(gloo, 1)]


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", METRICS, {"json": {**BATCH, "step": -1}}, 422),
        ("POST", METRICS, {"content": b"{", "headers": {"Content-Type": "application/json"}}, 422),
        ("POST", METRICS, {"json": BATCH, "params": {"wait": 1}}, 201),
        ("POST", METRICS, {"content": json.dumps(BATCH), "headers": {"Content-Type": "text/plain"}}, 422),
        ("POST", PUBLICATIONS, {"json": announcement(), "params": {"wait": "soon"}}, 422),
        ("POST", PUBLICATIONS, {"json": announcement(), "params": {"wait": "-1"}}, 422),
        ("GET", f"{PUBLICATIONS}/1", {"params": {"phase": "none"}}, 422),
        ("GET", f"{PUBLICATIONS}/1", {"params": {"epoch": "x"}}, 422),
        ("GET", f"{PUBLICATIONS}/one", {}, 422),
        ("GET", METRICS, {}, 403),
    ],
)
async def test_every_other_call_goes_on_whole_to_the_routes(
    trainer: Trainer, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    answer = await trainer.client.request(method, path, **options)

    assert answer.status_code == status, answer.text
    assert trainer.routed == ([] if status == 403 else [path])


async def test_refusals_are_the_routes_problems(trainer: Trainer) -> None:
    not_finite = await trainer.client.post(
        METRICS, content=b'{"step":1,"version":0,"values":{"a":NaN}}', headers={"Content-Type": "application/json"}
    )
    missing = await trainer.client.get(f"{PUBLICATIONS}/7")
    experiment = trainer.gateway.repository.get("tiny-1")
    experiment.record = replace(experiment.record, trainer_epoch=9)
    replaced = await trainer.client.post(METRICS, json=BATCH)

    assert (not_finite.status_code, not_finite.json()["errors"][0]["path"]) == (422, "values.a")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert (replaced.status_code, replaced.json()["code"]) == (409, "not_assigned")
    assert trainer.routed == []


def test_every_kind_of_call_is_a_route_of_the_framework() -> None:
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))
    routes = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    for kind in trainer_calls.KINDS:
        assert any(
            method == kind.method and kind.path.fullmatch(path.replace("{version}", "1")) for method, path in routes
        )
