"""What people ask of experiments, and how experiments end badly. Every mutation leaves an audit record and an event."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

from services.gateway.events.log import EventLog
from services.gateway.lifecycle.states import Action, LifecycleEvent, after_action, after_event
from services.gateway.preflight import checks
from services.gateway.publications.publications import Publications
from services.gateway.records.repository import Experiment, ExperimentRepository
from services.gateway.registry.services import Registry
from services.gateway.store.records import ExperimentRecord
from shared.clock import Clock, rfc3339
from shared.config.load import changed_live, parse_document, validate_spec
from shared.errors import ActionNotAllowed
from shared.schemas.experiment import ExperimentState, ExperimentView, Problem
from shared.schemas.service import ServiceKind


class ExperimentCommands:
    """Creates, starts, pauses, resumes, stops, deletes and fails experiments."""

    def __init__(
        self,
        repository: ExperimentRepository,
        registry: Registry,
        publications: Publications,
        events: EventLog,
        clock: Clock,
        directory: Path,
    ) -> None:
        self._repository = repository
        self._registry = registry
        self._publications = publications
        self._events = events
        self._clock = clock
        self._directory = directory

    async def create(self, body: str) -> Experiment:
        """Create a draft from a spec in JSON or YAML.

        Raises:
            InvalidSpec, DataError, ModelError: the spec, or what it points to, is wrong.
        """
        spec = validate_spec(parse_document(body, source="the request body"))
        await asyncio.to_thread(checks.check, spec)
        experiment_id = f"{spec.name}-{secrets.token_hex(3)}"
        now = self._clock.now()
        record = ExperimentRecord(
            id=experiment_id,
            name=spec.name,
            state=ExperimentState.DRAFT,
            revision=1,
            spec=spec.model_dump(mode="json"),
            directory=str(self._directory / experiment_id),
            created_at=now,
            updated_at=now,
        )
        experiment = await self._repository.add(record, spec)
        await self._repository.audit(experiment_id, "create")
        await self._events.append(experiment_id, "experiment_created", name=spec.name)
        return experiment

    async def act(self, experiment_id: str, action: Action) -> Experiment:
        """Do what a person asks.

        Raises:
            ActionNotAllowed: the state does not allow it.
            DataError, ModelError: on start, what the spec points to is not there.
        """
        experiment = self._repository.get(experiment_id)
        after_action(experiment.state, action)
        if action is Action.DELETE and experiment.state.is_final and experiment.record.final_ledger is None:
            raise ActionNotAllowed(f"cannot delete {experiment_id} yet: its services are still coming to rest")
        changes: dict[str, Any] = {}
        if action is Action.START:
            await asyncio.to_thread(checks.check, experiment.spec)
            await asyncio.to_thread(Path(experiment.record.directory).mkdir, parents=True, exist_ok=True)
            changes["started_at"] = self._clock.now()
        if action is Action.STOP:
            changes["outcome"] = ExperimentState.STOPPED.value
        # Asked again: the state may have moved while the files were read.
        state = after_action(experiment.state, action)
        if state is None:
            await self._delete(experiment)
            return experiment
        before = experiment.state
        await self._move(experiment, state, **changes)
        await self._repository.audit(experiment_id, action.value, before=before.value, after=state.value)
        if action is Action.STOP:
            await self._publications.close(experiment_id, "the experiment stops")
        return experiment

    async def change(self, experiment_id: str, body: str) -> Experiment:
        """Change quotas of an experiment; the scheduler and the feeder follow at once, its services do not notice.

        Raises:
            InvalidSpec: the change names another section, or does not validate.
            ActionNotAllowed: the experiment has ended.
        """
        experiment = self._repository.get(experiment_id)
        if not (experiment.is_active or experiment.state is ExperimentState.DRAFT):
            raise ActionNotAllowed(
                f"cannot change an experiment that is {experiment.state}", state=experiment.state.value
            )
        spec = changed_live(experiment.spec, parse_document(body, source="the request body"))
        await self._repository.put_spec(experiment, spec)
        resources = spec.resources.model_dump(mode="json")
        await self._repository.audit(experiment_id, "change", resources=resources)
        await self._events.append(experiment_id, "resources_changed", resources=resources)
        return experiment

    async def _delete(self, experiment: Experiment) -> None:
        await experiment.train.remove()
        await experiment.evaluation.remove()
        await self._repository.remove(experiment)
        await self._repository.audit(experiment.id, Action.DELETE.value, before=experiment.state.value)
        self._events.wake(experiment.id)

    async def conclude(self, experiment: Experiment, event: LifecycleEvent, **changes: Any) -> None:
        """Apply a conclusion of the gateway."""
        before = experiment.state
        outcome = ExperimentState(experiment.record.outcome or ExperimentState.STOPPED)
        state = after_event(before, event, outcome=outcome)
        if state is not before:
            await self._move(experiment, state, **changes)

    async def fail(self, experiment: Experiment, component: str, cause: str) -> None:
        """End an experiment that cannot go on, with the component and the cause."""
        if after_event(experiment.state, LifecycleEvent.BROKEN) is experiment.state:
            return
        problem = Problem(component=component, cause=cause, at=rfc3339(self._clock.now())).model_dump()
        await self.conclude(experiment, LifecycleEvent.BROKEN, problem=problem, outcome=ExperimentState.FAILED.value)
        await self._repository.audit(experiment.id, "fail", component=component, cause=cause)
        await self._publications.close(experiment.id, f"the experiment failed: {component}")

    async def _move(self, experiment: Experiment, state: ExperimentState, **changes: Any) -> None:
        # The record moves at once, so that nobody acts on the old state; the event is on its way to the store before
        # anything that the new state sets in motion.
        facts = {"before": experiment.state.value, "state": state.value}
        problem = changes.get("problem") if state is ExperimentState.FAILED else None
        appended = asyncio.create_task(
            self._events.append(experiment.id, "experiment_state", **facts, problem=problem),
            name="append a state's event",
        )
        try:
            await self._repository.update(experiment, state=state, **changes)
        finally:
            await appended
        self._events.wake(experiment.id)

    async def note(self, experiment: Experiment, kind: str, **facts: Any) -> None:
        """Record an event of an experiment."""
        await self._events.append(experiment.id, kind, **facts)

    def view(self, experiment: Experiment) -> ExperimentView:
        """Show an experiment."""
        record = experiment.record
        services = {kind.value: tuple(s.id for s in self._registry.of(record.id, kind)) for kind in ServiceKind}
        return ExperimentView(
            id=record.id,
            name=record.name,
            state=record.state,
            revision=record.revision,
            spec=record.spec,
            created_at=rfc3339(record.created_at),
            updated_at=rfc3339(record.updated_at),
            step=record.step,
            total_steps=experiment.spec.optimisation.steps,
            policy_version=record.policy_version,
            services={kind: ids for kind, ids in services.items() if ids},
            problem=Problem.model_validate(record.problem) if record.problem else None,
            directory=record.directory,
        )
