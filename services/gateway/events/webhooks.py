"""Sends events to the operator's web hooks. No caller waits for a receiver: each has a queue and a task.

A delivery is a POST of JSON, signed as Standard Webhooks has it: ``webhook-signature`` is ``v1,`` and the base64 of the
HMAC-SHA256 of ``ID.TIMESTAMP.BODY``. It is tried again a bounded number of times; only 2xx counts, and no redirection
is followed. What waits is stored with its event, and forgotten when its delivery has ended: a gateway that begins sends
what the one before it did not, under the same ``webhook-id``. So a receiver gets each event at least once, and twice
where the gateway died between the answer and the deletion. A queue that is full loses its oldest event, and what has
waited too long is not sent; both are counted.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import httpx

from flotilla.services.gateway.store.base import DeliveryStore
from flotilla.services.gateway.store.records import DeliveryRecord
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import QueueDelivery
from flotilla.shared.clock import Clock, pause_after, rfc3339
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.environment.webhooks import Webhook
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.checked_transport import checked_client
from flotilla.shared.schemas.webhooks import WebhookView

log = logging.getLogger(__name__)

MOST_WAITING: Final = 1000
LONGEST_WAIT_SECONDS: Final = 24 * 3600.0
"""Age of an event that is not sent any more."""
FORGET_AGAIN_SECONDS: Final = 30.0
"""Until deliveries that have ended are deleted again, where the database did not answer."""
ATTEMPTS: Final = 6
TIMEOUT_SECONDS: Final = 10.0
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
REPEATED: Final = frozenset({408, 425, 429})
"""Of the refusals those that another attempt may change."""


def signature(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Sign a delivery, for ``webhook-signature``."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


class Receiver:
    """Delivers to one hook, one event after the other.

    Args:
        name: of the hook, the same in each gateway that has it.
    """

    def __init__(self, hook: Webhook, name: str, client: httpx.AsyncClient, store: DeliveryStore, clock: Clock) -> None:
        self.name: Final = name
        self._hook, self._client, self._store, self._clock = hook, client, store, clock
        self._waiting: deque[DeliveryRecord] = deque()
        self._ended: list[str] = []
        """Deliveries that the store still has."""
        self._arrived = asyncio.Event()
        self._delivered = self._failed = self._dropped = 0
        self._last_error: str | None = None
        self._last_at: str | None = None

    def wants(self, kind: str) -> bool:
        """Whether the hook receives events of a kind."""
        return self._hook.wants(kind)

    def put(self, delivery: DeliveryRecord) -> None:
        """Take what is stored."""
        if len(self._waiting) >= MOST_WAITING:
            self._ended.append(self._waiting.popleft().message_id)
            self._dropped += 1
        self._waiting.append(delivery)
        self._arrived.set()

    def forget(self, experiment_id: str) -> None:
        """Send nothing more of an experiment, which is deleted."""
        self._waiting = deque(each for each in self._waiting if each.experiment_id != experiment_id)

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
                delivery = self._waiting.popleft()
                if self._clock.now() - delivery.at > LONGEST_WAIT_SECONDS:
                    self._dropped += 1
                elif await self._deliver(delivery.message_id, delivery.body.encode()):
                    self._delivered += 1
                    self._last_at, self._last_error = rfc3339(self._clock.now()), None
                else:
                    self._failed += 1
                    log.warning("a web hook was not told", extra={"url": self._hook.shown, "error": self._last_error})
                self._ended.append(delivery.message_id)
                # Before the next one: a gateway that dies repeats one delivery at most.
                await self._delete_ended()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FORGET_AGAIN_SECONDS if self._ended else None):
                    await self._arrived.wait()
            await self._delete_ended()

    async def _delete_ended(self) -> None:
        ended = frozenset(self._ended)
        if not ended:
            return
        try:
            await self._store.delete_deliveries(ended)
        except FlotillaError as error:
            log.warning("deliveries that have ended could not be deleted", extra={"error": repr(error)})
        else:
            self._ended = [each for each in self._ended if each not in ended]

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


def names_of(hooks: Sequence[Webhook]) -> list[str]:
    """Name hooks by their URLs, as no reader of the database sees them; those of one URL are numbered."""
    before: Counter[str] = Counter()
    names = []
    for hook in hooks:
        before[hook.url] += 1
        names.append(f"{hashlib.sha256(hook.url.encode()).hexdigest()[:32]}-{before[hook.url]}")
    return names


class Webhooks:
    """All receivers of a gateway.

    Args:
        hooks: the operator's.
        networks: that are not public and that they may be in.
        store: keeps what waits.
        clock: the time.
    """

    def __init__(
        self, hooks: Sequence[Webhook], networks: Sequence[IPNetwork], store: DeliveryStore, clock: Clock
    ) -> None:
        self._client: httpx.AsyncClient = checked_client(networks, TIMEOUT_SECONDS)
        self._store = store
        self._receivers = [
            Receiver(hook, name, self._client, store, clock) for hook, name in zip(hooks, names_of(hooks), strict=True)
        ]

    async def load(self) -> None:
        """Take what an earlier gateway did not send; what no hook wants any more is forgotten.

        Raises:
            Unavailable: the database does not answer.
        """
        receivers = {receiver.name: receiver for receiver in self._receivers}
        unwanted: list[str] = []
        for delivery in await self._store.deliveries():
            receiver = receivers.get(delivery.hook)
            if receiver is None or not receiver.wants(delivery.type):
                unwanted.append(delivery.message_id)
            else:
                receiver.put(delivery)
        if unwanted:
            await self._store.delete_deliveries(unwanted)

    def stage(self, change: Transaction, experiment_id: str, kind: str, at: float, facts: Mapping[str, Any]) -> None:
        """Store what is to be sent of an event, with the event, and send it once both are stored."""
        wanting = [receiver for receiver in self._receivers if receiver.wants(kind)]
        if not wanting:
            return
        content = {"type": kind, "timestamp": rfc3339(at), "data": {"experiment_id": experiment_id, **facts}}
        body = json.dumps(content, separators=(",", ":"), default=str)
        for receiver in wanting:
            delivery = DeliveryRecord(f"msg_{secrets.token_hex(12)}", experiment_id, receiver.name, kind, at, body)
            change.write(QueueDelivery(delivery))
            change.then(partial(receiver.put, delivery))

    def stage_removal(self, change: Transaction, experiment_id: str) -> None:
        """Send nothing more of an experiment once its removal, which takes the stored deliveries along, is stored."""
        for receiver in self._receivers:
            change.then(partial(receiver.forget, experiment_id))

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
