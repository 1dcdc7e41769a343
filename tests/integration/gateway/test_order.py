"""In which order the gateway takes calls that come at once: over sockets, in one loop, with a store in memory."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.routes.trainer_calls import StatusCalls
from flotilla.services.gateway.signals import FIRE_AT_ONCE
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.net.server.connections import READ_AT_ONCE
from flotilla.shared.net.server.serving import bind, config_of
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import a_gateway, add_experiment, add_service, until

SERVICES = 600
OTHER = b"GET /other HTTP/1.1\r\nhost: h\r\n\r\n"
BODY = b'{"acknowledged": "%s", "experiment_id": "tiny-1", "state": "running", "policy_version": 0}'


class Served:
    """A gateway's status calls beside one other call, in the order in which they were taken."""

    def __init__(self, gateway: GatewayState) -> None:
        self.gateway = gateway
        self.taken: list[str] = []
        self.answered: list[Caller] = []
        self.told = self.told_before_other = 0
        self._status_calls = StatusCalls(self._other)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.taken.append(scope["path"])
        scope["state"]["gateway"] = self.gateway
        await self._status_calls(scope, receive, send)
        self.told += 1

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.told_before_other = self.told
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Caller(asyncio.Protocol):
    """Polls again, as soon as it is answered, with the tag of the answer."""

    def __init__(self, service_id: str, answered: list["Caller"]) -> None:
        self.service_id = service_id
        self.answers = 0
        self._answered = answered
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.poll("")

    def poll(self, tag: str) -> None:
        body = BODY % tag.encode()
        head = f"PUT /v1/services/{self.service_id}/status?wait=30 HTTP/1.1\r\nhost: h\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if b"}}" not in self._rest and not self._rest.endswith(b"}"):
            return
        tag = self._rest.split(b'"tag":"')[1].split(b'"')[0].decode()
        self._rest = b""
        self.answers += 1
        self._answered.append(self)
        self.poll(tag)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(config_of(app))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@asynccontextmanager
async def waiting_fleet() -> AsyncIterator[tuple[Served, Experiment, list[Caller], asyncio.Transport]]:
    """Give a gateway whose services all wait for a change, what they are answered, and another caller's connection."""
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    ids = [await add_service(gateway, ServiceKind.ROLLOUT, f"i{n}", experiment.id) for n in range(SERVICES)]
    app = Served(gateway)
    answered = app.answered
    loop = asyncio.get_running_loop()
    async with served(app) as port:
        make = [functools.partial(Caller, service_id, answered) for service_id in ids]
        callers = [(await loop.create_connection(each, "127.0.0.1", port))[1] for each in make]
        # Each is told its first tag, acknowledges it, and waits.
        await until(lambda: len(app.taken) == 2 * SERVICES, seconds=20)
        await until(lambda: all(gateway.registry.get(i).polls == 2 for i in ids), seconds=20)
        other = (await loop.create_connection(asyncio.Protocol, "127.0.0.1", port))[0]
        app.taken.clear()
        answered.clear()
        app.told = 0
        yield app, experiment, answered, other
        await until(lambda: len(app.taken) == SERVICES + 1, seconds=20)
        for transport in [other, *(caller.transport for caller in callers)]:
            transport.close()


async def test_another_call_does_not_wait_for_the_acknowledgements_of_the_whole_fleet() -> None:
    async with waiting_fleet() as (app, experiment, answered, other):
        await app.gateway.repository.update(experiment, state=ExperimentState.PAUSED)
        await until(lambda: len(answered) == SERVICES, seconds=20)
        taken_before = len(app.taken)
        other.write(OTHER)
        await until(lambda: "/other" in app.taken, seconds=20)

    assert app.taken.index("/other") - taken_before <= 4 * READ_AT_ONCE


async def test_another_call_does_not_wait_until_the_whole_fleet_is_told() -> None:
    async with waiting_fleet() as (app, experiment, answered, other):
        await app.gateway.repository.update(experiment, state=ExperimentState.PAUSED)
        other.write(OTHER)
        await until(lambda: len(answered) == SERVICES, seconds=20)

    assert app.told_before_other <= 4 * FIRE_AT_ONCE < SERVICES
