"""The frequent requests of clients that follow a run, answered without the web framework.

The framework's routing, dependencies and responses take several times as long as these answers do. Ordinary calls are
answered here, behind the same guard as every other, by the same functions as of the routes; one that is not (another
parameter, one that is not valid) goes on to the route, which says what is wrong.
"""

import re
from collections.abc import Awaitable, Callable
from re import Pattern
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla.services.gateway.lifecycle import unusable
from flotilla.services.gateway.routes import events, experiments, facts, metrics, services
from flotilla.services.gateway.routes.dependencies import LARGEST_PAGE
from flotilla.services.gateway.routes.trainer_calls import CONTENT_TYPE, answering_services
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.tinker.jobs import TinkerJobs
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.authorisation.access import Principal
from flotilla.shared.net.server.serving import problem_response

LIMIT: Final = re.compile(r"[1-9][0-9]{0,5}")
TYPES: Final = re.compile(r"[a-z_]{1,99}(?:,[a-z_]{1,99}){0,8}")


class _Unusual(Exception):
    """Whatever it is, the route knows it."""


class _Asked(NamedTuple):
    """A call that was let in.

    Attributes:
        experiment_id: that it is about; empty where it is about none.
        query: its parameters.
        tinker: what clients of the Tinker API work with; None where that is not served.
    """

    gateway: GatewayState
    caller: Principal
    tinker: object | None
    experiment_id: str
    query: dict[str, str]

    def limit(self, most: int, otherwise: int) -> int:
        """Read how many there should be of a page."""
        if (given := self.query.get("limit")) is None:
            return otherwise
        if not LIMIT.fullmatch(given) or int(given) > most:
            raise _Unusual
        return int(given)


async def _listed(asked: _Asked) -> BaseModel:
    query, limit, spec = asked.query, asked.limit(LARGEST_PAGE, 100), asked.query.get("spec", "true")
    if asked.tinker is not None or spec not in {"true", "false"}:
        raise _Unusual
    jobs = TinkerJobs(None, asked.gateway.settings.data)
    return await experiments.index(asked.gateway, asked.caller, jobs, query.get("after"), limit, spec == "true")


async def _shown(asked: _Asked) -> BaseModel:
    return unusable.show(asked.experiment_id, asked.gateway.commands, asked.gateway.repository)


async def _ledgers(asked: _Asked) -> dict[str, Any]:
    return await facts.ledgers_of(asked.gateway.repository.get(asked.experiment_id), asked.gateway)


async def _values(asked: _Asked) -> Response:
    query, limit = asked.query, asked.limit(10 * LARGEST_PAGE, LARGEST_PAGE)
    names, after = query.get("names"), query.get("after")
    return await metrics.metrics(asked.experiment_id, asked.gateway, names, after, limit)


async def _events(asked: _Asked) -> BaseModel:
    query, limit, types = asked.query, asked.limit(LARGEST_PAGE, LARGEST_PAGE), asked.query.get("types")
    if types is not None and not TYPES.fullmatch(types):
        raise _Unusual
    return await events.log(asked.experiment_id, asked.gateway, query.get("after"), limit, types)


async def _services(asked: _Asked) -> BaseModel:
    limit = asked.limit(LARGEST_PAGE, 100)
    return await services.index(asked.gateway, asked.caller, None, asked.query.get("after"), limit)


class _Kind(NamedTuple):
    """One kind of call."""

    path: Pattern[str]
    parameters: frozenset[str]
    answer: Callable[[_Asked], Awaitable[BaseModel | Response | dict[str, Any]]]


# Without those that clients of the Tinker API drive: their ids have a colon.
EXPERIMENT: Final = r"/v1/experiments/(?P<experiment_id>[^/:]+)"
KINDS: Final = (
    _Kind(re.compile(r"/v1/experiments(?P<experiment_id>)"), frozenset({"spec", "after", "limit"}), _listed),
    _Kind(re.compile(EXPERIMENT), frozenset(), _shown),
    _Kind(re.compile(rf"{EXPERIMENT}/ledger"), frozenset(), _ledgers),
    _Kind(re.compile(rf"{EXPERIMENT}/metrics"), frozenset({"names", "after", "limit"}), _values),
    _Kind(re.compile(rf"{EXPERIMENT}/log"), frozenset({"types", "after", "limit"}), _events),
    _Kind(re.compile(r"/v1/services(?P<experiment_id>)"), frozenset({"after", "limit"}), _services),
)


class FollowerCalls:
    """ASGI middleware: answers ordinary calls of followers, passes on all else.

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
        try:
            answer = await kind.answer(_asked(scope, kind, found))
        except _Unusual:
            await self._app(scope, receive, send)
            return
        except FlotillaError as error:
            await problem_response(error)(scope, receive, send)
            return
        body = _body_of(answer)
        headers = [CONTENT_TYPE, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def answering_callers(app: ASGIApp) -> ASGIApp:
    """Answer the most frequent requests of services and of followers of a run; the app gets the rest."""
    return answering_services(FollowerCalls(app))


def _kind_of(scope: Scope) -> tuple[_Kind | None, re.Match[str] | None]:
    if scope["type"] == "http" and scope["method"] == "GET":
        for kind in KINDS:
            if (found := kind.path.fullmatch(scope["path"])) is not None:
                return kind, found
    return None, None


def _asked(scope: Scope, kind: _Kind, found: re.Match[str]) -> _Asked:
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    query = dict(pairs)
    if len(query) != len(pairs) or not query.keys() <= kind.parameters:
        raise _Unusual
    state = scope["state"]
    return _Asked(state["gateway"], state["shown"].principal, state.get("tinker"), found["experiment_id"], query)


def _body_of(answer: BaseModel | Response | dict[str, Any]) -> bytes:
    if isinstance(answer, Response):
        return bytes(answer.body)
    return answer.model_dump_json().encode() if isinstance(answer, BaseModel) else to_json(answer)
