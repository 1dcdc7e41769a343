"""The experiments and their records: memory answers, the store remembers.

A record is replaced in memory once the store has it, together with all that changes with it: see ``Transaction``.
Methods named ``stage`` take part in a transaction; what they return is true once that is stored.

What one room keeps for each experiment, for as long as the repository keeps that experiment.

Every room owns its own: the others are passed a value or a function, never the experiment to write on.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from flotilla.services.gateway.access.caller import actor, owner
from flotilla.services.gateway.access.quotas import UNLIMITED, check_new, check_running
from flotilla.services.gateway.records.steering import Steering, changes_of
from flotilla.services.gateway.signals import Signal
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.records import AuditRecord, ExperimentRecord
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import AppendAudit, DeleteExperiment, PutRecord
from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.revisions import REVISION, migrated
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ActionNotAllowed, InvalidSpec, ModelError, NotFound, SpecRefused
from flotilla.shared.net.authorisation.token_records import Quota
from flotilla.shared.schemas.experiment import ExperimentState, Problem
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.plane import DataPlane


async def step_of(store: Store, record: ExperimentRecord, version: int) -> int:
    """Find the optimiser steps that a version contains; of the initial weights 0, or those of where it began."""
    if version == record.policy_version:
        return record.published_step
    published = await store.publication(record.id, version)
    if published is not None:
        return published.step
    origin = record.origin
    return origin["step"] if origin is not None and version == origin["version"] else 0


log = logging.getLogger(__name__)

TOLD_ALONE = frozenset({"step", "health"})
"""Fields that are shown and nothing else: neither placement nor what any service should do depends on them, and they
change in each step."""


def owner_of(repository: "ExperimentRepository", experiment_id: str) -> str | None:
    """Name whose an experiment is, usable or not; None: nobody's in particular, or there is none."""
    return repository.record_of(experiment_id).owner if repository.knows(experiment_id) else None


class OpenPlane(Protocol):
    """Opens one lane of an experiment."""

    def __call__(self, experiment_id: str, lane: Lane, *, lease_seconds: float | None = None) -> DataPlane:
        """Open it; ``lease_seconds`` is how long another's claim must be idle before it is taken over."""


@dataclass(frozen=True, slots=True)
class UnusableExperiment:
    """A record whose spec this release refuses, though an earlier one did not: it is shown, and can be deleted.

    Attributes:
        cause: why the spec is refused.
    """

    record: ExperimentRecord
    cause: str


def document_of(record: ExperimentRecord) -> Mapping[str, Any]:
    """Read a record's spec as this release writes it; the record keeps what was written.

    Raises:
        ValueError: a later release wrote it.
    """
    return migrated(record.spec, record.spec_revision)


class Experiment:
    """An experiment, its validated spec and its data plane.

    Attributes:
        changed: fires after each change of the record, of ``TOLD_ALONE`` apart.
    """

    def __init__(self, record: ExperimentRecord, spec: ExperimentSpec, open_plane: OpenPlane) -> None:
        self.record = record
        self.spec = spec
        self._steering: tuple[ExperimentRecord, Steering] | None = None
        self.open_plane = open_plane
        self.train = open_plane(record.id, Lane.TRAIN)
        self.evaluation = open_plane(record.id, Lane.EVALUATION)
        self.changed = Signal()

    @property
    def id(self) -> str:
        """Its id."""
        return self.record.id

    @property
    def steering(self) -> Steering:
        """What its live changes make of the spec."""
        record = self.record
        of, known = self._steering or (None, None)
        if of is None or known is None or of.spec is not record.spec or of.changes is not record.changes:
            known = self.steering_of(record)
            # With the record that it was made of: another thread may set the next one meanwhile.
            self._steering = record, known
        return known

    def steering_of(self, record: ExperimentRecord) -> Steering:
        """Return what live changes make of the spec in ``record``, which may be about to be stored."""
        return Steering.of(document_of(record), self.spec, changes_of(record))

    @property
    def state(self) -> ExperimentState:
        """Its state in the lifecycle."""
        return self.record.state

    @property
    def is_active(self) -> bool:
        """Whether services work for it, or should."""
        return self.state in {ExperimentState.STARTING, ExperimentState.RUNNING, ExperimentState.PAUSED}

    @property
    def is_at_work(self) -> bool:
        """Whether services work for it, or come to rest."""
        return self.is_active or self.state is ExperimentState.STOPPING

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done and durable, or there are none."""
        return self.record.is_trained or not self.spec.trains

    @property
    def hold_version(self) -> int | None:
        """Version that an evaluation is pinned to now."""
        return self.record.evaluating_version


class ExperimentRepository:
    """All experiments, by id.

    Args:
        quota_of: finds what a token may have.
        on_change: called with the id after each change of a record, of ``TOLD_ALONE`` apart.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        open_plane: OpenPlane,
        quota_of: Callable[[str | None], Quota] = lambda _whose: UNLIMITED,
        *,
        on_change: Callable[[str], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._open_plane = open_plane
        self._quota_of = quota_of
        self._on_change = on_change
        self._experiments: dict[str, Experiment] = {}
        self._unusable: dict[str, UnusableExperiment] = {}

    async def load(self) -> None:
        """Load the experiments of an earlier process; one whose spec is refused now keeps none of the others out."""
        for record in await self._store.experiments():
            try:
                spec = validate_spec(document_of(record))
            except (InvalidSpec, ValueError) as error:
                self._unusable[record.id] = UnusableExperiment(record, str(error))
                facts = {"experiment_id": record.id, "cause": str(error)}
                log.error("a stored spec is refused, its experiment cannot be used", extra=facts)  # noqa: TRY400
            else:
                self._experiments[record.id] = Experiment(record, spec, self._open_plane)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Put a change of records, and of what goes with them, together."""
        return self._store.transaction()

    def __iter__(self) -> Iterator[Experiment]:
        return iter(list(self._experiments.values()))

    def get(self, experiment_id: str) -> Experiment:
        """Find an experiment.

        Raises:
            NotFound: there is no such experiment.
            SpecRefused: this release cannot use it.
        """
        if (unusable := self._unusable.get(experiment_id)) is not None:
            raise SpecRefused(
                f"the stored spec of {experiment_id} is not valid under this release: {unusable.cause}; create an "
                "experiment with a changed spec, or go back to the release that wrote it",
                experiment_id=experiment_id,
            )
        if experiment_id not in self._experiments:
            raise NotFound(f"there is no experiment {experiment_id}", experiment_id=experiment_id)
        return self._experiments[experiment_id]

    def record_of(self, experiment_id: str) -> ExperimentRecord:
        """Find the record of an experiment, usable or not.

        Raises:
            NotFound: there is no such experiment.
        """
        unusable = self._unusable.get(experiment_id)
        return self.get(experiment_id).record if unusable is None else unusable.record

    def knows(self, experiment_id: str) -> bool:
        """Whether there is such an experiment, usable or not."""
        return experiment_id in self._experiments or experiment_id in self._unusable

    def unusable(self) -> list[UnusableExperiment]:
        """List those whose spec is refused."""
        return list(self._unusable.values())

    def next_number(self, attribute: str) -> int:
        """Return one more than the highest ``number`` or ``start_number`` of all records."""
        return 1 + max((int(getattr(record, attribute)) for record in self._records()), default=0)

    def _records(self) -> list[ExperimentRecord]:
        return [*(each.record for each in self), *(each.record for each in self.unusable())]

    def find(self, experiment_id: str | None) -> Experiment | None:
        """Find an experiment that can be used, or None."""
        return self._experiments.get(experiment_id) if experiment_id is not None else None

    def named(self, reference: str) -> Experiment:
        """Find an experiment by its id or, where no id is meant, the newest of a name; to an owner only their own.

        Raises:
            NotFound: there is none.
            SpecRefused: this release cannot use it.
        """
        whose = owner()
        found = [each for each in self if reference in {each.id, each.record.name}]
        found = [each for each in found if whose in {None, each.record.owner}]
        if not found:
            for each in self.unusable():
                if reference in {each.record.id, each.record.name} and whose in {None, each.record.owner}:
                    return self.get(each.record.id)
            raise NotFound(f"there is no experiment {reference}", experiment_id=reference)
        return max(found, key=lambda each: (each.id == reference, each.record.number))

    async def add(self, record: ExperimentRecord, spec: ExperimentSpec) -> Experiment:
        """Add a new experiment."""
        async with self._store.transaction() as change:
            return self.stage_new(change, record, spec)

    def stage_new(self, change: Transaction, record: ExperimentRecord, spec: ExperimentSpec) -> Experiment:
        """Add a new experiment, of the token that asks for it.

        Raises:
            QuotaExceeded: that has as many as it may.
        """
        record = replace(record, created_by=actor(), owner=owner())
        check_new(record, self._records(), self._quota_of(record.created_by))
        experiment = Experiment(record, spec, self._open_plane)
        change.stage(experiment, record)
        change.write(PutRecord(record))
        change.then(lambda: self._experiments.update({record.id: experiment}))
        return experiment

    async def update(self, experiment: Experiment, **changes: Any) -> None:
        """Replace fields of its record; nothing is written if all of them have these values already."""
        if _differs(experiment.record, changes):
            async with self._store.transaction() as change:
                self.stage(change, experiment, **changes)

    def stage(self, change: Transaction, experiment: Experiment, **changes: Any) -> ExperimentRecord:
        """Replace fields of its record; nothing is written if all of them have these values already.

        Raises:
            NotFound: it was deleted, perhaps while the change waited for its turn.
            QuotaExceeded: it starts, and the token that made it has as many at work as it may.
        """
        known = experiment.record if self._experiments.get(experiment.id) is experiment else None
        record = change.staged(experiment, known)
        if record is None:
            raise NotFound(f"there is no experiment {experiment.id}", experiment_id=experiment.id)
        if not _differs(record, changes):
            return record
        if changes.get("state") is ExperimentState.STARTING:
            check_running(record, self._records(), self._quota_of(record.created_by))
        record = replace(record, updated_at=self._clock.now(), **changes)

        def follow() -> None:
            # The last of a transaction that changes it several times: what is in between never is.
            experiment.record = change.staged(experiment, record)
            if not changes.keys() <= TOLD_ALONE:
                experiment.changed.fire()
                self._on_change(experiment.id)

        change.stage(experiment, record)
        change.write(PutRecord(record))
        change.then(follow)
        return record

    def stage_spec(self, change: Transaction, experiment: Experiment, spec: ExperimentSpec) -> ExperimentRecord:
        """Replace the spec by one that its services need not notice: the revision stays."""

        def follow() -> None:
            experiment.spec = spec

        change.then(follow)
        return self.stage(change, experiment, spec=spec.model_dump(mode="json"), spec_revision=REVISION)

    def stage_step(self, change: Transaction, experiment: Experiment, step: int) -> None:
        """Record how many steps are done, if these are more than were known."""
        known = change.staged(experiment, experiment.record).step
        self.stage(change, experiment, step=max(step, known))

    async def set_problem(self, experiment: Experiment, component: str, cause: str) -> bool:
        """Record what is wrong; True if it was not known."""
        async with self._store.transaction() as change:
            return self.stage_problem(change, experiment, component, cause)

    def stage_problem(self, change: Transaction, experiment: Experiment, component: str, cause: str) -> bool:
        """Record what is wrong; True if it was not known."""
        known = change.staged(experiment, experiment.record).problem
        if known is not None and (known["component"], known["cause"]) == (component, cause):
            return False
        problem = Problem(component=component, cause=cause, at=rfc3339(self._clock.now()))
        self.stage(change, experiment, problem=problem.model_dump())
        return True

    def stage_removal(self, change: Transaction, experiment_id: str) -> None:
        """Forget an experiment, usable or not."""
        change.write(DeleteExperiment(experiment_id))
        change.then(lambda: self._experiments.pop(experiment_id, None))
        change.then(lambda: self._unusable.pop(experiment_id, None))

    def planes_of(self, experiment_id: str) -> tuple[DataPlane, DataPlane]:
        """Open both lanes of an experiment, usable or not."""
        return self._open_plane(experiment_id, Lane.TRAIN), self._open_plane(experiment_id, Lane.EVALUATION)

    async def step_of(self, experiment: Experiment, version: int) -> int:
        """Find the optimiser steps that a version contains."""
        return await step_of(self._store, experiment.record, version)

    async def durable_step(self, experiment: Experiment) -> int:
        """Find the step of its newest complete checkpoint; 0 without one.

        The disk decides, if the trainer writes to one that is seen here: the database may be older than it, or name a
        checkpoint that is gone.
        """
        directory = Path(experiment.record.directory) / CHECKPOINTS
        if await asyncio.to_thread(directory.is_dir):
            with contextlib.suppress(ModelError):  # of a newer release: the database knows it, if anything here does
                newest = await asyncio.to_thread(lambda: next(complete(directory), None))
                return 0 if newest is None else newest.step
        return max((each.step for each in await self._store.checkpoints(experiment.id)), default=0)

    async def has_lost_checkpoints(self, experiment: Experiment) -> bool:
        """Whether it once had a durable checkpoint, and the disk has none."""
        return bool(await self._store.checkpoints(experiment.id)) and await self.durable_step(experiment) == 0

    def stage_audit(self, change: Transaction, experiment_id: str, action: str, **detail: Any) -> None:
        """Record a mutation."""
        record = AuditRecord(self._clock.now(), action, f"experiments/{experiment_id}", detail, actor())
        change.write(AppendAudit(record))


def check_not_subscribed(experiment_id: str, others: Iterable[Experiment]) -> None:
    """Check that no active experiment trains the groups of one that is about to be deleted.

    An owner is told of no other owner's.

    Raises:
        ActionNotAllowed: one does.
    """
    for other in others:
        if other.is_at_work and other.spec.data.subscribes_to == experiment_id:
            is_seen = owner() in {None, other.record.owner}
            named = f"{other.id}, which is {other.state}," if is_seen else "an experiment of another owner"
            raise ActionNotAllowed(f"cannot delete {experiment_id}: {named} trains its groups")


def _differs(record: ExperimentRecord, changes: Mapping[str, Any]) -> bool:
    return any(getattr(record, name) != value for name, value in changes.items())


T = TypeVar("T")


class PerExperiment(Generic[T]):
    """One object for each experiment, made when it is first asked for; it goes when the experiment is deleted.

    Args:
        make: makes the object of an experiment that has none yet.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: WeakKeyDictionary[Experiment, T] = WeakKeyDictionary()

    def of(self, experiment: Experiment) -> T:
        """Find the object of an experiment, or make it."""
        kept = self._kept.get(experiment)
        if kept is None:
            kept = self._kept[experiment] = self._make()
        return kept

    def __len__(self) -> int:
        return len(self._kept)
