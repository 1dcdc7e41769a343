"""Which groups a step trains or trained: its plan, and its lineage once it is durable."""

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway, Step
from flotilla.shared.errors import NotFound
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


@router.get("/steps/{step}")
async def show_step(experiment_id: str, step: Step, gateway: Gateway) -> StepView:
    """Show which groups a step trains (its plan) or trained (its lineage).

    Raises:
        NotFound: the step has no plan.
    """
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
