"""Experiments: create from a spec, act on them, read them."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from flotilla.services.gateway.lifecycle import unusable
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.routes.dependencies import OF_TRAINER, Caller, Cursor, Gateway, Jobs, Limit, page_of
from flotilla.services.gateway.store.writes import CURRICULUM
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentView, ExtendRequest, ForkRequest, Page
from flotilla.shared.schemas.live_changes import AdoptAnswer, AdoptRequest, CurriculumState, LiveChange

router = APIRouter(prefix="/experiments", tags=["experiments"])

SPEC_SCHEMA: Final[dict[str, Any]] = {}
"""Of the spec; filled where the document that it is part of is made, since that takes a seventh of the start."""
SPEC_BODY = {
    "requestBody": {
        "required": True,
        "description": "The experiment spec, in JSON or YAML.",
        "content": {
            "application/json": {"schema": SPEC_SCHEMA},
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}


@cache
def section_schemas() -> Mapping[str, Any]:
    """Fill ``SPEC_SCHEMA``, and return what it refers to, for the components of the document."""
    schema = ExperimentSpec.model_json_schema(ref_template="#/components/schemas/{model}")
    sections: Mapping[str, Any] = schema.pop("$defs")
    SPEC_SCHEMA.update(schema)
    return sections


@router.post("", status_code=201, openapi_extra=SPEC_BODY)
async def create(
    request: Request, gateway: Gateway, start: Annotated[bool, Query(description="start it at once")] = False
) -> ExperimentView:
    """Create an experiment from a spec in JSON or YAML.

    Raises:
        InvalidSpec: one entry per offending field.
        DataError, ModelError: what the spec points to is not there.
        QuotaExceeded: the token that made it has as much as it may.
    """
    return gateway.commands.view(await gateway.commands.create(await _text_of(request), start=start))


@router.get("")
async def index(
    gateway: Gateway,
    caller: Caller,
    jobs: Jobs,
    after: Cursor = None,
    limit: Limit = 100,
    spec: Annotated[bool, Query(description="with their specs, which are most of the answer")] = True,
) -> Page[ExperimentView]:
    """List the experiments, oldest first; behind them those that clients of the Tinker API drive.

    To a token with an owner only those of the owner.
    """
    shown = unusable.views(gateway.commands, gateway.repository)
    if caller.owner is None:
        shown += await jobs.views()
    else:
        shown = [view for view in shown if view.owner == caller.owner]
    if not spec:
        shown = [view.model_copy(update={"spec": {}}) for view in shown]
    return page_of([(view.id, view) for view in shown], after, limit)


@router.get("/{experiment_id}")
async def show(experiment_id: str, gateway: Gateway, jobs: Jobs) -> ExperimentView:
    """Show an experiment; one whose stored spec this release refuses, too, with the refusal as its problem.

    Raises:
        NotFound: there is no such experiment.
    """
    if jobs.is_one(experiment_id):
        return await jobs.show(experiment_id)
    return unusable.show(experiment_id, gateway.commands, gateway.repository)


CHANGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "The keys to change, in JSON or YAML: `{resources: {rollouts: {max: 4}}}`, "
        "`{optimisation: {steps: 200, learning_rate: 5e-7}}`; docs/steering.md lists those that can change.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}


@router.patch("/{experiment_id}", openapi_extra=CHANGE_BODY)
async def change(experiment_id: str, request: Request, gateway: Gateway) -> ExperimentView:
    """Change what an experiment may take of the fleet, raise its steps, or change a key that can change while it runs.

    Each change is recorded with the version from which it holds: see ``GET /v1/experiments/{id}/changes``.

    Raises:
        InvalidSpec: a key is unknown or its value is not allowed, or it cannot be changed.
        ActionNotAllowed: the experiment has ended.
    """
    return gateway.commands.view(await gateway.commands.change(experiment_id, await _text_of(request)))


@router.get("/{experiment_id}/changes")
async def changes(experiment_id: str, gateway: Gateway) -> Page[LiveChange]:
    """List what was changed of the spec while the experiment ran, oldest first; 256 at most.

    Raises:
        NotFound: there is no such experiment.
    """
    return Page(items=gateway.repository.get(experiment_id).steering.changes)


@router.post("/{experiment_id}/changes/adopted", dependencies=[OF_TRAINER])
async def adopted(experiment_id: str, request: AdoptRequest, gateway: Gateway) -> AdoptAnswer:
    """Let what waits for the trainer hold from a version that it has not begun to train; asked again, nothing changes.

    Raises:
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch.
    """
    held = await gateway.commands.live.adopt(experiment_id, request.version, request.step)
    known = await gateway.store.window(experiment_id, CURRICULUM)
    return AdoptAnswer(changes=held, curriculum=CurriculumState.model_validate(known) if known else None)


@router.delete("/{experiment_id}", status_code=204)
async def delete(
    experiment_id: str,
    gateway: Gateway,
    files: Annotated[bool, Query(description="with its directory: checkpoints, samples, logs")] = False,
) -> None:
    """Delete a draft or a finished experiment with all its series; its directory stays, unless `files` is true.

    Raises:
        NotFound: there is no such experiment.
        ActionNotAllowed: it is at work.
        Conflict: with `files`, another experiment needs them, or they are not in the gateway's directory.
    """
    if files:
        gateway.repository.record_of(experiment_id)
        await gateway.cleaning.retainer.delete(experiment_id)
        return
    await unusable.delete(experiment_id, gateway.commands, gateway.repository)


async def _text_of(request: Request) -> str:
    try:
        return (await request.body()).decode()
    except UnicodeDecodeError:
        raise InvalidSpec("the request body is not UTF-8 text") from None


async def _act(experiment_id: str, action: Action, gateway: Gateway) -> ExperimentView:
    return gateway.commands.view(await gateway.commands.act(experiment_id, action))


@router.post("/{experiment_id}/start")
async def start(experiment_id: str, gateway: Gateway) -> ExperimentView:
    """Start a draft as soon as the services that it needs are there.

    Raises:
        ActionNotAllowed: it is no draft.
        DataError, ModelError: what the spec points to is not there any more.
        QuotaExceeded: the token that made it has as much as it may.
    """
    return await _act(experiment_id, Action.START, gateway)


@router.post("/{experiment_id}/pause")
async def pause(experiment_id: str, gateway: Gateway) -> ExperimentView:
    """Let services finish the work they have in progress and wait; nothing is issued.

    Raises:
        ActionNotAllowed: it does not run.
    """
    return await _act(experiment_id, Action.PAUSE, gateway)


@router.post("/{experiment_id}/resume")
async def resume(experiment_id: str, gateway: Gateway) -> ExperimentView:
    """Continue after a pause; or from the newest checkpoint after a stop, or a failure whose cause is removed.

    Raises:
        ActionNotAllowed: it is not paused, stopped or failed, its services have not come to rest yet, or its
            checkpoints are gone.
        DataError, ModelError: what the spec points to is not there any more.
        QuotaExceeded: the token that made it has as much as it may.
    """
    return await _act(experiment_id, Action.RESUME, gateway)


@router.post("/{experiment_id}/stop")
async def stop(experiment_id: str, gateway: Gateway) -> ExperimentView:
    """End it: services fall idle, and what is outstanding is dropped as experiment_ended.

    Raises:
        ActionNotAllowed: it is not at work.
    """
    return await _act(experiment_id, Action.STOP, gateway)


@router.post("/{experiment_id}/extend")
async def extend(experiment_id: str, request: ExtendRequest, gateway: Gateway) -> ExperimentView:
    """Raise its steps; one that has ended continues from its newest checkpoint.

    Raises:
        InvalidSpec: it has as many steps already.
        ActionNotAllowed: it is coming to rest, or its checkpoints are gone.
        DataError, ModelError: what the spec points to is not there any more.
        QuotaExceeded: the token that made it has as much as it may.
    """
    return gateway.commands.view(await gateway.commands.extend(experiment_id, request.steps))


@router.post("/{experiment_id}/fork", status_code=201)
async def fork(
    experiment_id: str,
    request: ForkRequest,
    gateway: Gateway,
    start: Annotated[bool, Query(description="start it at once")] = True,
) -> ExperimentView:
    """Create an experiment that continues from a checkpoint of this one, perhaps with other settings.

    Raises:
        NotFound: there is no such experiment.
        InvalidSpec: a change is not allowed, or leaves no step to train.
        DataError, ModelError: the checkpoint is not there, damaged, or does not go with the spec.
        QuotaExceeded: the token that made it has as much as it may.
    """
    return gateway.commands.view(await gateway.commands.fork(experiment_id, request, start=start))
