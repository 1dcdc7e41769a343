"""The rollouts of experiments whose episodes agents drive, as the gateway calls them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from services.gateway.registry.services import LiveService, Registry
from shared.client import problem_to_error
from shared.errors import DeadlineExceeded, FlotillaError, Unavailable
from shared.schemas.service import ServiceKind, WorkState

CONNECT_SECONDS: Final = 5.0
CALL_SECONDS: Final = 10.0
"""For an answer that takes no sampling, beside what the caller is willing to wait."""
MAX_CONNECTIONS: Final = 4096


class EpisodeGone(FlotillaError):
    """The rollout that held the episode is gone, and the episode with it."""

    code, title, status = "episode_gone", "The episode is gone", 410


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer whose body is passed on as it comes."""

    status: int
    content_type: bytes
    pieces: AsyncIterator[bytes]


class Rollouts:
    """Calls rollouts.

    Args:
        registry: of the services.
        token: makes what rollouts let in.
        transport: of the connections, for tests.
    """

    def __init__(
        self, registry: Registry, token: Callable[[], str], transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._registry = registry
        self._token = token
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=256)
        # Deadlines are set for each call: how long an answer is sampled for, its rollout decides.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._http = httpx.AsyncClient(limits=limits, transport=transport, trust_env=False, timeout=timeout)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def at_work(self, experiment_id: str) -> list[LiveService]:
        """List the rollouts that work for an experiment now."""
        found = self._registry.of(experiment_id, ServiceKind.ROLLOUT)
        return [each for each in found if each.observed.state is WorkState.RUNNING and not each.is_draining]

    def find(self, service_id: str, episode_id: str) -> LiveService:
        """Find the rollout that holds an episode.

        Raises:
            EpisodeGone: it is no member of the fleet any more.
        """
        service = self._registry.find(service_id)
        if service is None:
            raise EpisodeGone(f"the rollout that held episode {episode_id} is gone: begin another one")
        return service

    async def call(self, service: LiveService, path: str, body: Mapping[str, Any], seconds: float = 0.0) -> Any:
        """Post JSON and return the JSON answer.

        Args:
            path: below the rollout's address.
            seconds: that the rollout may wait before it answers.

        Raises:
            FlotillaError: the subclass that the rollout's problem names.
            Unavailable: it cannot be reached.
            DeadlineExceeded: it does not answer.
        """
        url = f"{service.record.address}{path}"
        try:
            async with asyncio.timeout(seconds + CALL_SECONDS):
                answer = await self._http.post(url, json=dict(body), headers=self._headers())
        except TimeoutError:
            raise DeadlineExceeded(f"{service.id} does not answer") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{service.id} cannot be reached: {error or type(error).__name__}") from error
        if answer.is_success:
            return answer.json()
        raise problem_to_error(answer.status_code, answer.content)

    @asynccontextmanager
    async def streamed(
        self, service: LiveService, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Streamed]:
        """Post a body and pass the answer on, whatever it says.

        Raises:
            Unavailable: it cannot be reached, or breaks off.
        """
        request = self._http.build_request(
            "POST", f"{service.record.address}{path}", content=body, headers=self._headers() | dict(headers)
        )
        try:
            answer = await self._http.send(request, stream=True)
            try:
                content_type = answer.headers.get("content-type", "application/json").encode("latin-1")
                yield Streamed(answer.status_code, content_type, answer.aiter_raw())
            finally:
                await answer.aclose()
        except httpx.TransportError as error:
            raise Unavailable(f"{service.id} cannot be reached: {error or type(error).__name__}") from error

    def _headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self._token()}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
