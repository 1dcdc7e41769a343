"""An environment behind an OpenEnv server: one session of its WebSocket for each episode.

The server, its packages and its interpreter are its own; this side speaks the wire and imports none of it. What goes
wrong on the way (no connection, a session that is refused for good, an error of the environment) is an error of the
episode, never a reward.

Source: OpenEnv 0.10, ``core/env_server/types.py``: reset, step, close; observation, error.
"""

import asyncio
import contextlib
import json
import math
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from flotilla.services.rollout.environments.base import Info, Observation, Step, answer_of
from flotilla.shared.environment.settings import GRADER_NETWORKS, LOOPBACK, IPNetwork
from flotilla.shared.errors import EpisodeFailed
from flotilla.shared.net.client.address_policy import AddressRefused, permitted_address
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.vision.parts import are_parts

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MOST_BYTES: Final = 4 << 20
"""Of one message of the server."""
CLOSE_SECONDS: Final = 2.0
FULL_SECONDS: Final = 0.25
"""Before a session is asked for again that the server has no room for; each time twice as long, up to four seconds."""
LONGEST_PAUSE: Final = 4.0
FULL: Final = "CAPACITY_REACHED"
INVALID: Final = "VALIDATION_ERROR"


class OpenEnv:
    """Plays with an OpenEnv server.

    Args:
        url: of the server, as ``http://127.0.0.1:8000``.
        action: field of the action that the policy's text becomes; None: the text is the action, a JSON object.
        more: further fields of every action.
        observation: field of the observation that is shown, a text or parts with images; None: all of it, as JSON.
        reset: further arguments of a reset, beside the seed.
        format_penalty: reward of a text that is no action, where ``action`` is None.
        networks: that are not public, and that the URL may lead to.

    Raises:
        ValueError: the URL is none, or an option is of another type.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str | None = "message",
        more: Mapping[str, Any] | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        format_penalty: float = 0.0,
        networks: Sequence[IPNetwork] = LOOPBACK,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"the address of an OpenEnv server is http://HOST:PORT, got {url!r}")
        for name, value in (("action", action), ("observation", observation)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must name a field, or be null, got {value!r}")
        for name, fields in (("more", more), ("reset", reset)):
            if fields is not None and not isinstance(fields, Mapping):
                raise ValueError(f"{name} must be fields and their values, got {fields!r}")
        self.name = f"openenv:{url}"
        self._url, self._host, self._is_secure = url, parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._path = f"{parts.path.rstrip('/')}/ws"
        self._action, self._more, self._observation = action, dict(more or {}), observation
        self._reset, self._format_penalty, self._networks = dict(reset or {}), format_penalty, networks
        self._connection: ClientConnection | None = None
        self._shown: Observation = ""
        self._is_graded = False

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Open a session and begin in it; a server that is full is asked again until this is cancelled.

        Raises:
            EpisodeFailed: the server cannot be reached, or its environment cannot begin.
        """
        pause = FULL_SECONDS
        while True:
            await self._connect()
            answer = await self._ask({"type": "reset", "data": {"seed": seed % 2**31, **self._reset}})
            if answer.get("type") != "error":
                break
            if _code(answer) != FULL:
                raise EpisodeFailed(_said(answer))
            await self.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        shown, _, _ = self._read(answer)
        self._shown, self._is_graded = shown, False
        return shown, {}

    async def step(self, text: str) -> Step:
        """Act.

        Raises:
            EpisodeFailed: the session is lost, the environment failed, or an episode ended without any reward.
        """
        action = self._action_of(text)
        if action is None:
            return self._invalid()
        answer = await self._ask({"type": "step", "data": action})
        if answer.get("type") == "error":
            # Where the policy writes the fields itself, what does not fit them is its mistake.
            if self._action is None and _code(answer) == INVALID:
                return self._invalid()
            raise EpisodeFailed(_said(answer))
        shown, reward, is_done = self._read(answer)
        self._is_graded = self._is_graded or reward is not None
        if is_done and not self._is_graded:
            raise EpisodeFailed("the episode ended, and no step of it had a reward")
        self._shown = shown
        return shown, reward or 0.0, is_done, False, {"is_valid": True}

    async def close(self) -> None:
        """End the session; a server that is gone has ended it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.send(json.dumps({"type": "close"}))
                await connection.close()
        except (OSError, TimeoutError, WebSocketException):
            connection.transport.abort()

    def _invalid(self) -> Step:
        self._is_graded = True
        return self._shown, self._format_penalty, False, False, {"is_valid": False}

    def _action_of(self, text: str) -> dict[str, Any] | None:
        answer = answer_of(text)
        if self._action is not None:
            return {**self._more, self._action: answer}
        try:
            given = json.loads(answer)
        except ValueError:
            return None
        return {**self._more, **given} if isinstance(given, dict) else None

    def _read(self, answer: Mapping[str, Any]) -> tuple[Observation, float | None, bool]:
        data = answer.get("data")
        observation = data.get("observation") if isinstance(data, Mapping) else None
        if answer.get("type") != "observation" or not isinstance(data, Mapping) or not isinstance(observation, Mapping):
            raise EpisodeFailed(f"the server's message is no observation: {str(answer)[:200]}")
        shown: Observation
        if self._observation is None:
            shown = json.dumps(observation, ensure_ascii=False, sort_keys=True)
        elif self._observation in observation:
            value = observation[self._observation]
            shown = value if isinstance(value, str) or are_parts(value) else json.dumps(value, ensure_ascii=False)
        else:
            fields = ", ".join(sorted(map(str, observation)))
            raise EpisodeFailed(f"the observation has no field {self._observation!r}; it has {fields}")
        reward = data.get("reward")
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise EpisodeFailed(f"the reward is {reward!r}, no finite number")
        return shown, None if reward is None else float(reward), bool(data.get("done"))

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        scheme = "wss" if self._is_secure else "ws"
        context: ssl.SSLContext | None = tls_context() if self._is_secure else None
        try:
            address = await permitted_address(self._host, self._port, private=self._networks)
            host = f"[{self._host}]" if ":" in self._host else self._host
            # The name was resolved once: the connection goes to the address that was examined.
            self._connection = await connect(
                f"{scheme}://{host}:{self._port}{self._path}",
                host=address,
                port=self._port,
                ssl=context,
                proxy=None,
                open_timeout=None,
                max_size=MOST_BYTES,
            )
        except AddressRefused as error:
            raise EpisodeFailed(
                f"{self._url} is not a public address, and in no network of the rollout service's {GRADER_NETWORKS}"
            ) from error
        except (OSError, TimeoutError, WebSocketException) as error:
            raise EpisodeFailed(f"{self._url} cannot be reached: {error}") from error

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.exceptions import ConnectionClosed, WebSocketException

        if self._connection is None:
            raise EpisodeFailed("the session has ended")
        try:
            # A refused session receives the reason before it is closed: that is read.
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(json.dumps(message))
            answer = json.loads(await self._connection.recv())
        except (OSError, WebSocketException) as error:
            raise EpisodeFailed(f"the session was lost: {error}") from error
        except ValueError as error:
            raise EpisodeFailed(f"the server's message is no JSON: {error}") from error
        if not isinstance(answer, Mapping):
            raise EpisodeFailed("the server's message is no JSON object")
        return answer


def _code(answer: Mapping[str, Any]) -> str | None:
    data = answer.get("data")
    return data.get("code") if isinstance(data, Mapping) else None


def _said(answer: Mapping[str, Any]) -> str:
    data = answer.get("data")
    message = data.get("message") if isinstance(data, Mapping) else None
    return f"the server answered {str(message)[:500]!r} ({_code(answer)})"
