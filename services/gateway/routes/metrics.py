"""Metrics: what services measured in each step; as points, and as the columns that charts are drawn from."""

import asyncio
import math
from collections import defaultdict
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from flotilla.services.gateway.page.thinning import thinned
from flotilla.services.gateway.routes.dependencies import LARGEST_PAGE, OF_TRAINER, Cursor, Gateway, number_of
from flotilla.services.gateway.store.answers import stage_answer
from flotilla.services.gateway.store.writes import PutMetrics
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.experiment import MetricBatch, MetricPoint, Page, Series, SeriesPage
from flotilla.shared.schemas.metric_names import check_names, is_known
from flotilla.shared.schemas.wire import Wire

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])

MOST_NAMES = 100
SLICE = 20_000
"""Rows that are read at once: the database has one thread, and a service's write waits no longer than this takes."""


class Stored(Wire):
    """How many values were stored."""

    stored: int


@router.post("/metrics", status_code=201, dependencies=[OF_TRAINER])
async def put_metrics(experiment_id: str, batch: MetricBatch, gateway: Gateway) -> Stored:
    """Store what a service measured in one step; a step that is trained again replaces its values.

    Raises:
        NotFound: there is no such experiment.
        NotAssigned: the caller is not its trainer, or was it in an earlier epoch.
        InvalidRequest: a value is not finite.
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
        NotFound: there is no such experiment.
        InvalidRequest: no run has a metric of such a name; the detail names those that are near.
    """
    gateway.repository.record_of(experiment_id)
    wanted = [name for name in (names or "").split(",") if name]
    rows = await gateway.store.metrics(experiment_id, names=wanted, after=number_of(after), limit=limit)
    found = {point.name for _, point in rows}
    strange = [name for name in wanted if name not in found and not is_known(name)]
    if strange:
        check_names(strange, await gateway.store.metric_names(experiment_id))
    return Page(items=tuple(point for _, point in rows), next=str(rows[-1][0]) if rows else None)


@router.get("/series", response_model=SeriesPage)
async def series(
    experiment_id: str,
    gateway: Gateway,
    names: Annotated[
        str, Query(description="names, separated by commas; `reward/*` for all that begin with `reward/`")
    ],
    after: Cursor = None,
    points: Annotated[int, Query(ge=4, le=100_000, description="most points of a series; extremes stay")] = 2000,
) -> Response:
    """Return metric values as columns, each series by step. ``after`` continues; then ``next`` is the cursor again.

    Raises:
        NotFound: there is no such experiment.
        InvalidRequest: no name is given, or more than 100.
    """
    gateway.repository.record_of(experiment_id)
    wanted = [name for name in names.split(",") if name]
    if not 0 < len(wanted) <= MOST_NAMES:
        raise InvalidRequest(f"names: 1 to {MOST_NAMES} are wanted, {len(wanted)} are given")
    cursor = number_of(after)
    rows: list[MetricPoint] = []
    while True:
        found = await gateway.store.metrics(experiment_id, names=wanted, after=cursor, limit=SLICE)
        rows += [point for _, point in found]
        cursor = found[-1][0] if found else cursor
        if len(found) < SLICE:
            break
    following = str(cursor) if cursor else None
    text = await asyncio.to_thread(lambda: _page_of(rows, points, following).model_dump_json())
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


def _page_of(rows: list[MetricPoint], points: int, following: str | None) -> SeriesPage:
    by_name: dict[str, list[MetricPoint]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.step):
        by_name[row.name].append(row)
    return SeriesPage(
        items=tuple(_series_of(name, by_name[name], points) for name in sorted(by_name)),
        next=following,
    )


def _series_of(name: str, rows: list[MetricPoint], points: int) -> Series:
    kept = [rows[place] for place in thinned([row.value for row in rows], points)]
    return Series(
        name=name,
        num_points=len(rows),
        steps=tuple(row.step for row in kept),
        versions=tuple(row.version for row in kept),
        values=tuple(row.value for row in kept),
        seconds=tuple(None if row.at is None else datetime.fromisoformat(row.at).timestamp() for row in kept),
    )
