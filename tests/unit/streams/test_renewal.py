"""What a holder learns while the server is away."""

import asyncio
from collections.abc import Sequence

from shared.errors import Unavailable
from shared.streams.hop import Claim, renewing
from shared.streams.keys import HopName
from shared.streams.memory.hop import MemoryHop
from shared.streams.memory.plane import MemoryDataPlane
from shared.streams.settings import StreamsConfig
from shared.testing.builders import a_task


class Renewer:
    """Passes a hop on, but answers renewals with an error."""

    def __init__(self, hop: MemoryHop, error: Exception) -> None:
        self._hop = hop
        self._error = error
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._hop, name)

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        self.asked += 1
        raise self._error


async def a_claim(lease_seconds: float) -> tuple[MemoryHop, Claim]:
    plane = MemoryDataPlane(config=StreamsConfig(lease_seconds=lease_seconds))
    await plane.admission.issue(a_task(0), limit=1)
    hop = plane.hop(HopName.TASKS, "rollout")
    (claim,) = await hop.claim(wait_seconds=0)
    return hop, claim


async def test_a_claim_counts_as_lost_once_its_lease_has_passed_without_an_answer() -> None:
    hop, claim = await a_claim(0.03)
    renewer = Renewer(hop, Unavailable("away"))

    async with renewing(renewer, [claim]) as renewal, asyncio.timeout(5):  # type: ignore[arg-type]
        await renewal.lost.wait()

    assert renewer.asked >= 3, "the first failures are no loss"
    assert renewal.lost_claims == [claim]


async def test_a_renewal_that_breaks_stops_the_holder() -> None:
    hop, claim = await a_claim(0.03)
    renewer = Renewer(hop, RuntimeError("a bug"))

    async with renewing(renewer, [claim]) as renewal, asyncio.timeout(5):  # type: ignore[arg-type]
        await renewal.lost.wait()

    assert renewer.asked == 1
