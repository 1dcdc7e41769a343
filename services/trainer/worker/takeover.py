"""How a worker takes over: from the data plane first, then with the gateway, down to what its checkpoint leads to.

    fence the earlier trainer -> load the newest whole checkpoint -> abandon what does not continue it
    -> report the rest to the gateway -> learn which versions that makes

Each step may be repeated, and a crash between two of them leaves the next worker with the same to do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from flotilla.services.trainer.checkpoint.manager import Progress, Restored
from flotilla.services.trainer.data.live_settings import LiveSettings
from flotilla.services.trainer.worker.control import RunControl, ToldToEnd
from flotilla.shared.checkpoints.lineage import PlannedStep, Standing, VersionLine, follow, split_plans
from flotilla.shared.checkpoints.takeover import (
    RefusedIncarnation,
    StandingPlan,
    StandingPoint,
    TakeoverAnswer,
    TakeoverRequest,
)
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ClaimLost, Conflict
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.retry import DATA_PLANE, GATEWAY, retry
from flotilla.shared.schemas.live_changes import AdoptAnswer, AdoptRequest, LiveChange
from flotilla.shared.streams.admission import Admission
from flotilla.shared.streams.plans import Plan, TrainerQueue

log = logging.getLogger(__name__)

REFUSED_SECONDS = 1.0


async def become_trainer(
    queue: TrainerQueue, gateway: GatewayClient, experiment_id: str, incarnation: int | None
) -> None:
    """Fence every earlier trainer off.

    Raises:
        ClaimLost: the data plane knows a later one. It is reported to the gateway: where its database is older than the
            data plane, it appoints this trainer again with a higher number.
    """
    try:
        await retry(partial(queue.take_over, incarnation), waiting_for=DATA_PLANE)
    except ClaimLost as error:
        recorded = error.context.get("recorded")
        if isinstance(recorded, int):
            body = RefusedIncarnation(recorded=recorded)
            try:
                path = f"/v1/experiments/{experiment_id}/takeovers/refused"
                await retry(partial(gateway.call, "POST", path, body=body), waiting_for=GATEWAY)
            except Conflict as conflict:
                log.info("another trainer was appointed", extra={"detail": conflict.detail})
        raise


async def reconcile_with(
    queue: TrainerQueue,
    admission: Admission,
    gateway: GatewayClient,
    spec: ExperimentSpec,
    restored: Restored,
    experiment_id: str,
    control: RunControl,
) -> tuple[VersionLine, LiveSettings]:
    """Abandon what the checkpoint does not lead to, and learn the lineage's versions and live changes.

    Raises:
        ToldToEnd: the gateway refuses, and ``control`` has the reason: the experiment ends, or is another trainer's.
    """
    progress = restored.progress
    plans = await retry(partial(queue.plans_from, 0), waiting_for=DATA_PLANE)
    published_version = await retry(admission.published_version, waiting_for=DATA_PLANE)
    standing = Standing(
        step=progress.step,
        published=restored.published,
        plans=tuple(_planned(plan) for plan in plans if plan.step > progress.step),
        newest_version=max([published_version or 0, *(plan.version for plan in plans)]),
        lineage=progress.lineage,
    )
    kept, others = split_plans(standing)
    strange = [p.step for p in plans if p.step <= progress.step and any(g not in progress.trained for g in p.group_ids)]
    given_up = [*strange, *(plan.step for plan in others)]
    found = await retry(partial(queue.roll_back, progress.step, given_up), waiting_for=DATA_PLANE)
    if found.waiting or found.lost:
        facts = {"step": progress.step, "plans": given_up, "waiting": found.waiting, "lost": found.lost}
        log.warning("groups are abandoned that the checkpoint does not lead to", extra=facts)
    request = TakeoverRequest(
        step=standing.step,
        published=StandingPoint(version=restored.published.version, step=restored.published.step),
        plans=tuple(StandingPlan(**plan._asdict()) for plan in kept),
        newest_version=standing.newest_version,
        lineage=standing.lineage,
        groups_waiting=found.waiting,
        groups_lost=found.lost,
        changes=progress.changes,
    )
    asking = partial(gateway.call, "POST", f"/v1/experiments/{experiment_id}/takeovers", body=request)
    answer = await _answered(asking, control)
    if answer.lost is not None:
        facts = {"lost_version": answer.lost, "version": answer.points[-1].version, "step": answer.points[-1].step}
        log.warning("versions are lost, the weights are published under a new number", extra=facts)
    line = VersionLine.of(
        answer.published(),
        steps_per_version=spec.steps_per_version,
        total_steps=spec.optimisation.steps,
        lost=restored.lost,
    )
    return line, _live_settings(spec, answer, gateway, experiment_id, progress)


def _live_settings(
    spec: ExperimentSpec, answer: TakeoverAnswer, gateway: GatewayClient, experiment_id: str, progress: Progress
) -> LiveSettings:
    async def ask(request: AdoptRequest) -> AdoptAnswer:
        asking = partial(gateway.call, "POST", f"/v1/experiments/{experiment_id}/changes/adopted", body=request)
        answer = AdoptAnswer.model_validate(await retry(asking, waiting_for=GATEWAY))
        progress.curriculum = answer.curriculum or progress.curriculum
        return answer

    def keep(changes: tuple[LiveChange, ...]) -> None:
        progress.changes = changes

    return LiveSettings(spec, answer.changes, ask, keep)


def _planned(plan: Plan) -> PlannedStep:
    made = follow(plan.parent, plan.step, plan.group_ids) if plan.parent else ""
    return PlannedStep(plan.step, plan.version, plan.parent, made)


async def _answered(call: Callable[[], Awaitable[Any]], control: RunControl) -> TakeoverAnswer:
    while True:
        try:
            return TakeoverAnswer.model_validate(await retry(call, waiting_for=GATEWAY))
        except Conflict as error:
            # The experiment is being stopped, or another trainer was appointed: the order to end is on its way, if it
            # has not come while the model was loaded.
            log.warning("the gateway refuses the takeover", extra={"error": error.detail})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFUSED_SECONDS):
                    await control.until_stopped()
        if control.is_stopped:
            raise ToldToEnd
