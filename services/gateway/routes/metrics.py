"""Metrics: what services measured in each step; as points, and as the columns that charts are drawn from."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_json

from flotilla.services.gateway.page.thinning import in_common, thinned
from flotilla.services.gateway.routes.dependencies import LARGEST_PAGE, OF_TRAINER, Cursor, Gateway, Jobs, number_of
from flotilla.services.gateway.store.answers import stage_answer
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics
from flotilla.shared.clock import rfc3339
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.experiment import MetricBatch, MetricPoint, Page, Series, SeriesPage
from flotilla.shared.schemas.metric_names import check_names, is_known
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.tinker.records import Update

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])

MOST_NAMES = 100
SLICE = 20_000
"""Rows that are read at once: the database has one thread, and a service's write waits no longer than this takes."""
MOST_VALUES = 1_000_000
"""Of one answer, before it is thinned: 200 MB."""


_Values = dict[str, dict[int, PointRecord]]
"""By name and step."""


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
        PointRecord(name=name, step=batch.step, version=batch.version, value=value, at=at)
        for name, value in batch.values.items()
    ]
    answer = Stored(stored=len(points))
    async with gateway.store.transaction() as change:
        change.write(PutMetrics(experiment_id, points))
        # A step that ends while the experiment is stopped is reported by its metrics alone.
        gateway.repository.stage_step(change, experiment, batch.step)
        stage_answer(change, answer)
    measured = gateway.measurements.of(experiment)
    measured.add_step(gateway.clock.monotonic(), batch.step, batch.values)
    if (lending := experiment.spec.resources.lending) is not None:
        measured.lending.add_step(batch.values, lending, gateway.scheduler.lent.sampled(experiment.id))
    return answer


@router.get("/metrics", response_model=Page[MetricPoint])
async def metrics(
    experiment_id: str,
    gateway: Gateway,
    names: Annotated[str | None, Query(description="names, separated by commas; all if left out")] = None,
    after: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=10 * LARGEST_PAGE)] = LARGEST_PAGE,
) -> Response:
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
    # As the model is written, of rows as they are: a follower of a run asks for hundreds every second or two.
    page = {"items": [point._asdict() for _, point in rows], "next": str(rows[-1][0]) if rows else None}
    return Response(to_json(page), media_type="application/json")


@router.get("/series", response_model=SeriesPage)
async def series(
    experiment_id: str,
    gateway: Gateway,
    jobs: Jobs,
    request: Request,
    names: Annotated[
        str, Query(description="names, separated by commas; `reward/*` for all that begin with `reward/`")
    ],
    after: Cursor = None,
    points: Annotated[int, Query(ge=4, le=100_000, description="most points of a series; extremes stay")] = 2000,
) -> Response:
    """Return metric values as columns, each series by step. ``after`` continues; then ``next`` is the cursor again.

    Of an experiment of the kind tinker there are `loss/total`, `grad_norm` and `learning_rate`, by update.

    Raises:
        NotFound: there is no such experiment.
        InvalidRequest: no name is given, or more than 100; or they have more than a million values.
        TooManyRequests: the token has as many of these and of samples open as it may.
    """
    is_job = jobs.is_one(experiment_id)
    if not is_job:
        gateway.repository.record_of(experiment_id)
    wanted = [name for name in names.split(",") if name]
    if not 0 < len(wanted) <= MOST_NAMES:
        raise InvalidRequest(f"names: 1 to {MOST_NAMES} are wanted, {len(wanted)} are given")
    async with gateway.samples.reads.turn(request.state.shown.principal.actor):
        if is_job:
            cursor, updates = await jobs.updates(experiment_id, number_of(after))
            values = _of_updates(updates, wanted)
        else:
            values, cursor = await _read(gateway.store, experiment_id, wanted, number_of(after))
        following = str(cursor) if cursor else None
        text = await asyncio.to_thread(lambda: _page_of(values, points, following).model_dump_json())
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


async def _read(store: Store, experiment_id: str, names: list[str], cursor: int) -> tuple[_Values, int]:
    """Read to the end; a point that is written again meanwhile comes twice, and the later one counts."""
    values: _Values = defaultdict(dict)
    num_read = 0
    while True:
        found = await store.metrics(experiment_id, names=names, after=cursor, limit=SLICE)
        num_read += len(found)
        if num_read > MOST_VALUES:
            raise InvalidRequest("too many values: name fewer series")
        for _, row in found:
            values[row.name][row.step] = row
        cursor = found[-1][0] if found else cursor
        if len(found) < SLICE:
            return values, cursor
        # Of a store in memory nothing else would have waited.
        await asyncio.sleep(0)


def _of_updates(updates: Sequence[Update], names: Sequence[str]) -> _Values:
    values: _Values = defaultdict(dict)
    for each in updates:
        found = {"loss/total": each.loss, "grad_norm": each.grad_norm, "learning_rate": each.learning_rate}
        for name, value in found.items():
            # The store's patterns are of this kind, too: `loss/*`.
            if value is not None and any(fnmatchcase(name, wanted) for wanted in names):
                point = PointRecord(name=name, step=each.step, version=each.step, value=value, at=rfc3339(each.seconds))
                values[name][each.step] = point
    return values


def _page_of(values: _Values, points: int, following: str | None) -> SeriesPage:
    common: list[int] | None = None
    if any(len(series) > points for series in values.values()):
        common = in_common(sorted(set().union(*values.values())), points)
    items = tuple(_series_of(name, values[name], points, common or ()) for name in sorted(values))
    return SeriesPage(items=items, next=following, common=None if common is None else tuple(common))


def _series_of(name: str, values: dict[int, PointRecord], points: int, common: Sequence[int]) -> Series:
    steps = sorted(values)
    kept = steps
    if len(steps) > points:
        places = thinned([values[step].value for step in steps], points - len(common))
        kept = sorted({steps[place] for place in places}.union(step for step in common if step in values))
    rows = [values[step] for step in kept]
    return Series(
        name=name,
        num_points=len(steps),
        steps=tuple(kept),
        versions=tuple(row.version for row in rows),
        values=tuple(row.value for row in rows),
        seconds=tuple(None if row.at is None else datetime.fromisoformat(row.at).timestamp() for row in rows),
    )
