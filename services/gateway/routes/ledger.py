"""The ledgers of an experiment: what became of every group."""

from typing import Any

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/ledger")
async def ledger(experiment_id: str, gateway: Gateway) -> dict[str, Any]:
    """Return both lanes' ledgers, each taken in one instant; the last ones once the experiment has ended.

    Raises:
        NotFound: there is no such experiment.
    """
    experiment = gateway.repository.get(experiment_id)
    if experiment.record.final_ledger is not None:
        return dict(experiment.record.final_ledger)
    train, evaluation = await experiment.train.ledger(), await experiment.evaluation.ledger()
    return {"train": train.model_dump(mode="json"), "evaluation": evaluation.model_dump(mode="json")}
