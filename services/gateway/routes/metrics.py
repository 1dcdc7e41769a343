"""Metrics: what services measured in each step."""

import math
from typing import Annotated

from fastapi import APIRouter, Query

from flotilla.services.gateway.routes.dependencies import LARGEST_PAGE, OF_TRAINER, Cursor, Gateway, number_of
from flotilla.services.gateway.store.answers import stage_answer
from flotilla.services.gateway.store.writes import PutMetrics
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.experiment import MetricBatch, MetricPoint, Page
from flotilla.shared.schemas.metric_names import check_names, is_known
from flotilla.shared.schemas.wire import Wire

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


class Stored(Wire):
    """How many values were stored."""

    stored: int


@router.post("/metrics", status_code=201, dependencies=[OF_TRAINER])
async def put_metrics(experiment_id: str, batch: MetricBatch, gateway: Gateway) -> Stored:
    """Store what a service measured in one step; a step that is trained again replaces its values.

    Raises:
        NotFound: there is no such experiment (404).
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch (409).
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
    answer = Stored(stored=len(points))
    async with gateway.store.transaction() as change:
        change.write(PutMetrics(experiment_id, points))
        # A step that ends while the experiment is stopped is reported by its metrics alone.
        gateway.repository.stage_step(change, experiment, batch.step)
        stage_answer(change, answer)
    gateway.measurements.of(experiment).add_step(gateway.clock.monotonic(), batch.step, batch.values)
    return answer


@router.get("/metrics")
async def metrics(
    experiment_id: str,
    gateway: Gateway,
    names: Annotated[str | None, Query(description="names, separated by commas; all if left out")] = None,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=10 * LARGEST_PAGE)] = LARGEST_PAGE,
) -> Page[MetricPoint]:
    """List metric values in the order of writing. An empty page has no ``next``: ask later with the same cursor.

    Raises:
        NotFound: there is no such experiment (404).
        InvalidRequest: no run has a metric of such a name; the detail names those that are near (422).
    """
    gateway.repository.record_of(experiment_id)
    wanted = [name for name in (names or "").split(",") if name]
    rows = await gateway.store.metrics(experiment_id, names=wanted, after=number_of(after), limit=limit)
    found = {point.name for _, point in rows}
    strange = [name for name in wanted if name not in found and not is_known(name)]
    if strange:
        check_names(strange, await gateway.store.metric_names(experiment_id))
    return Page(items=tuple(point for _, point in rows), next=str(rows[-1][0]) if rows else None)
