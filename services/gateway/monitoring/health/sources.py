"""How much the groups of each data source have taught lately, and the check of one that teaches nothing any more."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flotilla.services.gateway.monitoring.health.evidence import Evidence, Facts, Seen, SourceCounts
from flotilla.shared.schemas.health import MOST_SOURCES, GradingReport, SampleExcerpt

MOST_PARTS: Final = 64
"""Parts of one data source's groups that are looked back at."""
PART_GROUPS: Final = 16
"""Reports with fewer groups are a part together: of a rare source each has one or two."""
MOST_GROUPS: Final = (MOST_PARTS - 1) * PART_GROUPS
"""Of one data source that are looked back at for certain."""


@dataclass(slots=True)
class _Source:
    parts: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MOST_PARTS))
    sample: SampleExcerpt | None = None


class SourceSeries:
    """The newest groups of each data source, as reward services report them."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, tuple[int, int]]] = {}
        self._sources: dict[str, _Source] = {}

    def clear(self) -> None:
        """Forget all groups; sessions that continue are counted from here."""
        self._sources.clear()

    def add(self, report: GradingReport) -> None:
        """Count what has come since the session's last report."""
        before = self._before.setdefault(report.session, {})
        for name, now in report.sources.items():
            groups, dead = before.get(name, (0, 0))
            before[name] = now.groups, now.signalless_groups
            if now.groups <= groups or (name not in self._sources and len(self._sources) >= MOST_SOURCES):
                continue
            source = self._sources.setdefault(name, _Source())
            _add(source.parts, now.groups - groups, now.signalless_groups - dead)
            source.sample = now.sample or source.sample

    def counts(self, wanted: int) -> dict[str, SourceCounts]:
        """Add up the newest groups of each source until there are so many."""
        return {name: _newest(source, wanted) for name, source in self._sources.items()}

    def to_window(self) -> dict[str, Any]:
        """Describe it as JSON, for ``restore``."""
        sources = {
            name: {
                "parts": [list(part) for part in source.parts],
                "sample": None if source.sample is None else source.sample.model_dump(mode="json"),
            }
            for name, source in self._sources.items()
        }
        return {"before": self._before, "sources": sources}

    def restore(self, kept: Mapping[str, Any], *, is_same_start: bool) -> None:
        """Continue where an earlier gateway was; see ``HealthWindow.restore``."""
        before = kept.get("before", {})
        self._before = {session: {k: (v[0], v[1]) for k, v in counts.items()} for session, counts in before.items()}
        for name, described in kept.get("sources", {}).items() if is_same_start else ():
            source = self._sources.setdefault(name, _Source())
            source.parts.extend((groups, dead) for groups, dead in described["parts"])
            sample = described["sample"]
            source.sample = None if sample is None else SampleExcerpt.model_validate(sample)


def groups_wanted(facts: Facts) -> int:
    """Count the groups of a data source that its check looks back at, however many others a step has."""
    return min(facts.thresholds.min_groups, MOST_GROUPS)


def _add(parts: deque[tuple[int, int]], groups: int, dead: int) -> None:
    if parts and parts[-1][0] < PART_GROUPS:
        before = parts.pop()
        groups, dead = groups + before[0], dead + before[1]
    parts.append((groups, dead))


def _newest(source: _Source, wanted: int) -> SourceCounts:
    groups = dead = 0
    for part in reversed(source.parts):
        if groups >= wanted:
            break
        groups, dead = groups + part[0], dead + part[1]
    return SourceCounts(groups, dead, source.sample)


def dead_source(evidence: Evidence) -> Seen | None:
    """See a data source whose groups teach nothing while those of another one do."""
    facts = evidence.facts
    if not facts.learns_from_rewards:
        return None
    share, wanted = facts.thresholds.signalless_share, groups_wanted(facts)
    taken = {name: each for name, each in evidence.sources.items() if name not in facts.left_out}
    teaching = {name for name, each in taken.items() if each.signalless_groups < share * each.groups}
    dead = {name: each for name, each in taken.items() if name not in teaching and each.groups >= wanted}
    if not dead or not teaching:
        return None
    name, counts = max(dead.items(), key=lambda each: each[1].groups)
    others = f"; so do those of {', '.join(sorted(set(dead) - {name}))}" if len(dead) > 1 else ""
    return Seen(
        f"{counts.signalless_groups} of the last {counts.groups} groups of the data source {name} taught nothing, "
        f"while other sources teach{others}",
        {"groups": float(counts.groups), "signalless_groups": float(counts.signalless_groups)},
        sample=counts.sample,
        subject=name,
    )
