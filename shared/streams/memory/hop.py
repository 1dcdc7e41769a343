"""Hops in memory. No call waits in the middle of a change, so each is atomic."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from flotilla.shared.errors import ClaimLost
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import (
    FENCED,
    HANDED_BACK,
    HANDED_OVER,
    MAX_LOST_BY_THE_LIVING,
    PLANNED,
    TOO_MANY_DELIVERIES,
    Claim,
    HopName,
    Renewal,
    Resolution,
    StreamsConfig,
    check_hop,
    counter_of,
    forwarded,
    handed_over,
    renewing,
)
from flotilla.shared.streams.memory.streams import MemoryStore
from flotilla.shared.streams.partials import Partials

POLL_SECONDS = 0.05
"""How often a waiting claimer looks whether a lease ended; everything else wakes it at once."""


class MemoryHop:
    """One stream of a lane, read by one consumer; see ``Hop``."""

    def __init__(self, store: MemoryStore, name: HopName, consumer: str, config: StreamsConfig) -> None:
        self.name = name
        self.consumer = consumer
        self.lease_seconds = config.lease_seconds
        self._store = store
        self._stream = store.streams[name]
        self._max_deliveries = config.max_deliveries
        self._max_partial_bytes = config.max_partial_bytes

    async def claim(self, count: int = 1, *, wait_seconds: float) -> list[Claim]:
        """See ``Hop.claim``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        while True:
            changed = self._store.changed
            if claims := self._claim_now(count):
                return claims
            remaining = deadline - loop.time()
            if remaining <= 0:
                return []
            await asyncio.wait([changed], timeout=min(remaining, POLL_SECONDS))

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """See ``Hop.renew``."""
        lost = [claim for claim in claims if not self._holds(claim)]
        self._lost_alive(*lost)
        for claim in claims:
            if claim not in lost:
                self._stream.give(claim.entry_id, self.consumer, deliveries=claim.deliveries)
        return lost

    def renewing(self, *claims: Claim) -> AbstractAsyncContextManager[Renewal]:
        """See ``Hop.renewing``."""
        return renewing(self, claims)

    async def forward(self, claim: Claim, group: Group) -> bool:
        """See ``Hop.forward``."""
        made = forwarded(claim, group, self.name)
        counter = f"tokens:{made.destination.value}"
        if not self._holds(claim):
            return self._is_done(claim, counter)
        self._store.streams[made.destination].append(made.header, made.body, made.grades)
        if made.destination is HopName.SCORED:
            self._store.share(made.header, made.body, made.grades)
        self._store.count(counter, made.header.token_count)
        self._finish(claim, counter)
        return True

    async def forward_many(self, results: Sequence[tuple[Claim, Group]]) -> list[bool]:
        """See ``Hop.forward_many``."""
        return [await self.forward(claim, group) for claim, group in results]

    async def resolve(self, claim: Claim, resolution: Resolution, reason: str) -> bool:
        """See ``Hop.resolve``."""
        counter = counter_of(resolution, reason)
        if not self._holds(claim):
            return self._is_done(claim, counter)
        self._store.outstanding.pop(claim.header.group_id, None)
        self._store.count_end(counter, claim.header.token_count)
        self._finish(claim, counter)
        return True

    async def resolve_many(self, claims: Sequence[Claim], resolution: Resolution, reason: str) -> list[bool]:
        """See ``Hop.resolve_many``."""
        return [await self.resolve(claim, resolution, reason) for claim in claims]

    async def hand_back(self, claim: Claim) -> bool:
        """See ``Hop.hand_back``."""
        if not self._holds(claim):
            return False
        self._stream.put_aside(claim.entry_id)
        self._store.wake()
        return True

    async def hand_over(self, claim: Claim, partials: Partials) -> bool:
        """See ``Hop.hand_over``."""
        header, payload = handed_over(claim, self.name, partials, self._max_partial_bytes)
        if self._store.done.get(claim.token) == HANDED_OVER:
            return True
        if not self._holds(claim):
            return False
        self._stream.replace(claim.entry_id, header, payload)
        self._stream.put_aside(claim.entry_id)
        self._store.done[claim.token] = HANDED_OVER
        self._store.wake()
        return True

    def _is_done(self, claim: Claim, counter: str) -> bool:
        """Whether the claim, which is held no more, ended so; else it was lost by a holder who lives."""
        if self._store.done.get(claim.token) == counter:
            return True
        self._lost_alive(claim)
        return False

    def _lost_alive(self, *claims: Claim) -> None:
        for claim in (each for each in claims if each.entry_id in self._stream.pending):
            self._stream.lost_alive[claim.entry_id].add(claim.token)

    def _is_tried_enough(self, entry_id: str) -> bool:
        deliveries, most = self._stream.pending[entry_id].deliveries, self._max_deliveries
        counted = deliveries - len(self._stream.lost_alive.get(entry_id, ()))
        return counted >= most or deliveries >= most * MAX_LOST_BY_THE_LIVING

    def _holds(self, claim: Claim) -> bool:
        check_hop(claim, self.name)
        return self._stream.holds(claim.entry_id, self.consumer, claim.deliveries)

    def _finish(self, claim: Claim, counter: str) -> None:
        self._stream.remove(claim.entry_id)
        self._store.done[claim.token] = counter
        self._store.wake()

    def _claim_now(self, count: int) -> list[Claim]:
        if self.name.next is not None and self._store.is_full(self.name.next):
            return []
        claims: list[Claim] = []
        for entry_id in self._free_again():
            if len(claims) == count:
                return claims
            if self._is_tried_enough(entry_id):
                self._give_up(entry_id)
            else:
                deliveries = self._stream.pending[entry_id].deliveries + 1
                self._stream.give(entry_id, self.consumer, deliveries=deliveries)
                claims.append(self._claim(entry_id, deliveries))
        is_again = bool(claims)
        # Like the server's twin: what was free again goes out alone, and first.
        while not is_again and len(claims) < count and (delivered := self._stream.deliver(self.consumer)) is not None:
            claims.append(self._claim(delivered, 1))
        return claims

    def _free_again(self) -> list[str]:
        handed_back = self._stream.held_by(HANDED_BACK)
        idle = self._stream.idle_for(self.lease_seconds)
        return list(dict.fromkeys(handed_back + idle))

    def _give_up(self, entry_id: str) -> None:
        header = self._stream.entries[entry_id].header
        self._store.outstanding.pop(header.group_id, None)
        self._stream.remove(entry_id)
        self._store.count_end(f"{Resolution.FAILED.value}:{TOO_MANY_DELIVERIES}", header.token_count)

    def _claim(self, entry_id: str, deliveries: int) -> Claim:
        entry = self._stream.entries[entry_id]
        return Claim(self.name, entry_id, entry.header, entry.payload, deliveries, self.consumer, entry.grades)


class MemoryTrainerHop(MemoryHop):
    """The scored hop of the trainer: its claims last until a later trainer takes over."""

    def _claim_now(self, count: int) -> list[Claim]:
        if self._store.trainer_owner != self.consumer:
            raise ClaimLost(FENCED)
        return super()._claim_now(count)

    def _free_again(self) -> list[str]:
        mine = {self.consumer, PLANNED}
        return [entry_id for entry_id, held in self._stream.in_order() if held.consumer not in mine]
