"""The ledgers of an experiment: what became of every group."""

from typing import Any

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway, Jobs

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
    experiment = gateway.repository.get(experiment_id)
    if experiment.record.final_ledger is not None:
        return dict(experiment.record.final_ledger)
    train, evaluation = await experiment.train.ledger(), await experiment.evaluation.ledger()
    issued, now = gateway.feeder_status.of(experiment).issued, gateway.clock.monotonic()
    aged = [each.model_copy(update={"oldest_seconds": issued.age(each.first_group, now)}) for each in train.by_version]
    train = train.model_copy(update={"by_version": tuple(aged)})
    return {"train": train.model_dump(mode="json"), "evaluation": evaluation.model_dump(mode="json")}
