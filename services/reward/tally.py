"""What a reward service has graded, as it reports it for the training-health checks: counts, and samples for people.

Answers that nearly repeat each other have other words here and there, and the same text otherwise. Of each text a
sketch is kept: the smallest hashes of its runs of three words. The share that two sketches have in
common estimates the share of runs that the texts have in common.
"""

import secrets
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import fsum
from operator import eq

from flotilla.services.reward.audit import Audit
from flotilla.shared.schemas.health import (
    LONGEST_TEXT,
    LONGEST_WORDS,
    MOST_AUDITED,
    MOST_OUTCOMES,
    MOST_SOURCES,
    GraderReport,
    GradingReport,
    RowOutcome,
    SampleExcerpt,
    SourceReport,
)
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory

RUN_WORDS = 3
SKETCH = 64
LONGEST_SKETCHED = 2000
"""Characters from the end: where an answer was led to. It bounds the time, about a millisecond for each text."""
FEWEST_WORDS = 20
"""A short answer to an easy question is what everybody says."""
MOST_MEMBERS = 32
"""Of a group that are compared, each with each: nothing else is graded meanwhile."""
ALIKE = 0.8
"""Share of common runs from which on two texts are alike."""

Sketch = frozenset[int]


def sketch_of(text: str) -> Sketch | None:
    """Sketch a text; None if it is too short to tell."""
    words = text[-LONGEST_SKETCHED:].split()
    if len(words) < FEWEST_WORDS:
        return None
    # Each run is a part of all words joined, without the space behind it: to join and encode each takes twice as long.
    joined = " ".join(words)
    encoded = joined.encode()
    sizes = map(len, words if len(encoded) == len(joined) else [word.encode() for word in words])
    starts = [*accumulate(sizes, lambda start, size: start + size + 1, initial=0)]
    runs = {zlib.crc32(encoded[start : end - 1]) for start, end in zip(starts, starts[RUN_WORDS:], strict=False)}
    return frozenset(sorted(runs)[:SKETCH])


def likeness(first: Sketch, second: Sketch) -> float:
    """Estimate the Jaccard index of two texts' runs: 0 to 1.

    Source: Broder, On the Resemblance and Containment of Documents, SEQUENCES 1997.
    """
    smallest = sorted(first | second)[:SKETCH]
    return sum(each in first and each in second for each in smallest) / len(smallest)


def are_alike(first: Sketch, second: Sketch) -> bool:
    """Return whether two texts are alike."""
    # What they share of the smallest hashes is at most what they share at all: of most pairs that is enough to know.
    return len(first & second) >= ALIKE * max(len(first), len(second)) and likeness(first, second) >= ALIKE


def alike_pair(texts: Sequence[str]) -> tuple[int, int] | None:
    """Find two members that are alike, where most members of a group are like another; None where they are not.

    Args:
        texts: of a group's members; the first ``MOST_MEMBERS`` represent all, since which member comes first says
            nothing of it.
    """
    texts = texts[:MOST_MEMBERS]
    sketches: list[Sketch | None] = []
    alike: list[tuple[int, int]] = []
    for place, text in enumerate(texts):
        if 2 * (place - 1 - len(alike)) >= len(texts) - 1:
            return None  # whatever the others are
        sketch = sketch_of(text)
        earlier = (at for at, other in enumerate(sketches) if sketch and other and are_alike(sketch, other))
        if (found := next(earlier, None)) is not None:
            alike.append((found, place))
        sketches.append(sketch)
    return alike[0] if len(texts) > 1 and len(alike) > (len(texts) - 1) / 2 else None


LABEL_WORDS = ("label",)
"""The verifiers' messages for errors caused by a label."""
MIDDLE = " [...] "


@dataclass
class GradingTally:
    """The counts of one session; see ``GradingReport`` for their meaning."""

    session: str = field(default_factory=lambda: secrets.token_hex(4))
    counts: dict[str, int] = field(default_factory=dict)
    last_reward: float | None = None
    highest_reward: float | None = None
    lowest_reward: float | None = None
    last_error: str | None = None
    last_ungraded: SampleExcerpt | None = None
    audited_groups: int = 0
    failed_audits: int = 0
    audit_disagreement: float = 0.0
    audit_higher: float = 0.0
    audit_missing: float = 0.0
    last_audit_error: str | None = None
    keeps_outcomes: bool = False
    """Whether the results of each row are needed."""
    _outcomes: deque[RowOutcome] = field(default_factory=lambda: deque(maxlen=MOST_OUTCOMES))
    _num_outcomes: int = 0
    _newest: tuple[SampleExcerpt, ...] = ()
    _audited: tuple[SampleExcerpt, ...] = ()
    _alike: tuple[SampleExcerpt, ...] = ()
    _sources: dict[str, SourceReport] = field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        """Groups graded so far."""
        return self.counts.get("groups", 0)

    def add(self, group: Group, *, is_filtered: bool) -> None:
        """Count a graded group, before anything is shaped or masked.

        Args:
            group: with its grades.
            is_filtered: whether it is filtered since it teaches nothing.
        """
        rewards = group.rewards()
        is_flat = len(rewards) > 1 and max(rewards) == min(rewards)
        self._count("groups")
        self._count("flat_groups", is_flat)
        texts = {tuple(turn.text for turn in each.turns) or (each.text,) for each in group.trajectories}
        self._count("identical_groups", len(texts) == 1 < len(group.trajectories))
        pair = alike_pair([trajectory.text for trajectory in group.trajectories])
        self._count("alike_groups", pair is not None)
        if pair is not None:
            self._alike = tuple(excerpt(group, group.trajectories[member]) for member in pair)
        self._count("filtered_groups", is_filtered)
        self._count("signalless_groups", is_flat or is_filtered)
        self._add_samples(group.trajectories)
        ungraded = [trajectory for trajectory in group.trajectories if trajectory.reward is None]
        if ungraded:
            self.last_ungraded = excerpt(group, ungraded[-1])
        self._keep(group)
        self._add_source(group, teaches_nothing=is_flat or is_filtered)
        if self.keeps_outcomes and rewards:
            self._num_outcomes += 1
            mean = fsum(rewards) / len(rewards)
            self._outcomes.append(RowOutcome(number=self._num_outcomes, row=group.task.row, reward=mean))

    def add_audit(self, group: Group, audit: Audit) -> None:
        """Count the second grade of a group that was sent on."""
        self.failed_audits += audit.has_failed
        self.audit_missing += audit.missing
        if audit.why_missing is not None:
            self.last_audit_error = audit.why_missing[:LONGEST_WORDS]
        if not audit.num_compared:
            return
        self.audited_groups += 1
        self.audit_disagreement += audit.disagreement
        self.audit_higher += audit.higher
        for member, second in audit.differing[:1]:
            shown = excerpt(group, group.trajectories[member]).model_copy(update={"audit_reward": second})
            self._audited = (*self._audited, shown)[-MOST_AUDITED:]

    def _add_samples(self, members: Sequence[Trajectory]) -> None:
        self._count("samples", len(members))
        self._count("truncated", sum(each.finish_reason.is_truncation for each in members))
        self._count("empty", sum(map(_is_empty, members)))
        self._count("answered", sum(each.answer is not None for each in members))
        for failed in members:
            if failed.status is GradeStatus.ERROR:
                self._count("errors")
                self.last_error = (failed.reason or "")[:LONGEST_WORDS]
                self._count("label_errors", any(word in self.last_error for word in LABEL_WORDS))
        rewards = [each.reward for each in members if each.reward is not None]
        if not rewards:
            return
        self._count("scored", len(rewards))
        self._count("repeated", sum(map(eq, rewards, [self.last_reward, *rewards])))
        self.last_reward = rewards[-1]
        self.highest_reward = max(rewards if self.highest_reward is None else [self.highest_reward, *rewards])
        self.lowest_reward = min(rewards if self.lowest_reward is None else [self.lowest_reward, *rewards])

    def _add_source(self, group: Group, *, teaches_nothing: bool) -> None:
        name = group.task.data_source
        if name is None or (name not in self._sources and len(self._sources) >= MOST_SOURCES):
            return
        known = self._sources.get(name, SourceReport())
        self._sources[name] = SourceReport(
            groups=known.groups + 1,
            signalless_groups=known.signalless_groups + teaches_nothing,
            sample=excerpt(group, group.trajectories[0]) if teaches_nothing else known.sample,
        )

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def _keep(self, group: Group) -> None:
        """Keep the best and the worst of the newest group, or one of the last two groups where all are alike."""
        ranked = sorted(group.trajectories, key=lambda t: t.reward if t.reward is not None else float("-inf"))
        worst, best = excerpt(group, ranked[0]), excerpt(group, ranked[-1])
        self._newest = (best, worst) if best.reward != worst.reward else (*self._newest[-1:], worst)

    def report(self, graders: Mapping[str, GraderReport] | None = None) -> GradingReport:
        """Make what is reported."""
        return GradingReport(
            session=self.session,
            last_reward=self.last_reward,
            highest_reward=self.highest_reward,
            lowest_reward=self.lowest_reward,
            last_error=self.last_error,
            samples_seen=self._newest,
            ungraded_sample=self.last_ungraded,
            audited_groups=self.audited_groups,
            failed_audits=self.failed_audits,
            audit_disagreement=self.audit_disagreement,
            audit_higher=self.audit_higher,
            audit_missing=self.audit_missing,
            last_audit_error=self.last_audit_error,
            audited_samples=self._audited,
            alike_samples=self._alike,
            graders=graders or {},
            sources=dict(self._sources),
            outcomes=tuple(self._outcomes),
            **self.counts,
        )


def _is_empty(trajectory: Trajectory) -> bool:
    return not trajectory.text.strip() and not any(turn.text.strip() for turn in trajectory.turns)


def excerpt(group: Group, trajectory: Trajectory) -> SampleExcerpt:
    """Cut a sample for people: beginning and end of prompt and completion."""
    label = group.task.label
    return SampleExcerpt(
        prompt=_cut(group.prompt),
        completion=_cut(trajectory.text),
        label=None if label is None else label[:LONGEST_WORDS],
        answer=None if trajectory.answer is None else trajectory.answer[:LONGEST_WORDS],
        reward=trajectory.reward,
        reason=None if trajectory.reason is None else trajectory.reason[:LONGEST_WORDS],
        finish_reason=trajectory.finish_reason.value,
    )


def _cut(text: str) -> str:
    text = text if text.isascii() else text.encode("utf-8", "replace").decode()
    half = (LONGEST_TEXT - len(MIDDLE)) // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]}{MIDDLE}{text[-half:]}"
