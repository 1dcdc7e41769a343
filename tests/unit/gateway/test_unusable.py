"""A stored spec that a newer rule refuses concerns its own experiment, and nobody else's."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PutRecord
from flotilla.shared.config.revisions import REVISION
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.config.test_revisions import an_old_spec
from tests.unit.gateway.builders import a_gateway, a_record, a_registration, a_spec

REFUSED = a_spec().model_dump(mode="json") | {"key_of_before": {"token": "secret"}}
HEADERS = {"Authorization": "Bearer t"}


async def restarted(store: MemoryStore) -> GatewayState:
    """Start a gateway on what another left."""
    gateway = a_gateway(store)
    await gateway.repository.load()
    await gateway.registry.load()
    await gateway.publications.load()
    return gateway


@pytest.fixture
async def gateway() -> GatewayState:
    store = MemoryStore()
    records = [
        a_record("refused-1", name="refused", state=ExperimentState.COMPLETED, final_ledger={}, spec=REFUSED, number=1),
        a_record("good-1", state=ExperimentState.RUNNING, number=2),
        a_record("later-1", name="later", spec_revision=REVISION + 1, number=7),
        a_record("old-1", spec=an_old_spec(), spec_revision=0, number=4),
    ]
    await store.apply([PutRecord(record) for record in records])
    return await restarted(store)


@pytest.fixture
async def client(gateway: GatewayState) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(gateway.settings)

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    transport = httpx.ASGITransport(with_state)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=HEADERS) as client:
        yield client


async def test_it_is_shown_with_its_problem_and_the_others_go_on(client: httpx.AsyncClient) -> None:
    listed = {each["id"]: each for each in (await client.get("/v1/experiments")).json()["items"]}
    shown = (await client.get("/v1/experiments/refused-1")).json()

    assert list(listed) == ["refused-1", "good-1", "old-1", "later-1"]
    assert listed["good-1"]["problem"] is listed["old-1"]["problem"] is None
    assert shown == listed["refused-1"]
    assert (shown["state"], shown["total_steps"], shown["problem"]["component"]) == ("completed", 2, "spec")
    assert "unknown key 'key_of_before'" in shown["problem"]["cause"]
    assert "is of a later release" in listed["later-1"]["problem"]["cause"]


async def test_a_damaged_record_hides_no_other(gateway: GatewayState, client: httpx.AsyncClient) -> None:
    good = gateway.repository.get("good-1")
    good.record = replace(good.record, changes=({"id": "c1"},), origin={"step": "none"})

    listed = {each["id"]: each for each in (await client.get("/v1/experiments")).json()["items"]}

    assert list(listed) == ["refused-1", "good-1", "old-1", "later-1"]
    assert listed["good-1"]["problem"]["cause"].startswith("its record is damaged")
    assert listed["old-1"]["problem"] is None


async def test_a_spec_of_an_earlier_revision_migrates_and_stays_as_it_was_written(
    gateway: GatewayState, client: httpx.AsyncClient
) -> None:
    shown = (await client.get("/v1/experiments/old-1")).json()
    [record] = [each for each in await gateway.store.experiments() if each.id == "old-1"]

    assert gateway.repository.get("old-1").spec.resources.rollouts.min == 1
    assert shown["spec"]["resources"]["rollouts"]["min"] == 1
    assert (record.spec, record.spec_revision) == (an_old_spec(), 0)

    answer = await client.patch("/v1/experiments/old-1", json={"resources": {"priority": 4}})

    [record] = [each for each in await gateway.store.experiments() if each.id == "old-1"]
    assert answer.status_code == 200
    assert (record.spec["resources"]["rollouts"]["min"], record.spec_revision) == (1, REVISION)


@pytest.mark.parametrize(
    ("action", "body"),
    [("start", None), ("resume", None), ("stop", None), ("extend", {"steps": 9}), ("fork", {"changes": {}})],
)
async def test_what_is_asked_of_it_is_refused_with_the_problem(
    client: httpx.AsyncClient, action: str, body: Any
) -> None:
    answer = await client.post(f"/v1/experiments/refused-1/{action}", json=body)

    assert (answer.status_code, answer.json()["code"]) == (409, "spec_refused")
    assert "unknown key 'key_of_before'" in answer.json()["detail"]


async def test_nothing_begins_from_it_by_its_name(gateway: GatewayState) -> None:
    for reference in ("refused", "refused-1"):
        with pytest.raises(Exception, match="not valid under this release"):
            gateway.repository.named(reference)


async def test_its_series_can_be_read_and_it_can_be_deleted(gateway: GatewayState, client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/experiments/refused-1/metrics")).status_code == 200

    assert (await client.delete("/v1/experiments/refused-1")).status_code == 204

    assert (await client.get("/v1/experiments/refused-1")).status_code == 404
    assert "refused-1" not in {each.id for each in await gateway.store.experiments()}
    assert (await client.delete("/v1/experiments/good-1")).status_code == 409, "it is at work"


async def test_new_numbers_go_on_after_those_that_cannot_be_used(gateway: GatewayState) -> None:
    assert gateway.repository.next_number("number") == 8
    assert gateway.repository.knows("refused-1"), "what is on the disk of it is no leftover"


async def test_its_services_are_released() -> None:
    store = MemoryStore()
    before = a_gateway(store)
    await store.apply([PutRecord(a_record("refused-1", state=ExperimentState.RUNNING, spec=REFUSED))])
    service_id = (await before.fleet.register(a_registration(ServiceKind.REWARD, "one"))).service_id
    await before.registry.assign(before.registry.get(service_id), "refused-1")

    after = await restarted(store)
    await after.reconciler.reconcile()

    assert after.registry.get(service_id).experiment_id is None
