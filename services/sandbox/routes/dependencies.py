"""What routes are given."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header, Request

from flotilla.services.sandbox.spare_time import name_caller
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.net.authorisation.tokens import digest_of
from flotilla.shared.net.server.connections import connection_of
from flotilla.shared.schemas.sandbox import EXPERIMENT_HEADER, MAX_EXPERIMENT_LENGTH


async def from_lifespan(request: Request) -> SandboxState:
    """Take the state that the lifespan opened."""
    state: SandboxState = request.state.sandbox
    return state


async def caller_of(
    request: Request,
    experiment: Annotated[str, Header(alias=EXPERIMENT_HEADER, max_length=MAX_EXPERIMENT_LENGTH)] = "",
) -> str:
    """Return the caller to charge for turns and processor time: its token, and the experiment."""
    return name_caller(digest_of(request.headers.get("authorization", ""))[:16], experiment)


async def is_gone_of(request: Request) -> Callable[[], bool]:
    """Return how to check whether the caller has hung up."""
    connection = connection_of(request.scope)
    return (lambda: False) if connection is None else connection.lost.done


Sandbox = Annotated[SandboxState, Depends(from_lifespan)]
Caller = Annotated[str, Depends(caller_of)]
IsGone = Annotated[Callable[[], bool], Depends(is_gone_of)]
