"""The in-memory twin of the data plane: one process, no server, the same rules.

Time comes from a clock that tests may move.
"""

import time
from collections.abc import Collection

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import consumer_name
from flotilla.shared.streams.keys import HANDED_BACK, LEASED, HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.admission import MemoryAdmission
from flotilla.shared.streams.memory.hop import MemoryHop, MemoryTrainerHop
from flotilla.shared.streams.memory.mailbox import MemoryMailbox
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
