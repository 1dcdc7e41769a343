"""Tells events to the operator's web hooks. Nobody waits for a receiver: each has a queue and a task of its own.

A delivery is a POST of JSON, signed as Standard Webhooks has it: ``webhook-signature`` is ``v1,`` and the base64 of the
HMAC-SHA256 of ``ID.TIMESTAMP.BODY``. It is tried again a bounded number of times; only 2xx counts, and no redirection
is followed. A queue that is full loses its oldest event, which is counted. What waits when the gateway ends is lost.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from flotilla.shared.clock import Clock, pause_after, rfc3339
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.environment.webhooks import Webhook
from flotilla.shared.net.client.checked_transport import checked_client
from flotilla.shared.schemas.webhooks import WebhookView

log = logging.getLogger(__name__)

MOST_WAITING: Final = 1000
ATTEMPTS: Final = 6
TIMEOUT_SECONDS: Final = 10.0
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
REPEATED: Final = frozenset({408, 425, 429})
"""Of the refusals those that another attempt may change."""


def signature(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Sign a delivery, as ``webhook-signature`` says it."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


class Receiver:
    """Delivers to one hook, one event after the other."""

    def __init__(self, hook: Webhook, client: httpx.AsyncClient, clock: Clock) -> None:
        self._hook, self._client, self._clock = hook, client, clock
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._arrived = asyncio.Event()
        self._delivered = self._failed = self._dropped = 0
        self._last_error: str | None = None
        self._last_at: str | None = None

    def put(self, kind: str, body: bytes) -> None:
        """Take an event, if the hook wants its kind."""
        if not self._hook.wants(kind):
            return
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append((f"msg_{secrets.token_hex(12)}", body))
        self._arrived.set()

    def view(self) -> WebhookView:
        """Describe how deliveries go."""
        return WebhookView(
            url=self._hook.shown,
            events=self._hook.events,
            delivered=self._delivered,
            failed=self._failed,
            dropped=self._dropped,
            waiting=len(self._waiting),
            last_error=self._last_error,
            last_delivered_at=self._last_at,
        )

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            self._arrived.clear()
            while self._waiting:
                message_id, body = self._waiting.popleft()
                if await self._deliver(message_id, body):
                    self._delivered += 1
                    self._last_at, self._last_error = rfc3339(self._clock.now()), None
                else:
                    self._failed += 1
                    log.warning("a web hook was not told", extra={"url": self._hook.shown, "error": self._last_error})
            await self._arrived.wait()

    async def _deliver(self, message_id: str, body: bytes) -> bool:
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1:
                await asyncio.sleep(pause_after(attempt - 1, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
            status = await self._post(message_id, body)
            if status is not None and 200 <= status < 300:
                return True
            if status is not None and status < 500 and status not in REPEATED:
                return False
        return False

    async def _post(self, message_id: str, body: bytes) -> int | None:
        """Send it once; None where nothing was answered in time, or something else went wrong."""
        at = int(self._clock.now())
        headers = {
            "content-type": "application/json",
            "user-agent": "flotilla",
            "webhook-id": message_id,
            "webhook-timestamp": str(at),
            "webhook-signature": signature(self._hook.key, message_id, at, body),
        }
        try:
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                self._client.stream("POST", self._hook.url, content=body, headers=headers) as answer,
            ):
                status = answer.status_code
        except (TimeoutError, httpx.TimeoutException):
            self._last_error = f"no answer within {TIMEOUT_SECONDS:g} s"
            return None
        except httpx.HTTPError as error:
            self._last_error = (str(error) or type(error).__name__)[:300]
            return None
        except Exception as error:
            # Of this delivery alone: the other hooks, and the next event of this one, are not to suffer from it.
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            self._last_error = f"{type(cause).__name__}: {cause}".replace(self._hook.url, self._hook.shown)[:300]
            return None
        if not 200 <= status < 300:
            self._last_error = f"the receiver answered {status}"
        return status


class Webhooks:
    """All receivers of a gateway.

    Args:
        hooks: the operator's.
        networks: that are not public and that they may be in.
        clock: tells the time.
    """

    def __init__(self, hooks: Sequence[Webhook], networks: Sequence[IPNetwork], clock: Clock) -> None:
        self._client: httpx.AsyncClient = checked_client(networks, TIMEOUT_SECONDS)
        self._receivers = [Receiver(hook, self._client, clock) for hook in hooks]

    def put(self, experiment_id: str, kind: str, at: float, facts: Mapping[str, Any]) -> None:
        """Take an event that was stored."""
        if not self._receivers:
            return
        content = {"type": kind, "timestamp": rfc3339(at), "data": {"experiment_id": experiment_id, **facts}}
        body = json.dumps(content, separators=(",", ":"), default=str).encode()
        for receiver in self._receivers:
            receiver.put(kind, body)

    def view(self) -> list[WebhookView]:
        """Describe how deliveries go, in the order of the file."""
        return [receiver.view() for receiver in self._receivers]

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for receiver in self._receivers:
                    tasks.create_task(receiver.run(), name="web hook")
        finally:
            await self._client.aclose()
