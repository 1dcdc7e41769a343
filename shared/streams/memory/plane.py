"""The in-memory twin of the data plane and of admission to it: one process, no server, the same rules.

Time comes from a clock that tests may move.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from flotilla.shared.schemas.task import Lane, Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.admission import IssueOutcome, IssueResult, check_consecutive, check_finished
from flotilla.shared.streams.codec import (
    EntryHeader,
    encode_body,
    encode_grades,
    encode_task,
    group_header,
    task_header,
)
from flotilla.shared.streams.hop import (
    HANDED_BACK,
    LEASED,
    HopName,
    Resolution,
    StreamsConfig,
    consumer_name,
    counter_of,
)
from flotilla.shared.streams.ledger import Ledger, token_counters
from flotilla.shared.streams.mailbox import KEPT_SECONDS, Delivery, Expected
from flotilla.shared.streams.memory.hop import MemoryHop, MemoryTrainerHop
from flotilla.shared.streams.memory.streams import Clock, MemoryStore
from flotilla.shared.streams.memory.trainer import MemoryTrainerQueue
from flotilla.shared.streams.sharing import TRIMMED, SharedRead, Taken


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
        entries = [(task_header(each), encode_task(each), b"") for each in tasks]
        return self._issue(tasks, entries, HopName.TASKS, limit - self._store.used())

    async def issue_groups(self, groups: Sequence[Group], *, hop: HopName, limit: int) -> IssueResult:
        """See ``Admission.issue_groups``."""
        check_finished(groups, hop)
        entries = [(group_header(each), encode_body(each), encode_grades(each)) for each in groups]
        return self._issue([each.task for each in groups], entries, hop, limit - len(self._store.outstanding))

    def _issue(
        self, tasks: Sequence[Task], entries: Sequence[tuple[EntryHeader, bytes, bytes]], hop: HopName, room: int
    ) -> IssueResult:
        store = self._store
        if tasks and tasks[0].group_id != store.next_group_id:
            return IssueResult(IssueOutcome.CURSOR_MOVED, 0, store.next_group_id)
        if tasks and any(map(store.is_full, HopName)):
            return IssueResult(IssueOutcome.STREAM_FULL, 0, store.next_group_id)
        admitted = tasks[: max(0, room)]
        for task, (header, payload, grades) in zip(admitted, entries, strict=False):
            store.streams[hop].append(header, payload, grades)
            store.outstanding[task.group_id] = task.min_version
            for counter in token_counters(hop):
                store.count(counter, header.token_count)
        store.next_group_id += len(admitted)
        store.count("issued", len(admitted))
        store.wake()
        outcome = IssueOutcome.ISSUED if len(admitted) == len(tasks) else IssueOutcome.BUDGET_FULL
        return IssueResult(outcome, len(admitted), store.next_group_id)

    async def life(self) -> str:
        """See ``Admission.life``: here it never ends."""
        return ""

    async def take(self, read: SharedRead, *, limit: int, life: str = "") -> Taken:
        """See ``Admission.take``."""
        store = self._store
        if any(map(store.is_full, HopName)):
            return Taken(0, store.taken_through, True)
        fresh = [each for each in read.groups if each.number > store.taken_through]
        admitted = fresh[: max(0, limit - len(store.outstanding))]
        for each in admitted:
            self._miss(each.number - 1)
            store.streams[HopName.SCORED].append(each.header, each.payload, each.grades)
            store.outstanding[each.header.group_id] = max(each.header.oldest_version, 0)
            for counter in token_counters(HopName.SCORED):
                store.count(counter, each.header.token_count)
            store.count("issued")
            store.taken_through = each.number
        if len(admitted) == len(fresh):
            self._miss(read.reached)
        store.wake()
        return Taken(len(admitted), store.taken_through)

    def _miss(self, through: int) -> None:
        while self._store.taken_through < through:
            self._store.taken_through += 1
            self._store.count("issued")
            self._store.count_end(counter_of(Resolution.DROPPED, TRIMMED), 0)

    async def taken_through(self) -> int:
        """See ``Admission.taken_through``."""
        return self._store.taken_through

    async def begin_taking(self, after: int, life: str = "") -> None:
        """See ``Admission.begin_taking``."""
        self._store.taken_through = max(self._store.taken_through, after)

    async def come_from(self, group_id: int) -> None:
        """See ``Admission.come_from``."""
        self._store.lowest_to_come = max(self._store.lowest_to_come, group_id)

    async def next_group_id(self) -> int:
        """See ``Admission.next_group_id``."""
        return self._store.next_group_id

    async def begin_at(self, group_id: int) -> None:
        """See ``Admission.begin_at``."""
        self._store.next_group_id = self._store.next_group_id or group_id

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

    async def follow_ends(self, ended: Callable[[int], None]) -> None:
        """See ``Admission.follow_ends``."""
        self._store.followers.append(ended)
        try:
            ended(0)
            await asyncio.get_running_loop().create_future()
        finally:
            self._store.followers.remove(ended)

    async def outstanding_older_than(self, version: int) -> list[int]:
        """See ``Admission.outstanding_older_than``."""
        return sorted(group_id for group_id, issued_at in self._store.outstanding.items() if issued_at < version)


class MemorySharing:
    """See ``Sharing``."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def subscribe(self, name: str) -> int:
        """See ``Sharing.subscribe``."""
        return self._store.subscribers.setdefault(name, self._store.last_shared)

    async def read(self, after: int, count: int) -> SharedRead:
        """See ``Sharing.read``."""
        groups = tuple(each for number, each in self._store.shared.items() if number > after)[:count]
        last = groups[-1].number if len(groups) == count else self._store.last_shared
        return SharedRead(groups, last)

    async def life(self) -> str:
        """See ``Sharing.life``: here it never ends."""
        return ""

    async def confirm(self, name: str, number: int, life: str = "") -> None:
        """See ``Sharing.confirm``."""
        if name in self._store.subscribers:
            self._store.subscribers[name] = max(self._store.subscribers[name], number)
            self._store.trim_shared()

    async def unsubscribe(self, name: str) -> None:
        """See ``Sharing.unsubscribe``."""
        self._store.subscribers.pop(name, None)
        self._store.trim_shared()

    async def subscribers(self) -> dict[str, int]:
        """See ``Sharing.subscribers``."""
        return dict(self._store.subscribers)


class MemoryDataPlane:
    """One lane of one experiment, held by this object; its hops share it."""

    def __init__(
        self, lane: Lane = Lane.TRAIN, config: StreamsConfig | None = None, *, clock: Clock = time.monotonic
    ) -> None:
        self._lane = lane
        self._config = config or StreamsConfig()
        self._store = MemoryStore(clock)
        self.admission = MemoryAdmission(self._store)
        self.sharing = MemorySharing(self._store)
        self.mailbox = MemoryMailbox(clock)

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


@dataclass(slots=True)
class _Letter:
    key: str
    deadline: float
    is_accepted: bool = False
    answer: bytes | None = None


class MemoryMailbox:
    """See ``Mailbox``; ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._letters: dict[str, _Letter] = {}

    async def expect(self, name: str, *, key: str = "", seconds: float) -> Expected:
        """See ``Mailbox.expect``."""
        self._letters.setdefault(name, _Letter(key, self._clock() + seconds))
        found = await self.find(name)
        if found is None:
            self._letters[name] = _Letter(key, self._clock() + seconds)
            found = await self.find(name)
        assert found is not None
        return found

    async def accept(self, name: str) -> None:
        """See ``Mailbox.accept``."""
        if name in self._letters:
            self._letters[name].is_accepted = True

    async def find(self, name: str) -> Expected | None:
        """See ``Mailbox.find``."""
        letter = self._letters.get(name)
        if letter is None or self._clock() > letter.deadline + KEPT_SECONDS:
            return None
        left = max(0.0, letter.deadline - self._clock())
        return Expected(letter.key, left, letter.is_accepted, letter.answer)

    async def deliver(self, name: str, answer: bytes) -> Delivery:
        """See ``Mailbox.deliver``."""
        found = await self.find(name)
        if found is None:
            return Delivery.UNKNOWN
        if found.answer is not None:
            return Delivery.AGAIN if found.answer == answer else Delivery.OTHER
        if found.seconds_left <= 0:
            return Delivery.LATE
        self._letters[name].answer = answer
        return Delivery.TAKEN
