"""Working on a claim: the work ends as soon as the claim is lost, since another consumer may do it by then."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flotilla.shared.errors import ClaimLost
from flotilla.shared.streams.hop import Claim, Hop, Renewal

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 1.0


class LostClaims:
    """Logs claims that are lost: those of one cause, such as a cut network, are logged together.

    Args:
        message: what became of the work on them.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._entries: list[str] = []

    def add(self, claim: Claim) -> None:
        """Count one; it is logged with those that follow soon."""
        if not self._entries:
            asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._tell)
        self._entries.append(claim.entry_id)

    def _tell(self) -> None:
        entries, self._entries = self._entries, []
        log.warning(self._message, extra={"claims": len(entries), "first": entries[0], "last": entries[-1]})


@asynccontextmanager
async def holding(hop: Hop, claim: Claim) -> AsyncIterator[Renewal]:
    """Renew a claim while the block runs, and cancel the block once the claim is lost.

    Yields:
        What renewing finds out. A caller that sees the entry delivered again may set ``lost``.

    Raises:
        ClaimLost: the block was cancelled for that. A cancellation from outside stays one.
    """
    lost = ClaimLost(f"entry {claim.entry_id} of the hop {hop.name.value} is held no more")
    async with hop.renewing(claim) as renewal:
        with renewal.lost.cancelling(lost):
            yield renewal
