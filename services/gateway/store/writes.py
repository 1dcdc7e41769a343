"""What can be written, one type for each kind: a transaction is a list of these."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from flotilla.services.gateway.store.records import (
    AuditRecord,
    DeliveryRecord,
    ExperimentRecord,
    PublicationRecord,
    ServiceRecord,
    StoredAnswer,
    TokenRecord,
)
from flotilla.shared.schemas.experiment import CheckpointView

Record = ExperimentRecord | ServiceRecord | PublicationRecord | TokenRecord | StoredAnswer


CURRICULUM: Final = "curriculum"
"""The window of what a curriculum knows of its rows."""


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Insert or replace: a publication by experiment and version, an answer by its key, others by id."""

    record: Record


@dataclass(frozen=True, slots=True)
class DeleteRecord:
    """Delete one; deleting it again does nothing."""

    kind: type[ServiceRecord] | type[TokenRecord]
    id: str


@dataclass(frozen=True, slots=True)
class DeleteExperiment:
    """Delete it with its publications, metrics, events, deliveries, checkpoints and windows; the audit trail stays."""

    experiment_id: str


class PointRecord(NamedTuple):
    """One value of one series; a tuple, for a chart is drawn from hundreds of thousands.

    Attributes:
        at: when it was stored, by RFC 3339.
    """

    name: str
    step: int
    version: int
    value: float
    at: str | None = None


@dataclass(frozen=True, slots=True)
class PutMetrics:
    """Store points; one with the same name and step replaces the earlier one and moves to the end."""

    experiment_id: str
    points: Sequence[PointRecord]


@dataclass(frozen=True, slots=True)
class AppendEvent:
    """Store an event under the next id; ``at`` is in seconds since the epoch."""

    experiment_id: str
    kind: str
    at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AppendAudit:
    """Store an audit record."""

    record: AuditRecord


@dataclass(frozen=True, slots=True)
class PutCheckpoint:
    """Insert or replace by experiment and step."""

    experiment_id: str
    checkpoint: CheckpointView


@dataclass(frozen=True, slots=True)
class DeleteCheckpoints:
    """Delete an experiment's checkpoints of later steps than ``after``."""

    experiment_id: str
    after: int


@dataclass(frozen=True, slots=True)
class PutWindow:
    """Insert or replace by experiment and name: a measurement that has not ended, for the gateway after this one."""

    experiment_id: str
    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteAnswers:
    """Forget answers older than ``before``, in seconds since the epoch."""

    before: float


@dataclass(frozen=True, slots=True)
class QueueDelivery:
    """Keep what is to be sent to a web hook."""

    record: DeliveryRecord


@dataclass(frozen=True, slots=True)
class DeleteDeliveries:
    """Forget deliveries, which have ended; of those that are not there nothing happens."""

    message_ids: Collection[str]


Write = (
    PutRecord
    | DeleteRecord
    | DeleteExperiment
    | PutMetrics
    | AppendEvent
    | AppendAudit
    | PutCheckpoint
    | DeleteCheckpoints
    | PutWindow
    | DeleteAnswers
    | QueueDelivery
    | DeleteDeliveries
)
