"""Service logs over REST: asked of the services when somebody looks, and of one experiment only what is its own."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.services.gateway.membership.service_logs import GATEWAY, MOST_SERVICES, LogQuery, ServiceLogs
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import NotFound
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.serving import add_problem_handlers
from flotilla.shared.schemas.logs import LogEntry
from flotilla.shared.schemas.service import Registered, ServiceKind
from flotilla.shared.service import logs as service_side
from flotilla.shared.telemetry.recent import RecentLines
from tests.unit.gateway.builders import a_gateway, add_experiment, add_service

ANY = LogQuery("debug", "", 50)
OWN = LogQuery("debug", "", 50, "tiny-1")


class Fleet:
    """A gateway, and services that answer what they logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gateway: GatewayState = a_gateway()
        self.own = RecentLines()
        kept = RecentLines()
        for owner, message in (("tiny-1", "mine"), ("tiny-2", "another's"), (None, "nobody's")):
            kept.add(LogEntry(at=f"2026-01-01T00:00:{len(message):02}Z", experiment_id=owner, message=message))
        monkeypatch.setattr(service_side, "RECENT", kept)
        credentials = Credentials("given at its start")
        self.credentials = credentials
        app = FastAPI()
        add_problem_handlers(app)
        # Addresses of these services are told apart by a folder.
        app.include_router(service_side.logs_router(credentials.accepts_for_logs), prefix="/{incarnation}")
        self.transport: httpx.AsyncBaseTransport = httpx.ASGITransport(app)
        self.logs = self.with_(self.transport)

    def let_in(self, *service_ids: str) -> None:
        """Have the app, which stands for all services, let in what a gateway shows to those of these ids."""
        accepts = tuple(digest for each in service_ids for digest in self.gateway.tokens.accepted_for_logs(each))
        self.credentials.take(Registered(service_id="s", lease_seconds=1, accepts_for_logs=accepts))

    def with_(self, transport: httpx.AsyncBaseTransport, token: str | None = None) -> ServiceLogs:
        shown = self.gateway.tokens.for_logs if token is None else lambda _: token
        return ServiceLogs(self.gateway.registry, shown, transport, self.own)


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    made = Fleet(monkeypatch)
    await add_experiment(made.gateway)
    await add_service(made.gateway, ServiceKind.ROLLOUT, "one", "tiny-1")
    made.let_in(the_service(made))
    yield made
    await made.gateway.logs.aclose()


def the_service(fleet: Fleet) -> str:
    return next(iter(fleet.gateway.registry)).id


async def test_an_operator_reads_all_that_a_service_keeps_in_the_order_of_time(fleet: Fleet) -> None:
    found = await fleet.logs.of_service(the_service(fleet), ANY)

    assert found.unread == {}
    assert [each.message for each in found.items] == ["mine", "nobody's", "another's"]
    assert {each.service_id for each in found.items} == {the_service(fleet)}
    with pytest.raises(NotFound):
        await fleet.logs.of_service("nobody", ANY)


async def test_of_an_experiment_nothing_of_another_is_read_even_where_a_service_sends_it(fleet: Fleet) -> None:
    fleet.own.add(LogEntry(at="2026-01-01T00:00:09Z", experiment_id="tiny-1", message="the gateway's"))
    fleet.own.add(LogEntry(at="2026-01-01T00:00:09Z", experiment_id="tiny-2", message="the gateway's of another"))

    honest = await fleet.logs.of_experiment("tiny-1", OWN, None)

    def talkative(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"items": [{"message": "another's", "experiment_id": "tiny-2"}]})

    forward = await fleet.with_(httpx.MockTransport(talkative)).of_experiment("tiny-1", OWN, the_service(fleet))
    assert [each.message for each in honest.items] == ["mine", "the gateway's"]
    assert forward.items == ()
    with pytest.raises(NotFound):
        await fleet.logs.of_experiment("tiny-1", OWN, "rollout-of-another")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(404), "it answered 404"),
        (httpx.Response(200, text="{"), "its answer cannot be read"),
        (httpx.Response(200, json={"items": 3}), "its answer cannot be read"),
        (httpx.Response(200, stream=httpx.ByteStream(b" " * (9 << 20))), "its answer cannot be read"),
        (httpx.ConnectError("refused"), "it cannot be reached: ConnectError"),
    ],
)
async def test_a_service_that_does_not_say_is_named_with_the_cause(fleet: Fleet, answer: Any, why: str) -> None:
    def says(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        response: httpx.Response = answer
        return response

    found = await fleet.with_(httpx.MockTransport(says)).of_experiment("tiny-1", OWN, None)

    assert found.unread == {the_service(fleet): why}


async def test_what_the_gateway_shows_to_one_service_opens_the_lines_of_no_other(fleet: Fleet) -> None:
    fleet.let_in("rollout-another")

    found = await fleet.logs.of_service(the_service(fleet), ANY)

    assert found.items == ()
    assert found.unread


async def test_a_service_shows_its_lines_to_no_peer(fleet: Fleet) -> None:
    peers = fleet.gateway.tokens.peer_of(ServiceKind.ROLLOUT)

    found = await fleet.with_(fleet.transport, token=peers).of_service(the_service(fleet), ANY)

    assert found.items == ()
    assert found.unread


async def test_of_very_many_services_some_are_asked_and_the_others_named(fleet: Fleet) -> None:
    for number in range(MOST_SERVICES):
        await add_service(fleet.gateway, ServiceKind.ROLLOUT, f"more {number}", "tiny-1")
    fleet.let_in(*(each.id for each in fleet.gateway.registry))

    found = await fleet.logs.of_experiment("tiny-1", OWN, None)
    only_gateway = await fleet.logs.of_experiment("tiny-1", OWN, GATEWAY)

    assert len(found.unread) == 1
    assert len({each.service_id for each in found.items} - {GATEWAY}) == OWN.lines <= MOST_SERVICES
    assert only_gateway.unread == {}
