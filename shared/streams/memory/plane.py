"""The in-memory twin of the data plane: one process, no server, the same rules.

Time comes from a clock that tests may move.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import consumer_name
from flotilla.shared.streams.keys import HANDED_BACK, LEASED, HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.mailbox import KEPT_SECONDS, Delivery, Expected
from flotilla.shared.streams.memory.admission import MemoryAdmission
from flotilla.shared.streams.memory.hop import MemoryHop, MemoryTrainerHop
from flotilla.shared.streams.memory.streams import Clock, MemoryStore
from flotilla.shared.streams.memory.trainer import MemoryTrainerQueue
from flotilla.shared.streams.settings import StreamsConfig


class MemoryDataPlane:
    """One lane of one experiment, held by this object; its hops share it."""

    def __init__(
        self, lane: Lane = Lane.TRAIN, config: StreamsConfig | None = None, *, clock: Clock = time.monotonic
    ) -> None:
        self._lane = lane
        self._config = config or StreamsConfig()
        self._store = MemoryStore(clock)
        self.admission = MemoryAdmission(self._store)
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
