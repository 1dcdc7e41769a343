"""The table of ``docs/security.md`` is what the servers answer: every route of every service, with every scope.

``python -m tests.contract.gateway.test_security_table`` writes the table.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.services.gateway.access.policy import RULES
from flotilla.services.gateway.app import create_app as gateway_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.reward.app import create_app as reward_app
from flotilla.services.rollout.app import create_app as rollout_app
from flotilla.services.sandbox.app import create_app as sandbox_app
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.trainer import app as trainer
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.net.authorisation.token_records import TokenRequest
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.schemas.service import Registered, ServiceKind
from flotilla.shared.streams.plans import WORKERS_PER_EPOCH
from tests.unit.gateway.builders import a_gateway, a_request, add_experiment, add_service

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
BEGIN, END = "<!-- routes: begin -->\n", "<!-- routes: end -->\n"
OPERATOR = "the-operators-token"
EXPERIMENT, SERVICE = "e-1", "own-1"
COLUMNS = (
    "nobody",
    "operator",
    "reader",
    "agent",
    "grader",
    "joining",
    "rollout",
    "reward",
    "sandbox",
    "trainer",
    "its trainer",
)
REFUSED = {401, 403}
Row = tuple[str, str, tuple[bool, ...]]


async def tokens_of(gateway: Any) -> dict[str, str | None]:
    """Make one token of each column, for the gateway."""
    tokens = gateway.tokens
    _, reader = await tokens.create(TokenRequest(name="reader", scope=Scope.READER))
    bound = {
        scope.value: tokens.issue(Principal(scope, scope.value, experiment_id=EXPERIMENT), 60)
        for scope in (Scope.AGENT, Scope.GRADER)
    }
    _, joining = await tokens.create(TokenRequest(name="joining", scope=Scope.SERVICE))
    passes = {kind.value: tokens.pass_of(kind, SERVICE) for kind in ServiceKind}
    passes["its trainer"] = tokens.assignment_of(SERVICE, EXPERIMENT, 1)
    return {"nobody": None, "operator": OPERATOR, "reader": reader, **bound, "joining": joining, **passes}


def shown_to(gateway: Any, kind: ServiceKind, own: Mapping[str, str | None]) -> dict[str, str | None]:
    """Tell what each column shows to a service of this kind: callers have a token for it, the others their own."""
    peers = {each.value: gateway.tokens.peers_of(each).get(kind) for each in ServiceKind}
    return {column: peers.get(column) or token for column, token in own.items()}


def told(gateway: Any, kind: ServiceKind) -> Credentials:
    """Make what a registered service of this kind lets in."""
    credentials = Credentials(f"given to the {kind} at its start")
    accepts, for_weights = gateway.tokens.accepted_by(kind), gateway.tokens.accepted_for_weights(kind)
    for_logs = gateway.tokens.accepted_for_logs("s")
    credentials.take(
        Registered(
            service_id="s",
            lease_seconds=1,
            accepts=accepts,
            accepts_for_weights=for_weights,
            accepts_for_logs=for_logs,
        )
    )
    return credentials


def services(gateway: Any) -> dict[ServiceKind, FastAPI]:
    """Make the apps of the other services; nothing is opened."""
    settings = ServiceSettings("http://gateway", "given at its start", "redis://nowhere")

    def never(*_: Any) -> AbstractAsyncContextManager[Any]:
        raise AssertionError("no lifespan is started here")

    sandbox = SandboxSettings.model_validate({"token": "given to the sandbox"})
    made = {
        ServiceKind.ROLLOUT: rollout_app(
            settings, "http://r", open_state=never, credentials=told(gateway, ServiceKind.ROLLOUT)
        ),
        ServiceKind.REWARD: reward_app(
            settings, "http://r", open_state=never, credentials=told(gateway, ServiceKind.REWARD)
        ),
        ServiceKind.SANDBOX: sandbox_app(sandbox, never, told(gateway, ServiceKind.SANDBOX)),
    }
    made[ServiceKind.TRAINER] = trainer.create_app(
        settings, "http://t", open_state=never, credentials=told(gateway, ServiceKind.TRAINER)
    )
    return made


async def walk(app: FastAPI, state: Mapping[str, Any], tokens: Mapping[str, str | None], name: str) -> list[Row]:
    """Ask every route of an app as everybody; whoever is not answered 401 or 403 is let in."""

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": dict(state)}, receive, send)

    routes = [("GET", "/openapi.json")] if app.openapi_url else []
    routes += [("GET", "/docs")] if any(getattr(route, "path", "") == "/docs" for route in app.routes) else []
    routes += [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]
    rows: list[Row] = []
    # What is behind a route is not there: whatever it raises, it was reached.
    transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for method, template in routes:
            path = template.replace("{experiment_id}", EXPERIMENT).replace("{service_id}", SERVICE)
            path = path.replace("{grading_id}", "0" * 32)
            path = re.sub(r"\{\w+(:path)?\}", "1", path)
            let_in = []
            for column in COLUMNS:
                headers = {} if (token := tokens[column]) is None else {"Authorization": f"Bearer {token}"}
                answer = await client.request(method, path, headers=headers, content=b"{}")
                let_in.append(answer.status_code not in REFUSED)
            rows.append((name, f"{method} {template}", tuple(let_in)))
    return rows


async def all_rows() -> list[Row]:
    """Walk every service."""
    gateway = a_gateway(token=OPERATOR)
    app = gateway_app(GatewaySettings(token=OPERATOR, redis_url="redis://nowhere", data=Path("/nowhere")))
    tokens = await tokens_of(gateway)
    rows = await walk(app, {"gateway": gateway}, tokens, "gateway")
    for kind, service in services(gateway).items():
        rows += await walk(service, {}, shown_to(gateway, kind, tokens), kind.value)
    return rows


def written(rows: Iterable[Row]) -> str:
    """Write the table."""
    lines = [f"| service | route | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for service, route, let_in in rows:
        cells = " | ".join("yes" if each else "" for each in let_in)
        lines.append(re.sub(r"\|  +\|", "| |", re.sub(r"\| +(?=\|)", "| ", f"| {service} | `{route}` | {cells} |")))
    return "\n".join(lines) + "\n"


async def test_every_route_of_every_service_lets_in_whom_the_page_says() -> None:
    rows = await all_rows()
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]

    assert len(rows) > 60, "the walk must see every route"
    assert table == written(rows), "write it again: python -m tests.contract.gateway.test_security_table"


async def test_nobody_but_operators_changes_an_experiment_and_nobody_without_a_token_does_anything() -> None:
    rows = await all_rows()
    place = {column: number for number, column in enumerate(COLUMNS)}
    changing = [row for row in rows if not row[1].startswith("GET ")]

    assert [route for _, route, let_in in changing if let_in[place["nobody"]]] == []
    assert [route for _, route, let_in in changing if let_in[place["reader"]]] == []
    for _, route, let_in in rows:
        # It lets in by the token of an address, which nobody here was told.
        if route == "POST /v1/gradings/{grading_id}":
            continue
        assert let_in[place["operator"]], route
    for column in ("agent", "grader", "reader", "joining", "rollout", "reward", "sandbox", "trainer"):
        changed = [row[1] for row in changing if row[2][place[column]] and "/experiments" in row[1]]
        # Beginning episodes and giving them back is what an agent is for: it changes nothing of the experiment.
        episodes = "POST /v1/experiments/{experiment_id}/episodes"
        allowed = {episodes, f"{episodes}/give-back"} if column == "agent" else set()
        assert set(changed) == allowed, column


ASSIGNED = [(method, template) for (method, template), rule in RULES.items() if rule.is_assigned]
"""Every route with which a trainer works for an experiment."""


async def answers_to(gateway: Any, token: str) -> list[tuple[str, int, str]]:
    """Ask every route of a trainer's work with a body that is right: path, status and code of each problem."""
    app = gateway_app(GatewaySettings(token=OPERATOR, redis_url="redis://nowhere", data=Path("/nowhere")))
    rendezvous = {"host": "h", "port": 1, "epoch": 1, "world_size": 2}
    checkpoint = {
        "step": 2,
        "version": 1,
        "path": f"/nowhere/{EXPERIMENT}/checkpoints/step-00000002",
        "at": "2030-01-01T00:00:00Z",
    }
    bodies = {
        "metrics": {"step": 2, "version": 1, "values": {"loss": 1.0}},
        "checkpoints": checkpoint,
        "takeovers": {"step": 0, "published": {"version": 0, "step": 0}},
        "refused": {"recorded": 900 * WORKERS_PER_EPOCH},
        "publications": a_request(900).model_dump(mode="json"),
        "rendezvous": rendezvous,
        "sent": {"epoch": 1, "checksum": f"{1:016x}"},
        "failed": {"epoch": 1, "detail": "made up"},
        "adopted": {"version": 1, "step": 2},
    }

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    found = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://x") as client:
        for method, template in ASSIGNED:
            path = template.format(experiment_id=EXPERIMENT, version=1)
            body = bodies.get(path.rpartition("/")[2]) if method != "GET" else None
            answer = await client.request(method, path, headers={"Authorization": f"Bearer {token}"}, json=body)
            problem = answer.json().get("code", "") if answer.status_code >= 400 else ""
            found.append((f"{method} {template}", answer.status_code, problem))
    return found


@pytest.mark.parametrize("whose", ["another experiment's", "unassigned", "old epoch's", "old incarnation's"])
async def test_no_trainer_speaks_for_another(whose: str) -> None:
    gateway = a_gateway(token=OPERATOR)
    for experiment_id in (EXPERIMENT, "e-2"):
        await add_experiment(gateway, experiment_id, trainer_epoch=3)
    mine = await add_service(gateway, ServiceKind.TRAINER, "mine", EXPERIMENT)
    other = await add_service(gateway, ServiceKind.TRAINER, "other", "e-2")
    idle = await add_service(gateway, ServiceKind.TRAINER, "idle")
    token, refusals = {
        "another experiment's": (gateway.tokens.assignment_of(other, "e-2", 3), {(403, "forbidden")}),
        "unassigned": (gateway.tokens.pass_of(ServiceKind.TRAINER, idle), {(403, "forbidden")}),
        "old epoch's": (gateway.tokens.assignment_of(mine, EXPERIMENT, 2), {(409, "not_assigned")}),
        "old incarnation's": (gateway.tokens.assignment_of("trainer-before", EXPERIMENT, 3), {(409, "not_assigned")}),
    }[whose]
    before = await gateway.publications.announce(EXPERIMENT, mine, a_request(1))
    record = gateway.repository.get(EXPERIMENT).record

    answers = await answers_to(gateway, token)

    assert len(answers) == len(ASSIGNED) == 11
    assert {(status, code) for _, status, code in answers} == refusals, answers
    assert gateway.repository.get(EXPERIMENT).record == record
    assert await gateway.publications.get(EXPERIMENT, 1) == before
    assert await gateway.store.checkpoints(EXPERIMENT) == []


async def test_the_trainer_of_an_experiment_is_let_in_by_what_its_desired_state_brought() -> None:
    gateway = a_gateway(token=OPERATOR)
    await add_experiment(gateway, EXPERIMENT, trainer_epoch=3)
    mine = await add_service(gateway, ServiceKind.TRAINER, "mine", EXPERIMENT)
    assignment = gateway.fleet.desired(gateway.registry.get(mine)).assignment
    assert assignment is not None and assignment.token is not None
    await gateway.publications.announce(EXPERIMENT, mine, a_request(1))

    answers = await answers_to(gateway, assignment.token)

    refused = [each for each in answers if each[1] in REFUSED or each[2] == "not_assigned"]
    # Refusing the incarnation, which raises the epoch, ends the token itself.
    after = [path for path, *_ in answers].index("POST /v1/experiments/{experiment_id}/takeovers/refused") + 1
    assert {path for path, *_ in refused} == {path for path, *_ in answers[after:]}


async def test_no_service_reads_a_body_of_nobody() -> None:
    gateway = a_gateway(token=OPERATOR)
    read: list[str] = []

    async def body() -> AsyncIterator[bytes]:
        read.append("read")
        yield b"{}"

    for kind, app in services(gateway).items():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        routes = [(method, path) for path, methods in app.openapi()["paths"].items() for method in methods]
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for method, path in routes:
                if method.upper() not in {"GET", "HEAD"}:
                    answer = await client.request(method, path, content=body())
                    assert (answer.status_code, read) == (401, []), (kind, path)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + written(asyncio.run(all_rows())) + END + rest.partition(END)[2], encoding="utf-8")
