"""What the routes share: the state, and pages of a list."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Query, Request
from pydantic import BaseModel

from flotilla.services.gateway.membership.speaking import speaking_trainer
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.tinker.jobs import TinkerJobs
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.authorisation.access import Principal
from flotilla.shared.schemas.experiment import Page

Item = TypeVar("Item", bound=BaseModel)

LARGEST_PAGE = 1000
LONGEST_CURSOR = 18
"""Digits of a number that a database holds in 64 bits."""


async def from_lifespan(request: Request) -> GatewayState:
    """Find what the lifespan opened."""
    # A plain function would be run in a thread, once per request: a third of the time of a status call.
    state: GatewayState = request.state.gateway
    return state


MAX_WHOLE = 2**63 - 1
"""Largest number that databases and the data plane hold."""

Gateway = Annotated[GatewayState, Depends(from_lifespan)]


async def _jobs(request: Request) -> TinkerJobs:
    state: GatewayState = request.state.gateway
    return TinkerJobs(getattr(request.state, "tinker", None), state.settings.data.resolve())


Jobs = Annotated[TinkerJobs, Depends(_jobs)]
"""Experiments that clients of the Tinker API drive."""


async def _of_token(request: Request) -> Principal:
    principal: Principal = request.state.shown.principal
    return principal


Caller = Annotated[Principal, Depends(_of_token)]
"""The identity of a request's token."""


async def _speaking(experiment_id: str, caller: Caller, gateway: Gateway) -> str | None:
    return speaking_trainer(caller, experiment_id, gateway.repository, gateway.registry)


OF_TRAINER = Depends(_speaking)
"""For every route that the policy calls assigned: a service's token is of the experiment's trainer, in its present
epoch."""
Trainer = Annotated[str | None, OF_TRAINER]
"""The id of the trainer that a request speaks for, by its token alone; None where there is none."""
Cursor = Annotated[str | None, Query(description="`next` of the page before")]
Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="most items of a page")]
Step = Annotated[int, Path(ge=0, le=MAX_WHOLE)]
Wait = Annotated[float, Query(ge=0, description="seconds to wait for a change, cut to 30")]


def number_of(cursor: str | None) -> int:
    """Read a cursor that counts.

    Raises:
        InvalidRequest: it is not one that this server gave out.
    """
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= LONGEST_CURSOR):
        raise InvalidRequest(f"after: {cursor!r} is not a cursor of this list")
    return int(cursor)


def page_of(items: Sequence[tuple[str, Item]], after: str | None, limit: int) -> Page[Item]:
    """Cut a page out of a list whose items have a cursor each; ``after`` names the last item seen.

    Raises:
        InvalidRequest: no item has this cursor.
    """
    start = 0
    if after is not None:
        start = next((number for number, (key, _) in enumerate(items, start=1) if key == after), -1)
        if start < 0:
            raise InvalidRequest(f"after: {after!r} is not a cursor of this list")
    rows = items[start : start + limit]
    following = rows[-1][0] if rows and start + limit < len(items) else None
    return Page(items=tuple(item for _, item in rows), next=following)
