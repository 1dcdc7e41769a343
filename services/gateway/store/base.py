"""The gateway's memory, as a protocol: SQL in a fleet, a dictionary in tests.

Every change is durable when its call returns. Nothing here is called per token, per trajectory or per heartbeat.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from flotilla.services.gateway.store.records import (
    AuditRecord,
    DeliveryRecord,
    ExperimentRecord,
    PublicationRecord,
    ServiceRecord,
    StoredAnswer,
    TokenRecord,
)
from flotilla.services.gateway.store.transaction import Stage, Transaction
from flotilla.services.gateway.store.writes import PointRecord, Write
from flotilla.shared.schemas.experiment import CheckpointView, Event

MetricRow = tuple[int, PointRecord]
"""A point and its place in the order of writing, which is the cursor of its page."""


class DeliveryStore(Protocol):
    """What web hooks have of the store."""

    async def deliveries(self) -> list[DeliveryRecord]:
        """List what waits to be sent to web hooks, in the order of the events."""

    async def delete_deliveries(self, message_ids: Collection[str]) -> None:
        """Forget what has been sent to web hooks, or is given up."""


class SeriesStore(Protocol):
    """What was measured."""

    def stage_soon(self, stage: Stage) -> None:
        """Let this be a part of the next transaction; see ``TransactionalStore``."""

    def write_soon(self, *writes: Write) -> None:
        """Store what was measured with the next transaction; see ``TransactionalStore``."""

    async def window(self, experiment_id: str, name: str) -> Mapping[str, Any]:
        """Find a measurement that had not ended; empty if there is none."""

    async def put_metrics(self, experiment_id: str, points: Sequence[PointRecord]) -> None:
        """Store points; one with the same name and step replaces the earlier one and moves to the end."""

    async def metrics(self, experiment_id: str, *, names: Sequence[str], after: int, limit: int) -> list[MetricRow]:
        """List up to ``limit`` points written after the cursor ``after``; no ``names`` means all.

        A name that ends with ``*`` means all that begin so.
        """

    async def metric_names(self, experiment_id: str) -> set[str]:
        """List the names that an experiment has points of."""


class Store(DeliveryStore, SeriesStore, Protocol):
    """Rows by resource. Lists come in the order of writing.

    What changes several rows, or memory with them, is one ``transaction``.
    """

    async def ping(self) -> None:
        """Prove that it answers.

        Raises:
            Unavailable: it does not.
        """

    async def close(self) -> None:
        """Close connections and threads."""

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        """Store all of them or none; see ``TransactionalStore``."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Put a change together; see ``TransactionalStore``."""

    async def experiments(self) -> list[ExperimentRecord]:
        """List all, oldest first."""

    async def services(self) -> list[ServiceRecord]:
        """List all, oldest first."""

    async def publication(self, experiment_id: str, version: int) -> PublicationRecord | None:
        """Find one."""

    async def publications(self, experiment_id: str, *, live_at: int | None = None) -> list[PublicationRecord]:
        """List an experiment's publications by version.

        Args:
            live_at: the version that is served: only this one, those that are open, and the last of the highest epoch,
                with which a gateway that starts continues. None: all, of which there may be thousands.
        """

    async def append_event(self, experiment_id: str, kind: str, at: float, data: Mapping[str, Any]) -> Event:
        """Store an event under the next id."""

    async def events(self, experiment_id: str, *, after: int, limit: int, types: Collection[str] = ()) -> list[Event]:
        """List up to ``limit`` events with an id above ``after``, of some types or of all."""

    async def audit(self, resource: str, *, limit: int) -> list[AuditRecord]:
        """List the newest audit records of a resource, newest first."""

    async def checkpoints(self, experiment_id: str) -> list[CheckpointView]:
        """List by step."""

    async def tokens(self) -> list[TokenRecord]:
        """List all, oldest first."""

    async def put_answer(self, answer: StoredAnswer) -> None:
        """Keep the answer to an idempotency key."""

    async def answer(self, key: str) -> StoredAnswer | None:
        """Find the answer to an idempotency key."""

    async def delete_answers(self, before: float) -> None:
        """Forget answers older than ``before``, seconds since the epoch."""
