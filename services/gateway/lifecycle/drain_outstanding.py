"""Claims what is still outstanding in a lane without consumers, and resolves it with one reason."""

import asyncio
import logging

from flotilla.services.gateway.records.repository import Experiment
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import Hop, HopName, Resolution
from flotilla.shared.streams.ledger import Ledger

log = logging.getLogger(__name__)

GATEWAY = "gateway"
IDLE_SECONDS = 0.2
"""Claims are taken over after this: their holders were asked to stop, or are dead."""
NO_CHECKPOINT = "no_checkpoint"
BATCH = 64
ROUNDS = 100


async def drain_outstanding(experiment: Experiment, lane: Lane, reason: str, *, durable_step: int = 0) -> Ledger:
    """Resolve everything outstanding in a lane as dropped, and return the ledger that results.

    The trainer is fenced off. Plans that its last checkpoint contains are committed, in case it could not; the groups
    of later ones, which it trained and can never make durable, are dropped as ``no_checkpoint``.

    Args:
        experiment: that has ended.
        lane: of it.
        reason: of what was under way.
        durable_step: of the last checkpoint; for the train lane.

    Raises:
        Unavailable: the data plane does not answer.
    """
    plane = experiment.open_plane(experiment.id, lane, lease_seconds=IDLE_SECONDS)
    ledger = await plane.ledger()
    if ledger.outstanding == 0 and ledger.planned == 0:
        return ledger
    # What is resolved here goes to no other stream, so a full one is no reason to wait.
    await plane.admission.bound(None)
    hops: list[Hop] = [plane.hop(HopName.TASKS, GATEWAY), plane.hop(HopName.GENERATED, GATEWAY)]
    if lane is Lane.TRAIN:
        trainer = plane.trainer(GATEWAY)
        await trainer.take_over()
        steps = [plan.step for plan in await trainer.plans_from(0)]
        await trainer.commit([step for step in steps if step <= durable_step])
        await trainer.abandon([step for step in steps if step > durable_step], Resolution.DROPPED, NO_CHECKPOINT)
        hops.append(trainer.hop)
    else:
        hops.append(plane.hop(HopName.SCORED, GATEWAY))
    for _ in range(ROUNDS):
        for hop in hops:
            while claims := await hop.claim(BATCH, wait_seconds=0.01):
                await asyncio.gather(*(hop.resolve(claim, Resolution.DROPPED, reason) for claim in claims))
        ledger = await plane.ledger()
        if ledger.outstanding == 0:
            return ledger
        await asyncio.sleep(IDLE_SECONDS)
    log.error(
        "outstanding groups could not be resolved", extra={"experiment_id": experiment.id, "left": ledger.outstanding}
    )
    return ledger
