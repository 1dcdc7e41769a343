"""Events of an experiment, streamed as server-sent events or listed, and what its services logged."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from flotilla.services.gateway.membership.service_logs import LogQuery
from flotilla.services.gateway.routes.dependencies import Cursor, Gateway, Limit, number_of
from flotilla.shared.net.authorisation.tokens import bearer_of
from flotilla.shared.schemas.experiment import Event, Page
from flotilla.shared.schemas.logs import ServiceLogLines
from flotilla.shared.service.logs import Containing, Count, Level

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])

Types = Annotated[str | None, Query(max_length=1000, pattern=r"^[a-z_]+(,[a-z_]+)*$")]


@router.get("/events", response_class=StreamingResponse)
async def events(
    experiment_id: str,
    gateway: Gateway,
    request: Request,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Cursor = None,
) -> StreamingResponse:
    """Stream the events as server-sent events, from the first or from ``Last-Event-ID`` on.

    A comment is sent when nothing happens for a while. The stream ends when the experiment is over and all was sent,
    and when the caller's token is revoked or expires.

    Raises:
        NotFound: there is no such experiment.
    """
    experiment = gateway.repository.get(experiment_id)
    token = bearer_of(request.headers.get("authorization"))
    start = number_of(last_event_id if last_event_id is not None else after)

    def is_over() -> bool:
        is_gone = gateway.repository.find(experiment_id) is None
        return is_gone or (experiment.state.is_final and experiment.record.final_ledger is not None)

    async def stream() -> AsyncIterator[str]:
        follow = gateway.events.follow(
            experiment_id, start, is_over=is_over, heartbeat_seconds=gateway.settings.heartbeat_seconds
        )
        async for event in follow:
            if gateway.tokens.read(token) is None:
                return
            yield frame_of(event)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


@router.get("/log")
async def log(
    experiment_id: str, gateway: Gateway, after: Cursor = None, limit: Limit = 1000, types: Types = None
) -> Page[Event]:
    """List the events as they were stored. An empty page has no ``next``: ask later with the same cursor.

    ``types`` chooses some, such as ``stalled,service_failed``.

    Raises:
        NotFound: there is no such experiment.
    """
    gateway.repository.record_of(experiment_id)
    chosen = frozenset(types.split(",")) if types else frozenset[str]()
    found = await gateway.store.events(experiment_id, after=number_of(after), limit=limit, types=chosen)
    return Page(items=tuple(found), next=str(found[-1].id) if found else None)


@router.get("/logs")
async def logs(
    experiment_id: str,
    gateway: Gateway,
    service: Annotated[str | None, Query(max_length=200, description="one of them, or `gateway`")] = None,
    level: Level = "debug",
    containing: Containing = "",
    lines: Count = 200,
) -> ServiceLogLines:
    """List the newest lines that belong to an experiment: the gateway's, and those of the services that work for it.

    Raises:
        NotFound: there is no such experiment, or the service does not work for it.
    """
    gateway.repository.record_of(experiment_id)
    return await gateway.logs.of_experiment(experiment_id, LogQuery(level, containing, lines, experiment_id), service)


def frame_of(event: Event | None) -> str:
    """Write one event as a server-sent event; None as a comment."""
    if event is None:
        return ": nothing new\n\n"
    return f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
