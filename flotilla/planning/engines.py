"""An engine and the groups that it has in hand, in simulated time."""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from flotilla.planning.fleet import Work
from flotilla.services.rollout.engines.admission import group_sizes


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    number: int
    work: Work
    min_version: int
    asked_at: float = 0.0
    left: int = 0
    tokens: Counter[int] = field(default_factory=Counter)
    """Of its answers, by the version that sampled them."""


class SimulatedEngine:
    """One rollout: groups in hand, answers that wait, answers that run."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.clock = 0.0
        """Tokens that an answer would have that has run from the beginning."""
        self.version = 0
        self.next_version: int | None = None
        self.waiting: deque[tuple[SimulatedGroup, deque[int]]] = deque()
        self.running: list[tuple[float, int, float, SimulatedGroup]] = []
        self.in_hand = 0
        self.idle_since = 0.0
        self.switches: list[tuple[float, int]] = [(0.0, 0)]
        self._entries = itertools.count()

    def admit(self) -> None:
        """Let answers join that have room."""
        ready = list(itertools.takewhile(lambda each: each[0].min_version <= self.version, self.waiting))
        free = self.slots - len(self.running)
        for size in group_sizes([len(lengths) for _, lengths in ready], free, self.slots):
            group, lengths = self.waiting[0]
            for _ in range(size):
                end = self.clock + max(1, lengths.popleft())
                heapq.heappush(self.running, (end, next(self._entries), self.clock, group))
            if not lengths:
                self.waiting.popleft()

    def switch(self) -> bool:
        """Serve the next version."""
        if self.next_version is None:
            return False
        self.version, self.next_version = self.next_version, None
        self.switches.append((self.clock, self.version))
        return True

    def ended(self) -> Iterator[tuple[SimulatedGroup, float]]:
        """Take the answers off that have all their tokens."""
        while self.running and self.running[0][0] <= self.clock + 1e-6:
            end, _, begin, group = heapq.heappop(self.running)
            yield group, end - begin
            self._count(group, begin, end)

    def _count(self, group: SimulatedGroup, begin: float, end: float) -> None:
        upper = end
        for at, version in reversed(self.switches):
            if count := round(upper - max(begin, at)):
                group.tokens[version] += max(0, count)
            upper = min(upper, at)
            if at <= begin:
                break
        if len(self.switches) == 1:
            return
        # What ran at a switch is forgotten with the last answer that did.
        oldest = min((each[2] for each in self.running), default=self.clock)
        while len(self.switches) > 1 and self.switches[1][0] <= oldest:
            del self.switches[0]
