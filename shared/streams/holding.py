"""Working on a claim: the work ends as soon as the claim is lost, since somebody else may do it by then."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import ClaimLost
from shared.streams.hop import Claim, Hop, Renewal


@asynccontextmanager
async def holding(hop: Hop, claim: Claim) -> AsyncIterator[Renewal]:
    """Renew a claim while the block runs, and cancel the block once the claim is lost.

    Yields:
        What renewing finds out. Who knows better, since the entry was delivered again, may set ``lost``.

    Raises:
        ClaimLost: the block was cancelled for that. A cancellation from outside stays one.
    """
    holder = asyncio.current_task()
    assert holder is not None
    cancellations = holder.cancelling()
    is_lost = False

    async def cancel_when_lost(renewal: Renewal) -> None:
        nonlocal is_lost
        await renewal.lost.wait()
        is_lost = True
        holder.cancel()

    try:
        async with hop.renewing(claim) as renewal:
            watching = asyncio.create_task(cancel_when_lost(renewal), name=f"watch {claim.entry_id}")
            try:
                yield renewal
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    except BaseException as error:
        # Like asyncio.timeout: the cancellation is taken back, and becomes an error only where there is no other.
        is_ours = is_lost and holder.uncancel() <= cancellations
        if is_ours and isinstance(error, asyncio.CancelledError):
            raise ClaimLost(f"entry {claim.entry_id} of the hop {hop.name.value} is held no more") from error
        raise
