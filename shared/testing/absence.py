"""Makes calls fail as they do while their server is absent, and cancellations come at the worst moment."""

import asyncio
from typing import Any

from flotilla.shared.errors import Unavailable


def make_absent(owner: object, method: str, times: int) -> list[None]:
    """Let the next ``times`` calls of a method raise ``Unavailable`` without an effect; the result grows with each."""
    real = getattr(owner, method)
    refused: list[None] = []

    async def call(*arguments: Any, **named: Any) -> Any:
        if len(refused) < times:
            refused.append(None)
            raise Unavailable("the Redis server did not answer within 30 s: gone")
        return await real(*arguments, **named)

    setattr(owner, method, call)
    return refused


def cancel_on_claim(hop: Any, task: "asyncio.Task[None]") -> None:
    """Cancel a consumer's task at the moment in which a claim arrives."""
    real = hop.claim

    async def claim(*arguments: Any, **named: Any) -> Any:
        claims = await real(*arguments, **named)
        if claims:
            task.cancel()
        return claims

    hop.claim = claim
