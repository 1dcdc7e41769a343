"""What can be done with an experiment whose stored spec is refused now: show it with its problem, and delete it."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.records.repository import (
    Experiment,
    ExperimentRepository,
    UnusableExperiment,
    check_not_subscribed,
)
from flotilla.shared.clock import rfc3339
from flotilla.shared.config.redaction import redacted
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.experiment import ExperimentView, Origin, Problem

log = logging.getLogger(__name__)

COMPONENT = "spec"


def views(commands: ExperimentCommands, repository: ExperimentRepository) -> list[ExperimentView]:
    """Show all experiments, oldest first; those that cannot be used among them."""
    usable = [(each.record.number, each.record.created_at, _shown(each, commands)) for each in repository]
    others = [(each.record.number, each.record.created_at, view(each)) for each in repository.unusable()]
    return [shown for *_, shown in sorted([*usable, *others], key=lambda entry: entry[:2])]


def _shown(experiment: Experiment, commands: ExperimentCommands) -> ExperimentView:
    """Show one of many: a record that makes no view must not hide the others."""
    try:
        return commands.view(experiment)
    except (FlotillaError, ValueError, LookupError, TypeError) as error:
        log.exception("experiment cannot be shown", extra={"experiment_id": experiment.id})
        cause = f"{type(error).__name__}: {error}"
        return view(UnusableExperiment(replace(experiment.record, origin=None), cause), "its record is damaged")


def show(experiment_id: str, commands: ExperimentCommands, repository: ExperimentRepository) -> ExperimentView:
    """Show an experiment, usable or not.

    Raises:
        NotFound: there is no such experiment.
    """
    unusable = _find(repository, experiment_id)
    return commands.view(repository.get(experiment_id)) if unusable is None else view(unusable)


async def delete(experiment_id: str, commands: ExperimentCommands, repository: ExperimentRepository) -> None:
    """Delete an experiment; one that cannot be used in any state, since nothing else ends it.

    Raises:
        NotFound: there is no such experiment.
        ActionNotAllowed: it is at work, or somebody at work trains its groups.
    """
    unusable = _find(repository, experiment_id)
    if unusable is None:
        await commands.act(experiment_id, Action.DELETE)
        return
    check_not_subscribed(experiment_id, repository)
    for plane in repository.planes_of(experiment_id):
        await plane.remove()
    async with repository.transaction() as change:
        commands.stage_removal(change, experiment_id)
        repository.stage_audit(change, experiment_id, Action.DELETE.value, before=unusable.record.state.value)


def view(unusable: UnusableExperiment, what: str = "this release refuses the stored spec") -> ExperimentView:
    """Show one that cannot be used: its record, its spec as it was written, and what is wrong with that."""
    record = unusable.record
    section = record.spec.get("optimisation")
    steps = section.get("steps") if isinstance(section, Mapping) else None
    cause = f"{what} (revision {record.spec_revision} of the schema): {unusable.cause}"
    return ExperimentView(
        id=record.id,
        name=record.name,
        state=record.state,
        revision=record.revision,
        # Whatever it has in places that this release does not know: passwords must not be shown.
        spec=redacted(record.spec),
        created_at=rfc3339(record.created_at),
        updated_at=rfc3339(record.updated_at),
        step=record.step,
        total_steps=steps if isinstance(steps, int) else 0,
        policy_version=record.policy_version,
        services={},
        problem=Problem(component=COMPONENT, cause=cause, at=rfc3339(record.updated_at)),
        directory=record.directory,
        origin=Origin.model_validate(record.origin) if record.origin else None,
        owner=record.owner,
    )


def _find(repository: ExperimentRepository, experiment_id: str) -> UnusableExperiment | None:
    return next((each for each in repository.unusable() if each.record.id == experiment_id), None)
