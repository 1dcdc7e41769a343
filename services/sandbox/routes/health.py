"""Whether the service lives, works, and how well it isolates."""

from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from services.sandbox.routes.dependencies import Sandbox
from shared.errors import Unavailable
from shared.schemas.sandbox import SandboxHealth
from shared.telemetry.prometheus import response_of

router = APIRouter(tags=["health"])


class Ready(BaseModel):
    """The answer of ``GET /readyz``."""

    status: Literal["ready"] = "ready"


@router.get("/healthz")
async def healthz(sandbox: Sandbox) -> SandboxHealth:
    """Tell the isolation that programs run under, why none better is used, and what can be run."""
    return SandboxHealth(
        isolation=sandbox.executor.isolation.level,
        unavailable=sandbox.unavailable,
        languages={name: language.tool for name, language in sandbox.languages.items()},
        concurrency=sandbox.settings.concurrency,
        sessions=sandbox.settings.sessions,
    )


@router.get("/readyz")
async def readyz(sandbox: Sandbox) -> Ready:
    """Tell whether a call would get a turn.

    Raises:
        Unavailable: the queue is full, or no slot can be used (503).
    """
    if not sandbox.pool.is_usable:
        raise Unavailable("programs that could not be ended hold every slot")
    if sandbox.pool.is_full:
        raise Unavailable(f"{sandbox.pool.num_waiting} programs wait for their turn")
    return Ready()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(sandbox: Sandbox) -> Response:
    """Return the counters in Prometheus' text format."""
    families = sandbox.metrics.families(
        sandbox.executor.isolation.level,
        num_running=sandbox.pool.num_running,
        num_waiting=sandbox.pool.num_waiting,
        num_out_of_use=sandbox.pool.num_out_of_use,
        num_spoiled=sandbox.executor.num_spoiled,
        num_servers_lost=sandbox.executor.num_servers_lost,
        num_sessions=sandbox.sessions.num_living,
    )
    return await response_of(families)
