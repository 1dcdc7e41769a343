"""The answer to a request with an idempotency key is stored with what the request changes, or neither is."""

from collections.abc import Callable
from contextvars import ContextVar

from pydantic import BaseModel

from flotilla.services.gateway.store.records import StoredAnswer
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PutRecord

JSON = "application/json"


class AwaitedAnswer:
    """What the request that is being handled will be answered, once that is known.

    Args:
        key: of the request.
        body_digest: hash of the request's body.
        status: finds the route's HTTP status for a success.
        now: reads the wall clock, in seconds since the epoch.

    Attributes:
        is_stored: whether a transaction has stored it.
    """

    def __init__(self, key: str, body_digest: str, status: Callable[[], int], now: Callable[[], float]) -> None:
        self._key = key
        self._body_digest = body_digest
        self._status = status
        self._now = now
        self.is_stored = False

    def of(self, status: int, content_type: str, body: str) -> StoredAnswer:
        """Make the row of an answer."""
        return StoredAnswer(self._key, self._body_digest, status, content_type, body, self._now())

    def stage(self, change: Transaction, view: BaseModel) -> None:
        """Store a success with what it tells of."""
        change.write(PutRecord(self.of(self._status(), JSON, view.model_dump_json())))
        change.then(self._set_stored)

    def _set_stored(self) -> None:
        self.is_stored = True


awaited: ContextVar[AwaitedAnswer | None] = ContextVar("awaited", default=None)
"""Set while a request with an idempotency key is handled."""


def stage_answer(change: Transaction, view: BaseModel) -> None:
    """Store what the request being handled is answered together with its change; without a key there is nothing to do.

    Args:
        change: the last one of the request.
        view: what the route returns.
    """
    answer = awaited.get()
    if answer is not None:
        answer.stage(change, view)
