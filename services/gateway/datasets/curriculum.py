"""Which row a group answers where rows are in pools by how well they were answered so far.

The state is a snapshot at a group: how often each row was asked, and its mean reward. From there on each group's row is
a function of the snapshot, the seed and the weights alone, so a gateway that comes back draws the same rows again.
Grades move rows only with the next snapshot, which is stored before a group is issued by it.

Reward services report how rows were answered lately; a curriculum takes each outcome once.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flotilla.shared.config.sections.curriculum import CurriculumConfig
from flotilla.shared.schemas.health import GradingReport, RowOutcome
from flotilla.shared.schemas.task import sample_seed

UNSEEN: Final = 0
"""The first pool; those of the spec follow."""
RECENT: Final = 4096
"""So many groups before a snapshot keep their rows with it, for those that are issued again."""
_POOLS: Final = 0x706F6F6C
_BEFORE: Final = 0x6265666F
_WHOLE: Final = float(1 << 63)

Weights = tuple[float, ...]
"""Of the unseen rows and of each pool."""


@dataclass(slots=True)
class Snapshot:
    """What is known of rows at a group.

    Attributes:
        group_id: the first group that is drawn by it.
        asked: how often each row was, of those that were.
        means: mean reward of the rows that have one.
        seen: newest outcome that was taken of each session of a reward service.
        drawn: rows of the ``RECENT`` groups before it, by group.
    """

    group_id: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    means: dict[int, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Describe it for ``of``."""
        rows = [[row, times, self.means.get(row)] for row, times in sorted(self.asked.items())]
        drawn = [list(pair) for pair in sorted(self.drawn.items())]
        return {"group_id": self.group_id, "rows": rows, "seen": dict(self.seen), "drawn": drawn}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "Snapshot":
        """Read what ``to_json`` described; empty: nothing is known."""
        rows = kept.get("rows", ())
        means = {int(row): float(mean) for row, _, mean in rows if mean is not None}
        asked = {int(row): int(times) for row, times, _ in rows}
        drawn = {int(group_id): int(row) for group_id, row in kept.get("drawn", ())}
        return cls(int(kept.get("group_id", 0)), asked, means, dict(kept.get("seen", {})), drawn)


class Curriculum:
    """Draws rows, group by group.

    Args:
        config: the pools.
        num_rows: of the dataset.
        seed: of the order.
        snapshot: where it continues.
        line: groups from which on weights hold, with these, oldest first; the first is group 0.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        num_rows: int,
        seed: int,
        snapshot: Snapshot,
        line: Sequence[tuple[int, Weights]],
    ) -> None:
        self._config, self._num_rows, self._seed = config, num_rows, seed
        self._snapshot = snapshot
        self._next = snapshot.group_id
        self._drawn = {group_id: row for group_id, row in snapshot.drawn.items() if row < num_rows}
        self.line = line
        self._pool = [UNSEEN] * num_rows
        self._asked = [0] * num_rows
        for row, times in snapshot.asked.items():
            if row < num_rows:
                self._asked[row] = times
        for row, mean in snapshot.means.items():
            if row < num_rows:
                self._pool[row] = 1 + config.pool_of(mean)
        self._heaps: list[list[tuple[int, int, int]]] = [[] for _ in range(1 + len(config.pools))]
        for row in range(num_rows):
            self._heaps[self._pool[row]].append(self._entry(row))
        for heap in self._heaps:
            heapq.heapify(heap)

    @property
    def sizes(self) -> dict[str, int]:
        """Count the rows of each pool."""
        names = ["unseen", *(pool.name for pool in self._config.pools)]
        return {name: self._pool.count(number) for number, name in enumerate(names)}

    def row(self, group_id: int) -> int:
        """Find the row of a group; those between it and the last one that was asked about are drawn, too.

        A group from before the snapshot has the row that it had, as far as that is kept; whatever it has, no row of
        another group changes by it.
        """
        if (found := self._drawn.get(group_id)) is not None:
            return found
        if group_id < self._next:
            return self._drawn_before(group_id)
        for number in range(self._next, group_id + 1):
            self._drawn[number] = self._draw(number)
        self._next = group_id + 1
        return self._drawn[group_id]

    def advanced(self, first: int, outcomes: Iterable[tuple[str, RowOutcome]]) -> Snapshot:
        """Make the snapshot at a group that was not issued, with what was graded meanwhile.

        Args:
            first: the group.
            outcomes: with the session of each; those that were taken before are left out.
        """
        if first > self._next:
            self.row(first - 1)
        asked = list(self._asked)
        for number, row in self._drawn.items():
            if number >= first:
                asked[row] -= 1
        means, seen, memory = dict(self._snapshot.means), dict(self._snapshot.seen), self._config.memory
        for session, outcome in outcomes:
            if outcome.number <= seen.get(session, 0) or outcome.row >= self._num_rows:
                continue
            seen[session] = outcome.number
            before = means.get(outcome.row)
            means[outcome.row] = outcome.reward if before is None else memory * before + (1 - memory) * outcome.reward
        known = {row: times for row, times in enumerate(asked) if times or row in means}
        drawn = {number: row for number, row in self._drawn.items() if first - RECENT <= number < first}
        return Snapshot(first, known, means, seen, drawn)

    def _draw(self, group_id: int) -> int:
        chosen = self._choose(group_id)
        row = heapq.heappop(self._heaps[chosen])[2]
        self._asked[row] += 1
        heapq.heappush(self._heaps[chosen], self._entry(row))
        return row

    def _drawn_before(self, group_id: int) -> int:
        """Find a row for a group whose own is not kept, by the snapshot alone."""
        chosen = self._choose(group_id)
        rows = [row for row, pool in enumerate(self._pool) if pool == chosen]
        return rows[sample_seed(sample_seed(self._seed, _BEFORE), group_id) % len(rows)]

    def _choose(self, group_id: int) -> int:
        """Choose the pool of a group."""
        _, weights = self.line[bisect_right(self.line, group_id, key=lambda each: each[0]) - 1]
        shares = [weight if heap else 0.0 for weight, heap in zip(weights, self._heaps, strict=True)]
        if not any(shares):
            # What has weight is empty: better any row than none.
            shares = [1.0 if heap else 0.0 for heap in self._heaps]
        at = sample_seed(sample_seed(self._seed, _POOLS), group_id) / _WHOLE * sum(shares)
        for number, share in enumerate(shares):
            if share and at < share:
                return number
            at -= share
        return max(number for number, share in enumerate(shares) if share)

    def _entry(self, row: int) -> tuple[int, int, int]:
        times = self._asked[row]
        return times, sample_seed(sample_seed(self._seed, times), row), row


MOST_SESSIONS = 64


class Outcomes:
    """The newest outcomes that each session of a reward service has reported and that are not consumed yet."""

    def __init__(self) -> None:
        self._by_session: dict[str, dict[int, RowOutcome]] = {}

    def add(self, report: GradingReport) -> None:
        """Keep what a report has."""
        if not report.outcomes:
            return
        if report.session not in self._by_session and len(self._by_session) >= MOST_SESSIONS:
            del self._by_session[next(iter(self._by_session))]
        self._by_session.setdefault(report.session, {}).update((each.number, each) for each in report.outcomes)

    def since(self, seen: Mapping[str, int]) -> list[tuple[str, RowOutcome]]:
        """List those after the ones that were taken, by session and in their order; forgets those before."""
        found = []
        for session, known in self._by_session.items():
            for number in [each for each in known if each <= seen.get(session, 0)]:
                del known[number]
            found += [(session, known[number]) for number in sorted(known)]
        return found
