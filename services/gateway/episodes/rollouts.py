"""The rollouts of experiments whose episodes agents drive, as the gateway calls them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from flotilla.services.gateway.episodes.connection import CONNECT_SECONDS, KEPT_OPEN_SECONDS, Connection, Connections
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, Unavailable
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.client import problem_to_error
from flotilla.shared.schemas.service import ServiceKind, WorkState

CALL_SECONDS: Final = 10.0
"""For an answer that takes no sampling, beside what the caller is willing to wait."""
MAX_CONNECTIONS: Final = 4096


class EpisodeGone(FlotillaError):
    """The rollout that held the episode has ended, and the episode with it."""

    code, title, status = "episode_gone", "The episode is gone", 410


class BrokenOff(Unavailable):
    """The connection to a rollout broke when it may have had the whole request, so it may do what was asked."""


class Rollouts:
    """Calls rollouts.

    Args:
        registry: of the services.
        token_for: makes what services of a kind let in.
    """

    def __init__(self, registry: Registry, token_for: Callable[[ServiceKind], str]) -> None:
        self._registry = registry
        self._token_for = token_for
        # For what agents ask rarely; requests for completions have connections of their own.
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEPT_OPEN_SECONDS)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._http = httpx.AsyncClient(limits=limits, trust_env=False, timeout=timeout, verify=tls_context())
        self._connections = Connections()

    async def aclose(self) -> None:
        """Close the connections."""
        self._connections.close()
        await self._http.aclose()

    def at_work(self, experiment_id: str) -> list[LiveService]:
        """List the rollouts that work for an experiment now."""
        found = self._registry.of(experiment_id, ServiceKind.ROLLOUT)
        return [each for each in found if each.observed.state is WorkState.RUNNING and not each.is_draining]

    def has_unheard(self, experiment_id: str) -> bool:
        """Whether a rollout of an experiment has not been heard since this gateway began."""
        return any(not each.is_observed for each in self._registry.of(experiment_id, ServiceKind.ROLLOUT))

    def find(self, service_id: str, episode_id: str) -> LiveService:
        """Find the rollout that holds an episode.

        Raises:
            EpisodeGone: it is no member of the fleet any more.
        """
        service = self._registry.find(service_id)
        # An agent may write any id: what rollouts let in is for no service of another kind.
        if service is None or service.kind is not ServiceKind.ROLLOUT:
            raise EpisodeGone(f"the rollout that held episode {episode_id} is gone: begin another one")
        return service

    async def call(
        self,
        service: LiveService,
        path: str,
        body: Mapping[str, Any],
        seconds: float = 0.0,
        answer_seconds: float = CALL_SECONDS,
    ) -> Any:
        """Post JSON and return the JSON answer.

        Args:
            path: below the rollout's address.
            seconds: that the rollout may wait before it answers.
            answer_seconds: that it may take beside that.

        Raises:
            FlotillaError: the subclass that the rollout's problem names.
            Unavailable: it cannot be reached; ``BrokenOff`` where it may do what was asked all the same.
            DeadlineExceeded: it does not answer.
        """
        url = f"{service.record.address}{path}"
        try:
            async with asyncio.timeout(seconds + answer_seconds):
                answer = await self._http.post(url, json=dict(body), headers=self._headers())
        except TimeoutError:
            raise DeadlineExceeded(f"{service.id} does not answer") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(f"{service.id} cannot be reached: {error or type(error).__name__}") from error
        except httpx.TransportError as error:
            raise BrokenOff(f"{service.id} broke off: {error or type(error).__name__}") from error
        if answer.is_success:
            return answer.json()
        raise problem_to_error(answer.status_code, answer.content)

    @asynccontextmanager
    async def streamed(
        self, service: LiveService, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Connection]:
        """Post a body; the answer, whatever it says, is read from the connection as it comes.

        Raises:
            Unavailable: it cannot be reached, or breaks off.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in (self._headers() | dict(headers)).items())
        async with self._connections.posted(service.record.address, path, body, lines) as connection:
            yield connection

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token_for(ServiceKind.ROLLOUT)}", "Accept-Encoding": "identity"}
