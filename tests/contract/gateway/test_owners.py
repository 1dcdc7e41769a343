"""A token with an owner reaches nothing of anybody else: every route of the table, with another's experiment."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.access.policy import FOR_OWNERS, OPEN_PATHS, RULES
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.net.authorisation.access import Scope
from flotilla.shared.net.authorisation.token_records import TokenRequest
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import a_gateway, acting, add_experiment, add_service

OPERATOR = "the-operators-token"
ALICE, BOB = "alice", "bob"
OF_ONE = sorted((method, template) for method, template in RULES if "{experiment_id}" in template)
OF_ALL = sorted((method, template) for method, template in RULES if "{experiment_id}" not in template)
OWN_ANSWER = "of the owner alice"
"""What alone says that an experiment is not this owner's."""


class Fleet:
    """Experiments of two owners and of nobody in particular, each with a service."""

    def __init__(self) -> None:
        self.gateway: GatewayState = a_gateway(token=OPERATOR)
        self.app = create_app(GatewaySettings(token=OPERATOR, redis_url="redis://nowhere", data=Path("/nowhere")))
        self.tokens: dict[str, str] = {"admin": OPERATOR}
        self.services: dict[str, str] = {}

    async def fill(self) -> "Fleet":
        for owner in (ALICE, BOB, None):
            with acting(owner):
                experiment_id = f"{owner or 'fleet'}s-1"
                await add_experiment(self.gateway, experiment_id, state=ExperimentState.DRAFT)
            self.services[experiment_id] = await add_service(
                self.gateway, ServiceKind.ROLLOUT, experiment_id, experiment_id
            )
        for owner, scope in ((ALICE, Scope.OPERATOR), (ALICE, Scope.READER), (BOB, Scope.OPERATOR)):
            request = TokenRequest(name=f"{owner}-{scope}", scope=scope, owner=owner)
            _, self.tokens[request.name] = await self.gateway.tokens.create(request)
        return self

    async def ask(self, method: str, path: str, who: str, body: Any = None) -> httpx.Response:
        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope | {"state": {"gateway": self.gateway}}, receive, send)

        # What is behind a route is not there: whatever it raises, it was reached.
        transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {self.tokens[who]}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            return await client.request(method, path, json={} if body is None else body)


def path_of(template: str, experiment_id: str) -> str:
    """Fill a route's template in."""
    return re.sub(r"\{\w+(:path)?\}", "1", template.replace("{experiment_id}", experiment_id))


def problem_of(answer: httpx.Response) -> str:
    """Return what a refusal says."""
    found: Mapping[str, Any] = answer.json() if answer.is_error and "problem" in answer.headers["content-type"] else {}
    return str(found.get("detail", ""))


@pytest.fixture
async def fleet() -> Fleet:
    return await Fleet().fill()


@pytest.mark.parametrize("others", ["bobs-1", "fleets-1", "gone-1"])
async def test_no_route_of_an_experiment_answers_with_anothers(fleet: Fleet, others: str) -> None:
    records = [each.record for each in fleet.gateway.repository]
    found = {}
    for method, template in OF_ONE:
        answer = await fleet.ask(method, path_of(template, others), "alice-operator")
        found[method, template] = answer.status_code, problem_of(answer)

    assert len(OF_ONE) >= 40
    # Exactly what is said of one that is not there.
    assert set(found.values()) == {(404, f"there is no experiment {others} of the owner alice")}, found
    assert [each.record for each in fleet.gateway.repository] == records
    assert {each.experiment_id for each in fleet.gateway.registry} == {"alices-1", "bobs-1", "fleets-1"}


async def test_a_reader_of_an_owner_reads_nothing_of_anothers(fleet: Fleet) -> None:
    for method, template in OF_ONE:
        answer = await fleet.ask(method, path_of(template, "bobs-1"), "alice-reader")
        may_read = Scope.READER in RULES[method, template].scopes
        assert answer.status_code == (404 if may_read else 403), (method, template, answer.text)


async def test_every_route_of_an_experiment_is_there_for_its_owner_and_for_the_fleets_own_token(fleet: Fleet) -> None:
    # The one that deletes it last.
    for method, template in sorted(OF_ONE, key=lambda each: each[0] == "DELETE"):
        if template.endswith("/events"):
            continue  # it has no end
        own = await fleet.ask(method, path_of(template, "alices-1"), "alice-operator")
        assert own.status_code != 403 and OWN_ANSWER not in problem_of(own), (method, template, own.text)
        admins = await fleet.ask(method, path_of(template, "bobs-1"), "admin")
        assert admins.status_code != 403 and "of the owner" not in problem_of(admins), (method, template, admins.text)


async def test_what_is_about_the_whole_fleet_is_refused_but_for_what_shows_the_owners_own(fleet: Fleet) -> None:
    for method, template in OF_ALL:
        answer = await fleet.ask(method, path_of(template, ""), "alice-operator")
        is_theirs = (method, template) in FOR_OWNERS
        assert (answer.status_code == 403) is not is_theirs, (method, template, answer.text)


async def test_a_route_that_is_in_no_table_is_refused(fleet: Fleet) -> None:
    routes = {(method.upper(), path) for path, of in fleet.app.openapi()["paths"].items() for method in of}
    known = {(method, template.replace(":path", "")) for method, template in RULES}
    for method, template in sorted(routes - known):
        if template not in OPEN_PATHS and not template.startswith("/v1/gradings/"):
            answer = await fleet.ask(method, path_of(template, "alices-1"), "alice-operator")
            assert answer.status_code in {403, 404}, (method, template)


async def test_lists_show_the_owners_own(fleet: Fleet) -> None:
    experiments = (await fleet.ask("GET", "/v1/experiments", "alice-reader")).json()["items"]
    services = (await fleet.ask("GET", "/v1/services", "alice-reader")).json()["items"]
    everything = (await fleet.ask("GET", "/v1/experiments", "admin")).json()["items"]

    assert [(each["id"], each["owner"]) for each in experiments] == [("alices-1", "alice")]
    assert [each["service_id"] for each in services] == [fleet.services["alices-1"]]
    assert {each["id"]: each["owner"] for each in everything} == {
        "alices-1": "alice",
        "bobs-1": "bob",
        "fleets-1": None,
    }
    assert (await fleet.ask("GET", "/v1/tokens/self", "alice-reader")).json()["owner"] == "alice"


@pytest.mark.parametrize(("whose", "status"), [("alices-1", 200), ("bobs-1", 404), ("fleets-1", 404)])
async def test_a_service_is_shown_to_the_owner_that_it_works_for(fleet: Fleet, whose: str, status: int) -> None:
    answer = await fleet.ask("GET", f"/v1/services/{fleet.services[whose]}", "alice-operator")

    assert answer.status_code == status


async def test_what_an_owner_waits_for_names_no_experiment_of_anothers(fleet: Fleet) -> None:
    for each in ("alices-1", "bobs-1"):
        experiment = fleet.gateway.repository.get(each)
        await fleet.gateway.repository.update(experiment, state=ExperimentState.STARTING)

    answer = await fleet.ask("GET", "/v1/fleet", "alice-reader")

    assert [each["experiment_id"] for each in answer.json()["experiments"]] == ["alices-1"]
    assert "bobs-1" not in answer.text
    assert "bobs-1" in (await fleet.ask("GET", "/v1/fleet", "admin")).text


async def test_metrics_of_experiments_are_for_tokens_without_an_owner(fleet: Fleet) -> None:
    running = fleet.gateway.repository.get("bobs-1")
    await fleet.gateway.repository.update(running, state=ExperimentState.RUNNING)

    assert "bobs-1" not in (await fleet.ask("GET", "/metrics", "alice-reader")).text
    assert "bobs-1" in (await fleet.ask("GET", "/metrics", "admin")).text
