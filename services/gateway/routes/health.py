"""Whether the gateway lives and can work, and its page for Prometheus. Open to everybody on the network it serves."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from flotilla.services.gateway.access.policy import refusal
from flotilla.services.gateway.prometheus import metrics_of
from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.authorisation.tokens import bearer_of
from flotilla.shared.telemetry.prometheus import response_of

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(gateway: Gateway) -> dict[str, str]:
    """Report that database and data plane answer.

    Raises:
        Unavailable: one of them does not; the detail says which.
    """
    reason = await gateway.why_not_ready()
    if reason is not None:
        raise Unavailable(reason)
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(gateway: Gateway, request: Request) -> Response:
    """Return what the gateway knows, from memory alone, in Prometheus' text format.

    Single experiments are shown to those whose token may list all of them.
    """
    shown = gateway.tokens.read(bearer_of(request.headers.get("authorization")))
    is_whole = shown is not None and shown.principal.owner is None
    may_see = shown is not None and is_whole and refusal("GET", "/v1/experiments", shown.principal) is None
    return await response_of(metrics_of(gateway, with_experiments=may_see))
