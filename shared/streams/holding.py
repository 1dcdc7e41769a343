"""Working on a claim: the work ends as soon as the claim is lost, since somebody else may do it by then."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flotilla.shared.concurrency.cancelling import cancelled_by
from flotilla.shared.errors import ClaimLost
from flotilla.shared.streams.hop import Claim, Hop, Renewal


@asynccontextmanager
async def holding(hop: Hop, claim: Claim) -> AsyncIterator[Renewal]:
    """Renew a claim while the block runs, and cancel the block once the claim is lost.

    Yields:
        What renewing finds out. Who knows better, since the entry was delivered again, may set ``lost``.

    Raises:
        ClaimLost: the block was cancelled for that. A cancellation from outside stays one.
    """
    lost = ClaimLost(f"entry {claim.entry_id} of the hop {hop.name.value} is held no more")
    async with (
        hop.renewing(claim) as renewal,
        cancelled_by(renewal.lost.wait, lost, name=f"watch {claim.entry_id}"),
    ):
        yield renewal
