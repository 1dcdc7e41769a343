"""What is told of one experiment: its ledger, what bounds it, who changed it, its steps, held-out rows and usage."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from flotilla.services.gateway.lifecycle.rules import views_of
from flotilla.services.gateway.monitoring.bottleneck import Placed, advice_on_cores
from flotilla.services.gateway.monitoring.usage import usage_of
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.routes.dependencies import MAX_WHOLE, OF_TRAINER, Gateway, Jobs, Limit, Step
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import InvalidRequest, NotFound
from flotilla.shared.schemas.costs import Usage, with_costs
from flotilla.shared.schemas.experiment import AuditEntry, DiagnosisView, ExperimentState, FailingService, Page, Problem
from flotilla.shared.schemas.health import HealthFinding
from flotilla.shared.schemas.held_out import HeldOutPage
from flotilla.shared.schemas.live_changes import LiveChange, held_at
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.streams.plans import Plan

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/ledger")
async def ledger(experiment_id: str, gateway: Gateway, jobs: Jobs) -> dict[str, Any]:
    """Return both lanes' ledgers, each taken in one instant; the last ones once the experiment has ended.

    ``oldest_seconds`` of a version is how long ago its first group was issued, null where another gateway issued it.

    Of an experiment of the kind tinker that of its ``requests``.

    Raises:
        NotFound: there is no such experiment.
    """
    if jobs.is_one(experiment_id):
        return {"requests": (await jobs.ledger(experiment_id)).model_dump(mode="json")}
    return await ledgers_of(gateway.repository.get(experiment_id), gateway)


async def ledgers_of(experiment: Experiment, gateway: GatewayState) -> dict[str, Any]:
    """Describe the ledgers of an experiment's two lanes."""
    if experiment.record.final_ledger is not None:
        return dict(experiment.record.final_ledger)
    train, evaluation = await experiment.train.ledger(), await experiment.evaluation.ledger()
    issued, now = gateway.feeder_status.of(experiment).issued, gateway.clock.monotonic()
    aged = [each.model_copy(update={"oldest_seconds": issued.age(each.first_group, now)}) for each in train.by_version]
    train = train.model_copy(update={"by_version": tuple(aged)})
    return {"train": train.model_dump(mode="json"), "evaluation": evaluation.model_dump(mode="json")}


@router.get("/diagnosis")
async def diagnosis(experiment_id: str, gateway: Gateway) -> DiagnosisView:
    """Name what bounds the experiment's speed now, with its evidence and what would change it.

    Raises:
        NotFound: there is no such experiment.
    """
    experiment = gateway.repository.get(experiment_id)
    now = gateway.clock.monotonic()
    measured = gateway.measurements.of(experiment)
    found = measured.bottleneck(now, experiment.spec)
    problem = experiment.record.problem
    is_over = experiment.state is not ExperimentState.RUNNING
    members = [Placed(s.kind, s.record.host, s.capabilities.cores) for s in gateway.registry.of(experiment.id)]
    idle = advice_on_cores(found.component, experiment.spec, members)
    return DiagnosisView(
        component="none" if is_over else found.component,
        cause=f"the experiment is {experiment.state.value}" if is_over else found.cause,
        advice="" if is_over else "; ".join(filter(None, (idle, found.advice))),
        window_seconds=round(measured.window.seconds(now), 3),
        evidence=found.evidence,
        problem=Problem(**problem) if problem is not None else None,
        failing=tuple(
            FailingService(service_id=s.id, component=failure.component, cause=failure.cause)
            for s in gateway.registry.of(experiment.id)
            if (failure := s.observed.failure) is not None
        ),
        rules=await views_of(gateway.store, experiment, measured.rule_points),
        health=tuple(HealthFinding.model_validate(each) for each in experiment.record.health or ()),
        lending=gateway.scheduler.lent.told(experiment) if experiment.is_active else None,
    )


@router.get("/audit")
async def audit(experiment_id: str, gateway: Gateway, limit: Limit = 100) -> Page[AuditEntry]:
    """List the newest mutations of an experiment, newest first; also of one that was deleted."""
    records = await gateway.store.audit(f"experiments/{experiment_id}", limit=limit)
    items = tuple(AuditEntry(at=rfc3339(r.at), action=r.action, actor=r.actor, detail=dict(r.detail)) for r in records)
    return Page(items=items)


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
    changes: tuple[LiveChange, ...] = ()
    """Live changes that hold for the version that the step trains; groups carry what they were sampled with."""


@router.get("/steps/{step}")
async def show_step(experiment_id: str, step: Step, gateway: Gateway) -> StepView:
    """Show which groups a step trains (its plan) or trained (its lineage).

    Raises:
        NotFound: the step has no plan.
    """
    experiment = gateway.repository.get(experiment_id)
    queue = experiment.train.trainer(READER)
    lineage = await queue.lineage(step)
    plan = lineage or await queue.load_plan(step)
    if plan is None:
        raise NotFound(f"step {step} of {experiment_id} has no plan yet", step=step)
    return _step_view(plan, experiment.steering.changes, is_committed=lineage is not None)


def _step_view(plan: Plan, changes: Sequence[LiveChange], *, is_committed: bool) -> StepView:
    return StepView(
        step=plan.step,
        version=plan.version,
        is_committed=is_committed,
        group_ids=plan.group_ids,
        oldest_version=plan.oldest_version,
        newest_version=plan.newest_version,
        token_count=plan.token_count,
        changes=held_at(changes, plan.version),
    )


@router.get("/held_out_rows", dependencies=[OF_TRAINER])
async def held_out_rows(
    experiment_id: str,
    gateway: Gateway,
    first: Annotated[int, Query(ge=0, le=MAX_WHOLE, description="number of a row")] = 0,
) -> HeldOutPage:
    """Return rows of ``job.held_out`` as tokens; the trainer computes their loss.

    Raises:
        NotFound: there is no such experiment, or no such row.
        NotAssigned: the caller is a service, and not the experiment's trainer now.
        Unavailable: the experiment's datasets are not loaded; try again.
    """
    rows = gateway.held_out.of(gateway.repository.get(experiment_id))
    return await asyncio.to_thread(rows.page, first)


@router.get("/usage")
async def usage(experiment_id: str, gateway: Gateway) -> Usage:
    """Add up hours by pool, kind of service and device, and the tokens that were generated, trained and saved.

    With costs where the gateway has a list of prices (`FLOTILLA_PRICES`), or `costs_problem` where that has none for
    a pool or device.

    Raises:
        NotFound: there is no such experiment.
    """
    found = await usage_of(gateway.store, gateway.repository.get(experiment_id), gateway.clock.now())
    prices = gateway.settings.prices
    if prices is None:
        return found
    try:
        return with_costs(found, prices)
    except InvalidRequest as error:
        return found.model_copy(update={"costs_problem": error.detail})
