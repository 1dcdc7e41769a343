"""What an experiment leaves behind while it goes: ledger, metrics, events, checkpoints, the lineage of a step."""

import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from services.gateway.routes.dependencies import LARGEST_PAGE, Cursor, Gateway, Limit, number_of, page_of
from shared.clock import rfc3339
from shared.errors import InvalidRequest, NotFound
from shared.schemas.experiment import (
    CheckpointView,
    DiagnosisView,
    Event,
    ExperimentState,
    MetricBatch,
    MetricPoint,
    Page,
    Problem,
)
from shared.schemas.publication import Wire
from shared.streams.plans import Plan

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])

READER = "gateway"


class StepView(Wire):
    """What a step trains or trained."""

    step: int
    version: int
    is_committed: bool
    """Whether a durable checkpoint contains the step."""
    group_ids: tuple[int, ...]
    oldest_version: int
    newest_version: int
    token_count: int


class Stored(Wire):
    """How many values were stored."""

    stored: int


@router.get("/ledger")
async def ledger(experiment_id: str, gateway: Gateway) -> dict[str, Any]:
    """Give both lanes' ledgers, each taken in one instant; the last ones once the experiment has ended.

    Raises:
        NotFound: nothing bears this id (404).
    """
    experiment = gateway.repository.get(experiment_id)
    if experiment.record.final_ledger is not None:
        return dict(experiment.record.final_ledger)
    train, evaluation = await experiment.train.ledger(), await experiment.evaluation.ledger()
    return {"train": train.model_dump(mode="json"), "evaluation": evaluation.model_dump(mode="json")}


@router.post("/metrics", status_code=201)
async def put_metrics(experiment_id: str, batch: MetricBatch, gateway: Gateway) -> Stored:
    """Store what a service measured in one step; a step that is trained again replaces its values.

    Raises:
        NotFound: nothing bears this id (404).
        InvalidRequest: a value is not finite (422).
    """
    experiment = gateway.repository.get(experiment_id)
    wrong = [name for name, value in batch.values.items() if not math.isfinite(value)]
    if wrong:
        errors = [
            {"path": f"values.{name}", "value": str(batch.values[name]), "allowed": "a finite number"} for name in wrong
        ]
        raise InvalidRequest(f"not finite: {', '.join(wrong)}", errors=errors)
    at = rfc3339(gateway.clock.now())
    points = [
        MetricPoint(name=name, step=batch.step, version=batch.version, value=value, at=at)
        for name, value in batch.values.items()
    ]
    await gateway.store.put_metrics(experiment_id, points)
    gateway.measurements.of(experiment).add_step(gateway.clock.monotonic(), batch.step, batch.values)
    return Stored(stored=len(points))


@router.get("/metrics")
async def metrics(
    experiment_id: str,
    gateway: Gateway,
    names: Annotated[str | None, Query(description="names, separated by commas; all if left out")] = None,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=10 * LARGEST_PAGE)] = LARGEST_PAGE,
) -> Page:
    """List metric values in the order of writing. An empty page has no ``next``: ask later with the same cursor.

    Raises:
        NotFound: nothing bears this id (404).
    """
    gateway.repository.get(experiment_id)
    wanted = [name for name in (names or "").split(",") if name]
    rows = await gateway.store.metrics(experiment_id, names=wanted, after=number_of(after), limit=limit)
    return Page(items=tuple(point.model_dump() for _, point in rows), next=str(rows[-1][0]) if rows else None)


@router.get("/events", response_class=StreamingResponse)
async def events(
    experiment_id: str,
    gateway: Gateway,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Cursor = None,
) -> StreamingResponse:
    """Stream the events as server-sent events, from the first or from ``Last-Event-ID`` on.

    A comment is sent when nothing happens for a while. The stream ends when the experiment is over and all was sent.

    Raises:
        NotFound: nothing bears this id (404).
    """
    experiment = gateway.repository.get(experiment_id)
    start = number_of(last_event_id if last_event_id is not None else after)

    def is_over() -> bool:
        is_gone = gateway.repository.find(experiment_id) is None
        return is_gone or (experiment.state.is_final and experiment.record.final_ledger is not None)

    async def stream() -> AsyncIterator[str]:
        follow = gateway.events.follow(
            experiment_id, start, is_over=is_over, heartbeat_seconds=gateway.settings.heartbeat_seconds
        )
        async for event in follow:
            yield frame_of(event)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def frame_of(event: Event | None) -> str:
    """Write one event as a server-sent event; None as a comment."""
    if event is None:
        return ": nothing new\n\n"
    return f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"


@router.post("/checkpoints", status_code=201)
async def put_checkpoint(experiment_id: str, checkpoint: CheckpointView, gateway: Gateway) -> CheckpointView:
    """Record a durable checkpoint.

    Raises:
        NotFound: nothing bears this id (404).
    """
    experiment = gateway.repository.get(experiment_id)
    await gateway.store.put_checkpoint(experiment_id, checkpoint)
    if checkpoint.step > experiment.record.step:
        # A trainer that is stopped at once may not say itself how far it came.
        await gateway.repository.update(experiment, step=checkpoint.step)
    await gateway.events.append(
        experiment_id, "checkpoint", step=checkpoint.step, version=checkpoint.version, path=checkpoint.path
    )
    return checkpoint


@router.get("/diagnosis")
async def diagnosis(experiment_id: str, gateway: Gateway) -> DiagnosisView:
    """Name what bounds the experiment's speed now, with its evidence and what would change it.

    Raises:
        NotFound: nothing bears this id (404).
    """
    experiment = gateway.repository.get(experiment_id)
    now = gateway.clock.monotonic()
    measured = gateway.measurements.of(experiment)
    found = measured.bottleneck(now, experiment.spec)
    problem = experiment.record.problem
    is_over = experiment.state is not ExperimentState.RUNNING
    return DiagnosisView(
        component="none" if is_over else found.component,
        cause=f"the experiment is {experiment.state.value}" if is_over else found.cause,
        advice="" if is_over else found.advice,
        window_seconds=round(measured.window.seconds(now), 3),
        evidence=found.evidence,
        problem=Problem(**problem) if problem is not None else None,
    )


@router.get("/checkpoints")
async def checkpoints(experiment_id: str, gateway: Gateway, after: Cursor = None, limit: Limit = 100) -> Page:
    """List the checkpoints by step.

    Raises:
        NotFound: nothing bears this id (404).
    """
    gateway.repository.get(experiment_id)
    found = await gateway.store.checkpoints(experiment_id)
    return page_of([(str(each.step), each) for each in found], after, limit)


@router.get("/audit")
async def audit(experiment_id: str, gateway: Gateway, limit: Limit = 100) -> Page:
    """List the newest mutations of an experiment, newest first; also of one that was deleted."""
    records = await gateway.store.audit(f"experiments/{experiment_id}", limit=limit)
    items = tuple(
        {"at": rfc3339(r.at), "action": r.action, "actor": r.actor, "detail": dict(r.detail)} for r in records
    )
    return Page(items=items)


@router.get("/steps/{step}")
async def show_step(experiment_id: str, step: int, gateway: Gateway) -> StepView:
    """Show which groups a step trains (its plan) or trained (its lineage).

    Raises:
        NotFound: the step has no plan (404).
    """
    if step < 0:
        raise InvalidRequest(f"step must be at least 0, got {step}")
    queue = gateway.repository.get(experiment_id).train.trainer(READER)
    lineage = await queue.lineage(step)
    plan = lineage or await queue.load_plan(step)
    if plan is None:
        raise NotFound(f"step {step} of {experiment_id} has no plan yet", step=step)
    return _step_view(plan, is_committed=lineage is not None)


def _step_view(plan: Plan, *, is_committed: bool) -> StepView:
    return StepView(
        step=plan.step,
        version=plan.version,
        is_committed=is_committed,
        group_ids=plan.group_ids,
        oldest_version=plan.oldest_version,
        newest_version=plan.newest_version,
        token_count=plan.token_count,
    )
