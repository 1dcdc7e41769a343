"""The in-memory twin of the data plane: one process, no server, the same rules.

Time comes from a clock that tests may move. No call waits in the middle of a change, so each is atomic.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager

from shared.errors import ClaimLost
from shared.schemas.task import Lane, Task
from shared.schemas.trajectory import Group
from shared.streams.admission import IssueOutcome, IssueResult, check_consecutive
from shared.streams.codec import encode_task, task_header
from shared.streams.hop import (
    FENCED,
    HANDED_OVER,
    TOO_MANY_DELIVERIES,
    Claim,
    Renewal,
    Resolution,
    check_hop,
    consumer_name,
    counter_of,
    forwarded,
    handed_over,
    renewing,
)
from shared.streams.keys import HANDED_BACK, LEASED, PLANNED, HopName
from shared.streams.ledger import Ledger
from shared.streams.memory.streams import Clock, MemoryStore
from shared.streams.memory.trainer import MemoryTrainerQueue
from shared.streams.partials import Partials
from shared.streams.settings import StreamsConfig

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
            return self._store.done.get(claim.token) == counter
        self._store.streams[made.destination].append(made.header, made.body, made.grades)
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
            return self._store.done.get(claim.token) == counter
        self._store.outstanding.pop(claim.header.group_id, None)
        self._store.count_end(counter, claim.header.token_count)
        self._finish(claim, counter)
        return True

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
            if self._stream.pending[entry_id].deliveries >= self._max_deliveries:
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


class MemoryAdmission:
    """Issues tasks; see ``Admission``."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def issue(self, task: Task, *, limit: int) -> IssueResult:
        """See ``Admission.issue``."""
        return await self.issue_many([task], limit=limit)

    async def issue_many(self, tasks: Sequence[Task], *, limit: int) -> IssueResult:
        """See ``Admission.issue_many``."""
        check_consecutive(tasks)
        store = self._store
        if tasks and tasks[0].group_id != store.next_group_id:
            return IssueResult(IssueOutcome.CURSOR_MOVED, 0, store.next_group_id)
        if any(map(store.is_full, HopName)):
            return IssueResult(IssueOutcome.STREAM_FULL, 0, store.next_group_id)
        admitted = tasks[: max(0, limit - store.used())]
        for task in admitted:
            store.streams[HopName.TASKS].append(task_header(task), encode_task(task))
            store.outstanding[task.group_id] = task.min_version
        store.next_group_id += len(admitted)
        store.count("issued", len(admitted))
        store.wake()
        outcome = IssueOutcome.ISSUED if len(admitted) == len(tasks) else IssueOutcome.BUDGET_FULL
        return IssueResult(outcome, len(admitted), store.next_group_id)

    async def next_group_id(self) -> int:
        """See ``Admission.next_group_id``."""
        return self._store.next_group_id

    async def published(self, version: int) -> bool:
        """See ``Admission.published``."""
        recorded = self._store.published_version
        if recorded is not None and recorded >= version:
            return False
        self._store.published_version = version
        for trained in [each for each in self._store.consumed if each < version]:
            del self._store.consumed[trained]
        return True

    async def published_version(self) -> int | None:
        """See ``Admission.published_version``."""
        return self._store.published_version

    async def bound(self, stream_bytes: int | None) -> dict[HopName, int]:
        """See ``Admission.bound``."""
        self._store.stream_bytes = stream_bytes
        return {hop: stream.size_bytes() for hop, stream in self._store.streams.items()}

    async def forget_consumers(self, idle_seconds: float) -> int:
        """See ``Admission.forget_consumers``: here a consumer that holds nothing leaves nothing behind."""
        return 0

    async def oldest_outstanding_version(self) -> int | None:
        """See ``Admission.oldest_outstanding_version``."""
        return min(self._store.outstanding.values(), default=None)

    async def outstanding_older_than(self, version: int) -> list[int]:
        """See ``Admission.outstanding_older_than``."""
        return sorted(group_id for group_id, issued_at in self._store.outstanding.items() if issued_at < version)


class MemoryDataPlane:
    """One lane of one experiment, held by this object; its hops share it."""

    def __init__(
        self, lane: Lane = Lane.TRAIN, config: StreamsConfig | None = None, *, clock: Clock = time.monotonic
    ) -> None:
        self._lane = lane
        self._config = config or StreamsConfig()
        self._store = MemoryStore(clock)
        self.admission = MemoryAdmission(self._store)

    def hop(self, name: HopName, service_id: str) -> MemoryHop:
        """See ``DataPlane.hop``."""
        if name is HopName.SCORED and self._lane is Lane.TRAIN:
            raise ValueError("the scored hop of training belongs to the trainer: use trainer()")
        return MemoryHop(self._store, name, consumer_name(service_id), self._config)

    def trainer(self, service_id: str) -> MemoryTrainerQueue:
        """See ``DataPlane.trainer``."""
        if self._lane is not Lane.TRAIN:
            raise ValueError("only the train lane has a trainer")
        hop = MemoryTrainerHop(self._store, HopName.SCORED, consumer_name(service_id), self._config)
        return MemoryTrainerQueue(self._store, hop)

    async def holders(self) -> set[str]:
        """See ``DataPlane.holders``."""
        pending = [held for hop in LEASED for held in self._store.streams[hop].pending.values()]
        return {held.consumer for held in pending} - {HANDED_BACK}

    async def release(self, consumers: Collection[str]) -> int:
        """See ``DataPlane.release``."""
        freed = 0
        for stream in (self._store.streams[hop] for hop in LEASED):
            for entry_id, held in list(stream.in_order()):
                if held.consumer in consumers:
                    stream.give(entry_id, HANDED_BACK, deliveries=held.deliveries)
                    freed += 1
        self._store.wake()
        return freed

    async def ledger(self) -> Ledger:
        """See ``DataPlane.ledger``."""
        return self._store.ledger()

    async def oldest_seconds(self) -> dict[HopName, float]:
        """See ``DataPlane.oldest_seconds``."""
        ages = {hop: stream.oldest_seconds() for hop, stream in self._store.streams.items()}
        return {hop: age for hop, age in ages.items() if age is not None}

    async def remove(self) -> None:
        """See ``DataPlane.remove``."""
        self._store.clear()
