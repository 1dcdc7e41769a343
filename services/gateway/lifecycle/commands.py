"""What people ask of experiments, and how experiments end badly. Every mutation leaves an audit record and an event."""

import asyncio
import contextlib
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.services.gateway.access.caller import actor, caller, owner
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.lifecycle import origins
from flotilla.services.gateway.lifecycle.live_changes import LiveChanges
from flotilla.services.gateway.lifecycle.spec_text import read_document
from flotilla.services.gateway.lifecycle.states import (
    Action,
    LifecycleEvent,
    after_action,
    after_event,
    allowed_actions,
)
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.records.repository import (
    Experiment,
    ExperimentRepository,
    check_not_subscribed,
    document_of,
    owner_of,
)
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.store.answers import stage_answer
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.uploads.fetching import fetch
from flotilla.services.gateway.uploads.remote import WatchedCalls
from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.load.spec_text import validate_spec, with_steps
from flotilla.shared.config.redaction import redacted
from flotilla.shared.config.sections.data import is_url
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ActionNotAllowed
from flotilla.shared.locations.allowed import Places
from flotilla.shared.net.authorisation.access import Scope
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView, ForkRequest, Origin, Problem
from flotilla.shared.schemas.health import HealthFinding
from flotilla.shared.schemas.service import ServiceKind

DOWNLOADS = ".downloads"
"""Folder beside the experiments' own, of checkpoints that some are about to begin from."""


class ExperimentCommands:
    """Creates, forks, starts, pauses, resumes, extends, stops, deletes and fails experiments.

    Args:
        directory: where each experiment has its own.
        places: where code and data that a spec names may be.
        on_restart: called with a change that lets an experiment which had ended start.
    """

    def __init__(
        self,
        repository: ExperimentRepository,
        registry: Registry,
        publications: Publications,
        events: EventLog,
        clock: Clock,
        directory: Path,
        places: Places,
        *,
        on_restart: Callable[[Transaction, Experiment], None],
    ) -> None:
        self._repository = repository
        self._registry = registry
        self._publications = publications
        self._events = events
        self._clock = clock
        self._directory = directory
        self._downloads = directory / DOWNLOADS
        self._places = places
        self._on_restart = on_restart
        self._leaving: set[str] = set()
        self._beginning: Counter[str] = Counter()
        self.live = LiveChanges(repository, registry, events, clock)

    async def load(self) -> None:
        """Undo what an earlier process began and did not store."""
        await asyncio.to_thread(shutil.rmtree, self._downloads, ignore_errors=True)
        await asyncio.to_thread(origins.remove_unfinished, self._directory, self._repository.knows)

    async def create(self, body: str, *, start: bool = False) -> Experiment:
        """Create a draft from a spec in JSON or YAML, or one that starts at once.

        Raises:
            InvalidSpec, DataError, ModelError: the spec, or what it points to, is wrong.
        """
        return await self._create(validate_spec(await read_document(body)), start=start)

    async def fork(self, experiment_id: str, request: ForkRequest, *, start: bool) -> Experiment:
        """Create an experiment that continues from a checkpoint of another, perhaps with other settings.

        Raises:
            NotFound: there is no such experiment.
            InvalidSpec, DataError, ModelError: the changed spec is wrong, or there is no such checkpoint.
        """
        parent = self._repository.get(experiment_id)
        reference = parent.id if request.step is None else f"{parent.id}@{request.step}"
        steering = parent.steering

        def as_at(version: int) -> ExperimentSpec:
            # What was changed after the checkpoint is no setting of what goes on from there.
            return origins.forked(steering.at(version), reference, request.changes)

        spec = origins.forked(parent.spec, reference, request.changes)
        return await self._create(spec, start=start, as_at=as_at if steering.changes else None)

    async def _create(
        self, spec: ExperimentSpec, *, start: bool, as_at: Callable[[int], ExperimentSpec] | None = None
    ) -> Experiment:
        spec = self._subscribed(await asyncio.to_thread(checks.pinned, spec))
        self.live.check(spec)
        who = caller.get()
        if who is not None and who.owner is not None:
            find = partial(owner_of, self._repository)
            await asyncio.to_thread(origins.check_owned, spec, who.owner, find, self._directory)
        await asyncio.to_thread(checks.check, spec, self.places_of(None if who is None else who.owner))
        stored = None
        if spec.checkpoint.resume_from is not None:
            stored = await self._stored(spec.checkpoint.resume_from)
        try:
            if stored is not None and as_at is not None:
                spec = self._subscribed(await asyncio.to_thread(checks.pinned, as_at(stored.state.version)))
            return await self._create_from(spec, stored, start=start)
        finally:
            if stored is not None and stored.path.is_relative_to(self._downloads):
                await asyncio.to_thread(shutil.rmtree, stored.path.parent, ignore_errors=True)

    def _subscribed(self, spec: ExperimentSpec) -> ExperimentSpec:
        """Name the experiment whose groups are to be trained by its id; an owner can name only their own."""
        if (named := spec.data.subscribes_to) is None:
            return spec
        source = self._repository.named(named)
        return checks.subscribed(spec, source.id, source.spec)

    async def _create_from(self, spec: ExperimentSpec, stored: StoredCheckpoint | None, *, start: bool) -> Experiment:
        if stored is not None:
            spec = origins.as_decided(stored, spec)
            origins.check_spec(stored, spec)
        experiment_id = f"{spec.name}-{secrets.token_hex(3)}"
        directory = self._directory / experiment_id
        now = self._clock.now()
        record = ExperimentRecord(
            id=experiment_id,
            name=spec.name,
            state=ExperimentState.DRAFT,
            revision=1,
            spec=spec.model_dump(mode="json"),
            directory=str(directory),
            policy_version=spec.first_version,
            created_at=now,
            updated_at=now,
        )
        if stored is not None:
            record = await self._begun_from(record, spec, stored)
        elif start:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        async with self._repository.transaction() as change:
            record = replace(record, number=self._repository.next_number("number"))
            experiment = self._repository.stage_new(change, record, spec)
            if stored is not None:
                origins.stage_rows(change, experiment_id, stored, spec)
            self._repository.stage_audit(change, experiment_id, "create", origin=record.origin)
            self._events.stage(change, experiment_id, "experiment_created", name=spec.name, origin=record.origin)
            if start:
                self._stage_action(change, experiment, Action.START)
            stage_answer(change, self.view(experiment, change.staged(experiment, record)))
        if record.origin is not None:
            await asyncio.to_thread(origins.finish, directory)
        return experiment

    async def _stored(self, reference: str) -> StoredCheckpoint:
        """Find the checkpoint that an experiment begins from.

        Raises:
            InvalidSpec, ModelError: there is no such checkpoint.
            DataError: it is in an experiment of another owner.
        """
        where, step = origins.parse_reference(reference)
        if is_url(where):
            self._places.check_checkpoint_url(where, origins.FIELD)
            place = self._downloads / secrets.token_hex(8)
            return await WatchedCalls(where).run(lambda _, moved: fetch(where, step, place, moved))
        if "/" in where:
            places = self.places_of(owner())
            stored = await asyncio.to_thread(origins.find, Path(where), step)
            await asyncio.to_thread(places.check_owner, str(stored.path))
            return stored
        path = Path(self._repository.named(where).record.directory)
        return await asyncio.to_thread(origins.find, path, step, path.parent)

    def places_of(self, owner: str | None) -> Places:
        """Return where the files may be that a spec of an owner leads to."""
        if owner is None:
            return self._places
        find = partial(owner_of, self._repository)
        return replace(self._places, refuse=lambda path: origins.check_opened(path, owner, find, self._directory))

    async def _begun_from(
        self, record: ExperimentRecord, spec: ExperimentSpec, stored: StoredCheckpoint
    ) -> ExperimentRecord:
        """Put the checkpoint that an experiment begins from into its directory.

        Raises:
            Unavailable: it could not be written.
        """
        maker, whose = stored.state.experiment_id, owner()
        if whose is not None and self._repository.knows(maker) and owner_of(self._repository, maker) != whose:
            # The file may contain any name.
            stored = replace(stored, state=stored.state.model_copy(update={"experiment_id": origins.UNKNOWN}))
        made_by = self._repository.find(stored.state.experiment_id)
        earlier = None if made_by is None else made_by.record.origin
        parent = None if earlier is None else Origin.model_validate(earlier)
        origin = await asyncio.to_thread(origins.take, stored, spec, record.id, Path(record.directory), parent)
        if is_url(begun := spec.checkpoint.resume_from or ""):
            origin = origin.model_copy(update={"path": begun})
        state = stored.state
        published_step = origin.step if state.published_step is None else state.published_step
        return replace(
            record,
            origin=origin.model_dump(mode="json"),
            step=origin.step,
            policy_version=origin.version,
            published_step=published_step,
        )

    async def act(self, experiment_id: str, action: Action) -> Experiment:
        """Do what a person asks.

        Raises:
            ActionNotAllowed: the state does not allow it.
            DataError, ModelError: on start, what the spec points to is not there.
        """
        experiment = self._repository.get(experiment_id)
        after_action(experiment.state, action)
        if action is Action.DELETE:
            await self._delete(experiment)
            return experiment
        with self._begins(experiment, action):
            if action is Action.START or experiment.state.is_final:
                await self._check_start(experiment, action)
            async with self._repository.transaction() as change:
                # Asked again: it may have been deleted while files were read.
                experiment = self._repository.get(experiment_id)
                self._stage_action(change, experiment, action)
                stage_answer(change, self.view(experiment, change.staged(experiment, experiment.record)))
        return experiment

    async def extend(self, experiment_id: str, steps: int) -> Experiment:
        """Let an experiment train more steps; one that has ended continues from its newest checkpoint.

        Raises:
            InvalidSpec: it has as many steps already.
            ActionNotAllowed: it is coming to rest, or its checkpoints are gone.
            DataError, ModelError: what the spec points to is not there any more.
        """
        experiment = self._repository.get(experiment_id)
        with_steps(experiment.spec, steps)
        with self._begins(experiment, Action.EXTEND):
            if experiment.state.is_final:
                await self._check_start(experiment, Action.EXTEND)
            async with self._repository.transaction() as change:
                experiment = self._repository.get(experiment_id)
                if experiment.state.is_final or experiment.state is ExperimentState.STOPPING:
                    self._stage_action(change, experiment, Action.EXTEND)
                self._stage_steps(change, experiment, with_steps(experiment.spec, steps))
                stage_answer(change, self.view(experiment, change.staged(experiment, experiment.record)))
        return experiment

    def _stage_steps(self, change: Transaction, experiment: Experiment, spec: ExperimentSpec) -> None:
        """Replace the spec by one with more steps; a trainer at work is appointed again to learn of it."""
        record, before = experiment.record, experiment.spec.optimisation.steps
        self._repository.stage_spec(change, experiment, spec)
        epoch = record.trainer_epoch + 1 if experiment.is_active and record.trainer_epoch else record.trainer_epoch
        self._repository.stage(change, experiment, is_trained=False, trainer_epoch=epoch)
        facts = {"before": before, "steps": spec.optimisation.steps, "step": record.step}
        self._repository.stage_audit(change, experiment.id, "extend", **facts)
        self._events.stage(change, experiment.id, "experiment_extended", **facts)

    @contextlib.contextmanager
    def _begins(self, experiment: Experiment, action: Action) -> Iterator[None]:
        """Keep what an experiment continues from while that is examined, until its start is stored.

        Raises:
            ActionNotAllowed: an experiment that has ended, or what it left, is being deleted.
        """
        if experiment.state.is_final and experiment.id in self._leaving:
            raise ActionNotAllowed(f"cannot {action} {experiment.id}: it, or what it left, is being deleted")
        self._beginning[experiment.id] += 1
        try:
            yield
        finally:
            self._beginning[experiment.id] -= 1
            if not self._beginning[experiment.id]:
                del self._beginning[experiment.id]

    async def _check_start(self, experiment: Experiment, action: Action) -> None:
        """Check what a start needs, and make the experiment's directory.

        Raises:
            ActionNotAllowed: it had a checkpoint, and has none any more.
            DataError, ModelError: what the spec points to is not there.
        """
        await asyncio.to_thread(checks.check, experiment.spec, self.places_of(experiment.record.owner))
        # Not compared again: groups carry what the source's live changes made of them.
        if (source := experiment.spec.data.subscribes_to) is not None:
            self._repository.named(source)
        await asyncio.to_thread(Path(experiment.record.directory).mkdir, parents=True, exist_ok=True)
        if await self._repository.has_lost_checkpoints(experiment):
            raise ActionNotAllowed(
                f"cannot {action} {experiment.id}: its checkpoints are gone from {experiment.record.directory}; bring "
                "them back, or start another experiment"
            )

    def _stage_action(self, change: Transaction, experiment: Experiment, action: Action) -> None:
        # Asked again: the state may have moved while files were read.
        before = change.staged(experiment, experiment.record).state
        state = after_action(before, action)
        assert state is not None
        changes: dict[str, Any] = {}
        if state is ExperimentState.STARTING and experiment.id in self._leaving:
            raise ActionNotAllowed(f"cannot {action} {experiment.id}: it, or what it left, is being deleted")
        if action is Action.START:
            changes["started_at"] = self._clock.now()
            changes["start_number"] = self._repository.next_number("start_number")
        if before.is_final:
            if experiment.record.final_ledger is None:
                raise ActionNotAllowed(f"cannot {action} {experiment.id} yet: its services are still coming to rest")
            # What the end left is undone; the trainer continues from its newest checkpoint.
            changes |= {"outcome": None, "problem": None, "final_ledger": None, "is_trained": False}
            self._on_restart(change, experiment)
        if action is Action.STOP:
            changes["outcome"] = ExperimentState.STOPPED.value
        self._stage_state(change, experiment, state, **changes)
        self._repository.stage_audit(change, experiment.id, action.value, before=before.value, after=state.value)
        if action is Action.STOP:
            self._publications.stage_close(change, experiment.id, "the experiment stops")

    def stage_pause(self, change: Transaction, experiment: Experiment) -> None:
        """Pause an experiment that runs; one in another state stays as it is."""
        if change.staged(experiment, experiment.record).state is ExperimentState.RUNNING:
            self._stage_action(change, experiment, Action.PAUSE)

    def stage_stop(self, change: Transaction, experiment: Experiment) -> None:
        """Stop an experiment that is at work; one in another state stays as it is."""
        if Action.STOP in allowed_actions(change.staged(experiment, experiment.record).state):
            self._stage_action(change, experiment, Action.STOP)

    async def change(self, experiment_id: str, body: str) -> Experiment:
        """Change quotas, the steps or keys that can change while an experiment runs: ``shared/config/load/live.py``.

        Raises:
            InvalidSpec: the change names something else, or does not validate.
            ActionNotAllowed: the experiment has ended.
        """
        self._repository.get(experiment_id)
        document = await read_document(body)
        async with self._repository.transaction() as change:
            experiment = self._repository.get(experiment_id)
            if not (experiment.is_active or experiment.state is ExperimentState.DRAFT):
                raise ActionNotAllowed(
                    f"cannot change an experiment that is {experiment.state}; allowed now: "
                    f"{', '.join(allowed_actions(experiment.state)) or 'none'}",
                    state=experiment.state.value,
                )
            spec = self.live.changed(experiment, document)
            if spec.optimisation.steps != experiment.spec.optimisation.steps:
                self._stage_steps(change, experiment, spec)
            else:
                self._repository.stage_spec(change, experiment, spec)
            self.live.stage(change, experiment, spec, actor())
            if spec.resources != experiment.spec.resources:
                resources = spec.resources.model_dump(mode="json")
                self._repository.stage_audit(change, experiment_id, "change", resources=resources)
                self._events.stage(change, experiment_id, "resources_changed", resources=resources)
        return experiment

    async def _delete(self, experiment: Experiment) -> None:
        """Delete the data plane's part first: a deletion that is interrupted continues when it is requested again."""
        check_not_subscribed(experiment.id, self._repository)
        with self.at_rest(experiment, all_goes=True):
            await experiment.train.remove()
            await experiment.evaluation.remove()
            async with self._repository.transaction() as change:
                after_action(experiment.state, Action.DELETE)
                self.stage_removal(change, experiment.id)
                before = experiment.state.value
                self._repository.stage_audit(change, experiment.id, Action.DELETE.value, before=before)
                change.then(lambda: self._events.wake(experiment.id))

    @contextlib.contextmanager
    def at_rest(self, experiment: Experiment, *, all_goes: bool = False) -> Iterator[None]:
        """Keep an experiment that is not at work from starting while it, or what it left, is deleted.

        Args:
            all_goes: with its record, which a start that looks at files now misses then.

        Raises:
            ActionNotAllowed: it is at work, begins, comes to rest, or is being deleted already.
        """
        after_action(experiment.state, Action.DELETE)
        if experiment.state.is_final and experiment.record.final_ledger is None:
            raise ActionNotAllowed(f"cannot delete {experiment.id} yet: its services are still coming to rest")
        if experiment.id in self._leaving:
            raise ActionNotAllowed(f"cannot delete {experiment.id}: it, or what it left, is being deleted already")
        if experiment.id in self._beginning and not all_goes:
            raise ActionNotAllowed(f"cannot delete {experiment.id}: it, or what it left, is about to be used again")
        self._leaving.add(experiment.id)
        try:
            yield
        finally:
            self._leaving.discard(experiment.id)

    def stage_removal(self, change: Transaction, experiment_id: str) -> None:
        """Forget an experiment, usable or not, with what waits to be sent of it."""
        self._repository.stage_removal(change, experiment_id)
        self._events.webhooks.stage_removal(change, experiment_id)

    async def conclude(self, experiment: Experiment, event: LifecycleEvent, **changes: Any) -> None:
        """Record a conclusion of the gateway."""
        async with self._repository.transaction() as change:
            self.stage_conclusion(change, experiment, event, **changes)

    def stage_conclusion(
        self, change: Transaction, experiment: Experiment, event: LifecycleEvent, **changes: Any
    ) -> None:
        """Record a conclusion of the gateway; one that means nothing in the experiment's state changes nothing."""
        record = change.staged(experiment, experiment.record)
        if event is LifecycleEvent.TRAINED and experiment.spec.trains and not record.is_trained:
            # It was given more steps while this waited for its turn.
            return
        state = after_event(record.state, event, outcome=ExperimentState(record.outcome or ExperimentState.STOPPED))
        if state is not record.state:
            self._stage_state(change, experiment, state, **changes)

    async def fail(self, experiment: Experiment, component: str, cause: str) -> None:
        """End an experiment that cannot continue, with the component and the cause."""
        async with self._repository.transaction() as change:
            self.stage_failure(change, experiment, component, cause)

    def stage_failure(self, change: Transaction, experiment: Experiment, component: str, cause: str) -> None:
        """End an experiment that cannot continue, with the component and the cause."""
        state = change.staged(experiment, experiment.record).state
        if after_event(state, LifecycleEvent.BROKEN) is state:
            return
        problem = Problem(component=component, cause=cause, at=rfc3339(self._clock.now())).model_dump()
        outcome = ExperimentState.FAILED.value
        self.stage_conclusion(change, experiment, LifecycleEvent.BROKEN, problem=problem, outcome=outcome)
        self._repository.stage_audit(change, experiment.id, "fail", component=component, cause=cause)
        self._publications.stage_close(change, experiment.id, f"the experiment failed: {component}")

    def _stage_state(self, change: Transaction, experiment: Experiment, state: ExperimentState, **changes: Any) -> None:
        before = change.staged(experiment, experiment.record).state
        problem = changes.get("problem") if state is ExperimentState.FAILED else None
        facts = {"before": before.value, "state": state.value}
        self._repository.stage(change, experiment, state=state, **changes)
        self._events.stage(change, experiment.id, "experiment_state", **facts, problem=problem)

    def view(self, experiment: Experiment, record: ExperimentRecord | None = None) -> ExperimentView:
        """Show an experiment, as it is or as ``record`` will have it; passwords in its spec to operators only."""
        record = record or experiment.record
        document = document_of(record)
        who = caller.get()
        may_see_all = who is None or who.scope is Scope.OPERATOR
        services = {kind.value: tuple(s.id for s in self._registry.of(record.id, kind)) for kind in ServiceKind}
        return ExperimentView(
            id=record.id,
            name=record.name,
            state=record.state,
            revision=record.revision,
            spec=document if may_see_all else redacted(document),
            created_at=rfc3339(record.created_at),
            updated_at=rfc3339(record.updated_at),
            step=record.step,
            total_steps=document["optimisation"]["steps"] if experiment.spec.trains else 0,
            policy_version=record.policy_version,
            services={kind: ids for kind, ids in services.items() if ids},
            problem=Problem.model_validate(record.problem) if record.problem else None,
            health=tuple(HealthFinding.model_validate(each) for each in record.health or ()),
            directory=record.directory,
            origin=Origin.model_validate(record.origin) if record.origin else None,
            owner=record.owner,
            changes=(experiment.steering if record is experiment.record else experiment.steering_of(record)).changes,
            groups_from=experiment.spec.data.subscribes_to,
        )
