"""Streams in memory with the server's semantics, for the in-memory twin of the data plane."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from flotilla.shared.streams.codec import EntryHeader
from flotilla.shared.streams.hop import HANDED_BACK, PLANNED, HopName
from flotilla.shared.streams.ledger import Ledger, length_field
from flotilla.shared.streams.plans import Plan
from flotilla.shared.streams.sharing import SharedGroup

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    entry_id: str
    header: EntryHeader
    payload: bytes
    grades: bytes
    added_at: float


@dataclass(slots=True)
class Pending:
    """The holder of a delivered entry, since when, and after how many deliveries."""

    consumer: str
    since: float
    deliveries: int


class MemoryStream:
    """Entries in order, and those of them that were delivered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_number = 1
        self.entries: dict[str, Entry] = {}
        self.undelivered: dict[str, None] = {}
        self.pending: dict[str, Pending] = {}
        self.lost_alive: defaultdict[str, set[str]] = defaultdict(set)
        """Tokens of claims that were lost by holders who lived, by entry."""

    def append(self, header: EntryHeader, payload: bytes, grades: bytes = b"") -> None:
        """Add an entry at the end."""
        entry = Entry(f"{self._next_number}-0", header, payload, grades, self._clock())
        self._next_number += 1
        self.entries[entry.entry_id] = entry
        self.undelivered[entry.entry_id] = None

    def deliver(self, consumer: str) -> str | None:
        """Deliver the first entry that never was; None if there is none."""
        entry_id = next(iter(self.undelivered), None)
        if entry_id is not None:
            del self.undelivered[entry_id]
            self.pending[entry_id] = Pending(consumer, self._clock(), 1)
        return entry_id

    def holds(self, entry_id: str, consumer: str, deliveries: int) -> bool:
        """Return whether the entry is pending for this consumer at this delivery count."""
        held = self.pending.get(entry_id)
        return held is not None and held.consumer == consumer and held.deliveries == deliveries

    def give(self, entry_id: str, consumer: str, *, deliveries: int) -> None:
        """Make a pending entry another consumer's, with a fresh idle time."""
        self.pending[entry_id] = Pending(consumer, self._clock(), deliveries)

    def put_aside(self, entry_id: str) -> None:
        """Hand a pending entry back; the delivery that ends so does not count."""
        self.give(entry_id, HANDED_BACK, deliveries=max(0, self.pending[entry_id].deliveries - 1))

    def replace(self, entry_id: str, header: EntryHeader, payload: bytes) -> None:
        """Give an entry another content; its place and age stay."""
        self.entries[entry_id] = replace(self.entries[entry_id], header=header, payload=payload)

    def held_by(self, consumer: str) -> list[str]:
        """List a consumer's pending entries in stream order."""
        return [entry_id for entry_id, held in self.in_order() if held.consumer == consumer]

    def idle_for(self, seconds: float) -> list[str]:
        """List pending entries that were not renewed for so long."""
        now = self._clock()
        return [entry_id for entry_id, held in self.in_order() if now - held.since >= seconds]

    def remove(self, entry_id: str) -> None:
        """Acknowledge and delete an entry."""
        self.pending.pop(entry_id, None)
        self.lost_alive.pop(entry_id, None)
        del self.entries[entry_id]

    def clear(self) -> None:
        """Forget all entries, but no id."""
        self.entries.clear()
        self.undelivered.clear()
        self.pending.clear()
        self.lost_alive.clear()

    def size_bytes(self) -> int:
        """Add up payloads and grades."""
        return sum(len(entry.payload) + len(entry.grades) for entry in self.entries.values())

    def depths(self) -> tuple[int, int]:
        """Count what waits and what is claimed; planned entries are neither."""
        handed_back = len(self.held_by(HANDED_BACK))
        planned = len(self.held_by(PLANNED))
        pending = len(self.pending)
        return len(self.entries) - pending + handed_back, pending - handed_back - planned

    def oldest_seconds(self) -> float | None:
        """Return how long ago the oldest entry came that is not planned; None without one."""
        planned = set(self.held_by(PLANNED))
        added = [entry.added_at for entry_id, entry in self.entries.items() if entry_id not in planned]
        return self._clock() - min(added) if added else None

    def in_order(self) -> Iterator[tuple[str, Pending]]:
        """Go through pending entries in stream order."""
        return iter(sorted(self.pending.items(), key=lambda item: int(item[0].partition("-")[0])))


@dataclass(slots=True)
class MemoryStore:
    """All that one lane keeps, as the server would."""

    clock: Clock
    counters: dict[str, int] = field(default_factory=dict)
    outstanding: dict[int, int] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    lineage: dict[int, Plan] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    next_group_id: int = 0
    published_version: int | None = None
    stream_bytes: int | None = None
    trainer_incarnation: int = 0
    trainer_owner: str | None = None
    rolled_back: tuple[object, tuple[int, int]] = (None, (0, 0))
    streams: dict[HopName, MemoryStream] = field(default_factory=dict)
    shared: dict[int, SharedGroup] = field(default_factory=dict)
    last_shared: int = 0
    subscribers: dict[str, int] = field(default_factory=dict)
    taken_through: int = 0
    lowest_to_come: int = 0

    followers: list[Callable[[int], None]] = field(default_factory=list)
    """Called when a group has ended."""

    _changed: "asyncio.Future[None] | None" = None

    def __post_init__(self) -> None:
        self.streams = {hop: MemoryStream(self.clock) for hop in HopName}

    @property
    def changed(self) -> "asyncio.Future[None]":
        """A future that ends at the next change that may free or add an entry."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def is_full(self, hop: HopName) -> bool:
        """Whether a stream takes more memory than it may."""
        return self.stream_bytes is not None and self.streams[hop].size_bytes() > self.stream_bytes

    def share(self, header: EntryHeader, payload: bytes, grades: bytes) -> None:
        """Offer a group to the subscribers."""
        if self.subscribers:
            self.last_shared += 1
            self.shared[self.last_shared] = SharedGroup(self.last_shared, header, payload, grades)
            self.trim_shared()

    def trim_shared(self) -> None:
        """Delete what all subscribers have taken and, of the rest, the oldest that exceed the memory."""
        lowest = min(self.subscribers.values(), default=self.last_shared)
        self.shared = {number: each for number, each in self.shared.items() if number > lowest}
        bound = self.stream_bytes
        while bound is not None and sum(len(e.payload) + len(e.grades) for e in self.shared.values()) > bound:
            for number in sorted(self.shared)[: math.ceil(len(self.shared) / 8)]:
                del self.shared[number]

    def wake(self) -> None:
        """End ``changed``."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    def clear(self) -> None:
        """Forget everything; hops that are open see empty streams."""
        for container in (self.counters, self.outstanding, self.consumed, self.plans, self.lineage, self.done):
            container.clear()
        for stream in self.streams.values():
            stream.clear()
        self.next_group_id, self.published_version = 0, None
        self.trainer_incarnation, self.trainer_owner = 0, None
        self.shared.clear()
        self.subscribers.clear()
        self.last_shared, self.taken_through, self.lowest_to_come = 0, 0, 0

    def count(self, counter: str, amount: int = 1) -> None:
        """Change a counter."""
        self.counters[counter] = self.counters.get(counter, 0) + amount

    def count_end(self, counter: str, tokens: int) -> None:
        """Count a group's end and, unless it was trained, its length."""
        self.count(counter)
        if ":" in counter:
            self.count(length_field(counter, tokens))
        for follower in self.followers:
            follower(1)

    def unconsume(self, version: int, count: int) -> None:
        """Take groups off those that were planned under a version and are covered by no publication yet."""
        left = self.consumed.get(version, 0) - count
        if left > 0:
            self.consumed[version] = left
        else:
            self.consumed.pop(version, None)

    def used(self) -> int:
        """Count what the budget bounds."""
        return len(self.outstanding) + sum(self.consumed.values())

    def ledger(self) -> Ledger:
        """Take a snapshot."""
        return Ledger.from_counters(
            self.counters,
            {hop: stream.depths() for hop, stream in self.streams.items()},
            outstanding=self.outstanding,
            consumed=sum(self.consumed.values()),
        )
