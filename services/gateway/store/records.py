"""What the gateway remembers: one frozen record per row, made of plain JSON values and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flotilla.shared.config.revisions import REVISION
from flotilla.shared.schemas.experiment import ExperimentState


@dataclass(frozen=True, slots=True)
class ExperimentRecord:
    """An experiment.

    Attributes:
        id: its name in every URL and Redis key.
        name: the spec's name.
        state: its state in the lifecycle.
        revision: grows with each change of the spec that its services have to follow; one of ``resources`` is none.
        spec: the resolved spec as JSON, as it was written.
        directory: where it keeps its files.
        created_at, updated_at, started_at: seconds since the epoch; not started is None.
        step: optimiser steps done, as the trainer last said.
        policy_version: newest committed publication.
        published_step: steps that ``policy_version`` contains.
        trainer_epoch: how often a trainer was assigned.
        outcome: the final state that ``stopping`` leads to.
        is_trained: the trainer reported that all steps are done and durable.
        evaluated_version: newest version whose evaluation ended; None before the first.
        evaluating_version: version under evaluation now; still set after a restart that abandoned it.
        problem: ``{component, cause, at}`` of a failure or of a stall.
        health: findings of the training-health checks, as JSON; None before the first.
        final_ledger: both lanes' ledgers at the end.
        origin: the checkpoint that it began from, an ``Origin`` as JSON; None if it began with the model's weights.
        number, start_number: grow with each experiment that is created, or started, whatever the clock says;
            0 in rows of before there was one.
        spec_revision: of the schema that ``spec`` was written under; see ``shared/config/revisions.py``.
        created_by: the token that made it, as audit records name it; None in rows of before it was kept.
        owner: of the token that made it; None: the fleet's own.
        device_shift: whose shift it is on devices that trainer and rollouts share; see ``registry/shifts.py``.
        changes: of the spec while it ran, oldest first, each a ``LiveChange`` as JSON; ``spec`` has them.
    """

    id: str
    name: str
    state: ExperimentState
    revision: int
    spec: Mapping[str, Any]
    directory: str
    created_at: float
    updated_at: float
    started_at: float | None = None
    step: int = 0
    policy_version: int = 0
    published_step: int = 0
    trainer_epoch: int = 0
    outcome: str | None = None
    is_trained: bool = False
    evaluated_version: int | None = None
    evaluating_version: int | None = None
    problem: Mapping[str, Any] | None = None
    final_ledger: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None
    health: Sequence[Mapping[str, Any]] | None = None
    number: int = 0
    start_number: int = 0
    device_shift: int = 1
    spec_revision: int = REVISION
    created_by: str | None = None
    owner: str | None = None
    changes: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A registered service, as far as it outlives the gateway's process.

    Attributes:
        id: given by the gateway.
        incarnation: random name of the process; a second registration of it finds this record.
        experiment_id: what it is assigned to; None while it is idle.
        is_draining: takes no new assignment.
        notice_ends_at: until when it may finish the work it has in progress, in seconds since the epoch; None unless it
            drains.
        registered_at: seconds since the epoch.
        number: grows with each service that registers: their order, whatever the clock says.
        silent_since: when one that was given up for its silence called last, in seconds since the epoch; it is no
            member any more, and remembered for a while. None: it is one.
        trainer_epoch: of the trainers of its experiment when it was given up.
    """

    id: str
    kind: str
    address: str
    host: str
    pid: int
    capabilities: Mapping[str, Any]
    incarnation: str
    registered_at: float
    is_draining: bool = False
    notice_ends_at: float | None = None
    experiment_id: str | None = None
    number: int = 0
    silent_since: float | None = None
    trainer_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """One version's publication.

    Attributes:
        manifest: what is sent, as JSON.
        members: ``{service_id, rank}`` of the epoch's receivers.
        rendezvous: where the epoch meets; None until the sender has opened it.
        service_id: the sending trainer service.
        announced_at, ended_at: seconds since the epoch; ``ended_at`` is None while it is open.
    """

    experiment_id: str
    version: int
    step: int
    epoch: int
    phase: str
    service_id: str
    manifest: Mapping[str, Any]
    members: Sequence[Mapping[str, Any]]
    rendezvous: Mapping[str, Any] | None
    reason: str | None
    announced_at: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One mutation: who did what to which resource, and when (seconds since the epoch)."""

    at: float
    action: str
    resource: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    actor: str = "gateway"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token that somebody made, without the token itself.

    Attributes:
        id: names it in URLs and audit records.
        name: unique among those that exist.
        scope: a ``Scope``.
        kind: of service; None: any, or it is for none.
        experiment_id: the only experiment that it may touch; None: all.
        subject: what else it is bound to.
        digest: its SHA-256, hexadecimal.
        created_at, expires_at: seconds since the epoch; one that does not expire has None.
        created_by: who made it, as audit records name them.
        quota: what it may have, a ``Quota`` as JSON; None: what the gateway's settings say.
        owner: whose experiments it may touch; None: all.
    """

    id: str
    name: str
    scope: str
    kind: str | None
    experiment_id: str | None
    subject: str | None
    digest: str
    created_at: float
    expires_at: float | None
    created_by: str
    quota: Mapping[str, Any] | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """An event that waits to be sent to one web hook.

    Attributes:
        message_id: the same in each attempt, also of another gateway.
        hook: which one, as ``Webhooks`` names it.
        type: of the event.
        at: when the event was stored, seconds since the epoch.
        body: what is sent.
    """

    message_id: str
    experiment_id: str
    hook: str
    type: str
    at: float
    body: str


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The first answer to a POST with an idempotency key."""

    key: str
    body_digest: str
    status: int
    content_type: str
    body: str
    at: float
