"""What routes are given."""

from typing import Annotated

from fastapi import Depends, Request

from services.sandbox.state import SandboxState


async def from_lifespan(request: Request) -> SandboxState:
    """Take the state that the lifespan opened."""
    state: SandboxState = request.state.sandbox
    return state


Sandbox = Annotated[SandboxState, Depends(from_lifespan)]
