"""What a service logged, for the gateway to show: its own newest lines and those of its children."""

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from flotilla.shared.errors import Unauthorized
from flotilla.shared.schemas.logs import MOST_LINES, LogLines
from flotilla.shared.telemetry.recent import RECENT

Level = Annotated[Literal["debug", "info", "warning", "error", "critical"], Query(description="least severe level")]
Containing = Annotated[str, Query(max_length=200, description="what lines have in them, in capitals or not")]
Count = Annotated[int, Query(ge=1, le=MOST_LINES, description="most lines, of the newest")]
Lets = Callable[[str | None], bool]


def logs_router(lets_in: Lets) -> APIRouter:
    """Make the route; ``lets_in`` checks an ``Authorization`` header."""
    router = APIRouter(tags=["logs"])

    @router.get("/v1/logs")
    async def logs(
        request: Request,
        experiment_id: Annotated[str | None, Query(max_length=200)] = None,
        level: Level = "debug",
        containing: Containing = "",
        lines: Count = 200,
    ) -> LogLines:
        """List the newest lines that this process and its children logged.

        Raises:
            Unauthorized: the token is not for this.
        """
        if not lets_in(request.headers.get("authorization")):
            raise Unauthorized("a bearer token is needed to read what was logged")
        return RECENT.newest(lines, of=experiment_id, least=level, containing=containing)

    return router
