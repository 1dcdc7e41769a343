"""The status call of every service and the calls that a trainer makes in each step, without the web framework.

A step is reported, and its version announced and watched, by calls whose work takes less than the framework's routing,
dependencies and responses around it. Ordinary ones are answered here, behind the same guard as every other, by the same
functions as of the routes; one that is not (another content type, a body or query that is not valid) continues to the
route, which says what is wrong.

Every service makes the status call all the time, and one change of an experiment is answered to all of its services at
once: with a thousand of them, what one call costs is what the last of them waits for. The framework's routing,
dependencies and responses are most of that cost. An unusual one continues to the route of ``routes/services.py``, which
does the same and says what is wrong.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from re import Pattern
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla.services.gateway.membership.fleet import WatchCaller
from flotilla.services.gateway.membership.speaking import speaking_trainer
from flotilla.services.gateway.routes import metrics, publications
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.server.connections import connection_of
from flotilla.shared.net.server.serving import problem_response
from flotilla.shared.schemas.experiment import MetricBatch
from flotilla.shared.schemas.publication import PublicationPhase, PublicationRequest
from flotilla.shared.schemas.service import ObservedState

JSON = "application/json"
PATH = re.compile(r"/v1/services/([^/]+)/status")
QUERY = re.compile(rb"(?:wait=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")
CONTENT_TYPE = (b"content-type", JSON.encode())


async def exchange(
    gateway: GatewayState, service_id: str, observed: ObservedState, wait_seconds: float, watch: WatchCaller
) -> bytes:
    """Record an observation, wait for the desired state, and return it as JSON.

    Raises:
        NotFound: the service is not registered.
    """
    wait_seconds = min(wait_seconds, gateway.settings.longest_wait_seconds)
    return gateway.fleet.bodies.of(await gateway.fleet.report(service_id, observed, wait_seconds, watch))


@contextmanager
def watching(receive: Receive) -> Iterator[WatchCaller]:
    """Watch for the caller to hang up by a request whose body was read: that is what comes next."""
    tasks: list[asyncio.Future[Any]] = []

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def watch() -> asyncio.Future[Any]:
        tasks.append(asyncio.ensure_future(hang_up()))
        return tasks[-1]

    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()


class StatusCalls:
    """ASGI middleware: answers ordinary status calls, passes on all else.

    Args:
        app: where the rest goes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "PUT" else None
        query = QUERY.fullmatch(scope["query_string"]) if path is not None else None
        if path is None or query is None or CONTENT_TYPE not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        # The guard has read all of the body, and gives it in one piece.
        message = await receive()
        try:
            observed = ObservedState.model_validate_json(message.get("body", b""))
        except ValidationError:
            await self._app(scope, again(message, receive), send)
            return
        wait_seconds, connection = float(query[1] or 0), connection_of(scope)
        try:
            asked = (scope["state"]["gateway"], path[1], observed, wait_seconds)
            if connection is None:
                with watching(receive) as watch:
                    body = await exchange(*asked, watch)
            else:
                # Without a task for each of a thousand waiting calls.
                body = await exchange(*asked, connection.watched)
        except FlotillaError as error:
            await problem_response(error)(scope, receive, send)
            return
        headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if connection is not None and wait_seconds > 0:
            connection.read_in_turn()


def again(message: Message, receive: Receive) -> Receive:
    """Replay a message that was read already, then whatever comes next."""
    read: list[Message] = [message]

    async def replay() -> Message:
        return read.pop() if read else await receive()

    return replay


WAIT: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
NUMBER: Final = re.compile(r"[0-9]{1,9}")
PHASES: Final = {each.value: each for each in PublicationPhase}


class _Unusual(Exception):
    """Whatever it is, the route knows it."""


class _Asked(NamedTuple):
    """A call that was let in.

    Attributes:
        experiment_id: that it is about.
        version: of the publication that its path names; empty where it names none.
        query: its parameters.
        trainer: whom it speaks for.
    """

    gateway: GatewayState
    experiment_id: str
    version: str
    query: dict[str, str]
    body: bytes
    trainer: str | None


class _Kind(NamedTuple):
    """One kind of call.

    Attributes:
        status: of a success; the guard keeps it with an answer to a key.
    """

    method: str
    path: Pattern[str]
    parameters: frozenset[str]
    answer: Callable[[_Asked], Awaitable[BaseModel]]
    status_code: int


async def _measured(asked: _Asked) -> BaseModel:
    return await metrics.put_metrics(asked.experiment_id, MetricBatch.model_validate_json(asked.body), asked.gateway)


async def _announced(asked: _Asked) -> BaseModel:
    request = PublicationRequest.model_validate_json(asked.body)
    wait = _wait_of(asked.query)
    return await publications.announce(asked.experiment_id, request, asked.trainer, asked.gateway, wait)


async def _watched(asked: _Asked) -> BaseModel:
    query = asked.query
    wait, phase, epoch = _wait_of(query), query.get("phase"), query.get("epoch")
    if (phase is not None and phase not in PHASES) or (epoch is not None and not NUMBER.fullmatch(epoch)):
        raise _Unusual
    return await publications.show(
        asked.experiment_id,
        int(asked.version),
        asked.gateway,
        wait,
        None if phase is None else PHASES[phase],
        None if epoch is None else int(epoch),
    )


def _wait_of(query: dict[str, str]) -> float:
    if not WAIT.fullmatch(wait := query.get("wait", "0")):
        raise _Unusual
    return float(wait)


EXPERIMENT: Final = r"/v1/experiments/(?P<experiment_id>[^/]+)"
KINDS: Final = (
    _Kind("POST", re.compile(rf"{EXPERIMENT}/metrics(?P<version>)"), frozenset(), _measured, 201),
    _Kind("POST", re.compile(rf"{EXPERIMENT}/publications(?P<version>)"), frozenset({"wait"}), _announced, 201),
    _Kind(
        "GET",
        re.compile(rf"{EXPERIMENT}/publications/(?P<version>[0-9]{{1,9}})"),
        frozenset({"wait", "phase", "epoch"}),
        _watched,
        200,
    ),
)


class TrainerCalls:
    """ASGI middleware: answers ordinary calls of trainers, passes on all else.

    Args:
        app: where the rest goes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        kind, found = _kind_of(scope)
        if kind is None or found is None:
            await self._app(scope, receive, send)
            return
        # The guard has read all of the body, and gives it in one piece.
        message = await receive()
        route = scope.get("route")
        try:
            # Of which the guard asks the status.
            scope["route"] = kind
            answer = await kind.answer(_asked(scope, kind, found, message))
        except (_Unusual, ValidationError):
            scope["route"] = route
            await self._app(scope, again(message, receive), send)
            return
        except FlotillaError as error:
            await problem_response(error)(scope, receive, send)
            return
        body = answer.model_dump_json().encode()
        headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": kind.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def answering_services(app: ASGIApp) -> ASGIApp:
    """Answer what services ask most; an app gets the rest."""
    return StatusCalls(TrainerCalls(app))


def _kind_of(scope: Scope) -> tuple[_Kind | None, re.Match[str] | None]:
    if scope["type"] == "http":
        for kind in KINDS:
            if kind.method == scope["method"] and (found := kind.path.fullmatch(scope["path"])) is not None:
                is_plain = kind.method == "GET" or CONTENT_TYPE in scope["headers"]
                return (kind, found) if is_plain else (None, None)
    return None, None


def _asked(scope: Scope, kind: _Kind, found: re.Match[str], message: Message) -> _Asked:
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    query = dict(pairs)
    if len(query) != len(pairs) or not query.keys() <= kind.parameters:
        raise _Unusual
    gateway: GatewayState = scope["state"]["gateway"]
    experiment_id, who = found["experiment_id"], scope["state"]["shown"].principal
    trainer = speaking_trainer(who, experiment_id, gateway.repository, gateway.registry)
    return _Asked(gateway, experiment_id, found["version"], query, message.get("body", b""), trainer)
