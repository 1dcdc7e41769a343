"""The newest log lines of services, fetched on request; nothing of them is kept here."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic import ValidationError

from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.shared.errors import NotFound
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.bounded_json import ReplyTooLong, at_most, is_packed, parse_json
from flotilla.shared.schemas.logs import LogEntry, LogLines, ServiceLogEntry, ServiceLogLines
from flotilla.shared.telemetry.recent import RECENT, RecentLines

GATEWAY: Final = "gateway"
ANSWER_SECONDS: Final = 3.0
MAX_BYTES: Final = 8 << 20
AT_ONCE: Final = 8
"""Looks that are answered at the same time; others wait for their turn."""
MOST_SERVICES: Final = 64
"""Services that are asked for one look."""
HEADERS: Final = {"Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines are wanted.

    Attributes:
        level: least severe.
        containing: what they have in them.
        lines: how many of the newest.
        experiment_id: what they belong to; None: anything, and nothing.
    """

    level: str
    containing: str
    lines: int
    experiment_id: str | None = None


class ServiceLogs:
    """Asks services for the newest lines that they keep.

    Args:
        registry: of the services.
        token: makes what one lets in for this, by its id.
        transport: another way to them, of a test.
        own: the gateway's own lines.
    """

    def __init__(
        self,
        registry: Registry,
        token: Callable[[str], str],
        transport: httpx.AsyncBaseTransport | None = None,
        own: RecentLines = RECENT,
    ) -> None:
        self._registry = registry
        self._token = token
        self._own = own
        self._http = httpx.AsyncClient(transport=transport, trust_env=False, timeout=None, verify=tls_context())  # noqa: S113
        self._room = asyncio.Semaphore(AT_ONCE)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def of_service(self, service_id: str, query: LogQuery) -> ServiceLogLines:
        """Read the lines of one service, or of the gateway itself.

        Raises:
            NotFound: it is not registered.
        """
        if service_id == GATEWAY:
            return self._merged(query, [], with_own=True)
        async with self._room:
            return self._merged(query, [await self._asked(self._registry.get(service_id), query)])

    async def of_experiment(self, experiment_id: str, query: LogQuery, service_id: str | None) -> ServiceLogLines:
        """Read the lines that belong to an experiment, of the gateway and the services that work for it, or of one.

        Raises:
            NotFound: the one does not work for it.
        """
        services = self._registry.of(experiment_id)
        if service_id is not None and service_id != GATEWAY:
            services = [each for each in services if each.id == service_id]
            if not services:
                raise NotFound(f"no service {service_id} works for {experiment_id}")
        asked = [] if service_id == GATEWAY else services[:MOST_SERVICES]
        async with self._room:
            found = list(await asyncio.gather(*(self._asked(each, query) for each in asked)))
        found += [
            _Said(each.id, f"only {MOST_SERVICES} are asked at once: name it")
            for each in services[len(asked) :]
            if asked
        ]
        return self._merged(query, found, with_own=service_id in {None, GATEWAY})

    def _merged(self, query: LogQuery, said: Sequence["_Said"], *, with_own: bool = False) -> ServiceLogLines:
        own = []
        if with_own:
            lines = self._own.newest(
                query.lines, of=query.experiment_id, least=query.level, containing=query.containing
            )
            own = [_Said(GATEWAY, None, lines.items)]
        entries = [
            ServiceLogEntry(**entry.model_dump(), service_id=each.service_id)
            for each in [*own, *said]
            for entry in each.items
            # A service names the experiment of its lines, and is believed only for its own.
            if query.experiment_id is None or entry.experiment_id == query.experiment_id
        ]
        newest = sorted(entries, key=lambda entry: entry.at)[-query.lines :]
        return ServiceLogLines(
            items=tuple(newest), unread={each.service_id: each.why_not for each in said if each.why_not is not None}
        )

    async def _asked(self, service: LiveService, query: LogQuery) -> "_Said":
        parameters: dict[str, str | int] = {"level": query.level, "containing": query.containing, "lines": query.lines}
        if query.experiment_id is not None:
            parameters["experiment_id"] = query.experiment_id
        headers = HEADERS | {"Authorization": f"Bearer {self._token(service.id)}"}
        url = f"{service.record.address}/v1/logs"
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                self._http.stream("GET", url, params=parameters, headers=headers) as answer,
            ):
                if answer.status_code != httpx.codes.OK or is_packed(answer.headers):
                    return _Said(service.id, f"it answered {answer.status_code}")
                content = b"".join([piece async for piece in at_most(answer.aiter_bytes(), MAX_BYTES)])
            return _Said(service.id, None, LogLines.model_validate(parse_json(content)).items)
        except TimeoutError:
            return _Said(service.id, f"it did not answer within {ANSWER_SECONDS:g} s")
        except httpx.HTTPError as error:
            return _Said(service.id, f"it cannot be reached: {type(error).__name__}")
        except (ReplyTooLong, ValidationError, ValueError):
            return _Said(service.id, "its answer cannot be read")


@dataclass(frozen=True, slots=True)
class _Said:
    service_id: str
    why_not: str | None = None
    items: tuple[LogEntry, ...] = ()
