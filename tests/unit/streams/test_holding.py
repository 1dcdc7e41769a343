"""What a holder learns while the server is unavailable, and how claims that are lost are told."""

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.shared.errors import ClaimLost, Unavailable
from flotilla.shared.streams import holding as holding_module
from flotilla.shared.streams.holding import LostClaims, holding
from flotilla.shared.streams.hop import Claim, HopName, StreamsConfig, renewing
from flotilla.shared.streams.memory.hop import MemoryHop
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_task


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


async def test_a_claim_counts_as_held_until_the_server_says_otherwise() -> None:
    """However long it is absent: it gives the claim to nobody, and work in hand is not thrown away."""
    hop, claim = await a_claim(0.03)
    renewer = Renewer(hop, Unavailable("no server"))

    async with renewing(renewer, [claim]) as renewal, asyncio.timeout(5):  # type: ignore[arg-type]
        while renewer.asked < 12:
            await asyncio.sleep(0.005)
        assert not renewal.lost.is_set()
        (other,) = await hop.claim(wait_seconds=1)
        assert other.entry_id == claim.entry_id
        with pytest.raises(ClaimLost):
            async with holding(hop, claim):
                await asyncio.Event().wait()


async def test_a_claim_is_held_without_a_task_until_it_is_to_be_renewed() -> None:
    hop, claim = await a_claim(0.03)
    before = asyncio.all_tasks()

    async with holding(hop, claim):
        assert asyncio.all_tasks() == before
        async with asyncio.timeout(5):
            while asyncio.all_tasks() == before:
                await asyncio.sleep(0.001)

    assert asyncio.all_tasks() == before


async def test_a_renewal_that_breaks_stops_the_holder() -> None:
    hop, claim = await a_claim(0.03)
    renewer = Renewer(hop, RuntimeError("a bug"))

    async with renewing(renewer, [claim]) as renewal, asyncio.timeout(5):  # type: ignore[arg-type]
        await renewal.lost.wait()

    assert renewer.asked == 1


async def test_claims_that_are_lost_together_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holding_module, "TOGETHER_SECONDS", 0.01)
    lost = LostClaims("claims were lost")
    entries: list[Any] = [SimpleNamespace(entry_id=f"{number}-0") for number in range(167)]

    with caplog.at_level(logging.INFO):
        for entry in entries:
            lost.add(entry)
        while not caplog.records:
            await asyncio.sleep(0.001)
        lost.add(entries[0])
        while len(caplog.records) < 2:
            await asyncio.sleep(0.001)

    first, second = [vars(record) for record in caplog.records]
    assert (first["msg"], first["claims"], first["first"], first["last"]) == ("claims were lost", 167, "0-0", "166-0")
    assert second["claims"] == 1
