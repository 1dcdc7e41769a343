"""Which groups a step trains or trained: its plan, and its lineage once it is durable."""

from collections.abc import Sequence

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway, Step
from flotilla.shared.errors import NotFound
from flotilla.shared.schemas.live_changes import LiveChange, held_at
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.streams.plans import Plan

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
