"""A run as a timeline that Chrome and Perfetto open: services as rows, the way of each group as a flow. Pure.

The format is the Trace Event Format in JSON: slices (``X``) on the rows of a process, instants (``i``), and flows
(``s``, ``t``, ``f``) that lead from slice to slice. Groups that overlap on a row are put on rows beside each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Required, TypedDict

GATEWAY, ROLLOUT, REWARD, TRAINER = 1, 2, 3, 4
PROCESSES: Final = {GATEWAY: "gateway", ROLLOUT: "rollout", REWARD: "reward", TRAINER: "trainer"}
ISSUES, PUBLICATIONS, EVALUATIONS, EVENTS = 1, 2, 3, 4
GATEWAY_ROWS: Final = {ISSUES: "issues", PUBLICATIONS: "publications", EVALUATIONS: "evaluations", EVENTS: "events"}
STEP_PARTS: Final = ("wait", "compute", "publish", "checkpoint")
"""Of a step, in their order."""
PUBLICATION_PARTS: Final = ("prepare", "transfer", "commit")
ISSUE_SECONDS: Final = 0.0005
"""A slice, since a flow begins at one; issuing takes no longer than that."""


Fact = str | int | float | bool | None


class TraceEvent(TypedDict, total=False):
    """An event of the format; times in seconds until the end, then in microseconds."""

    ph: Required[str]
    pid: Required[int]
    tid: Required[int]
    name: Required[str]
    ts: float
    dur: float
    args: Mapping[str, Fact]
    id: int
    cat: str
    bp: str
    s: str


class Timeline(TypedDict):
    """The whole document."""

    traceEvents: list[TraceEvent]
    displayTimeUnit: str
    otherData: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """When a group was where, in seconds since the epoch; None if not recorded.

    Attributes:
        kind: ``trained``, ``filtered``, ``dropped``, ``failed``, ``evaluation``.
        step: that trained it; None of what was not trained.
        ended: why it was filtered or dropped, or failed.
        generation_seconds, grading_seconds: until ``generated_at`` and ``graded_at``.
        reward: mean of its scored samples.
    """

    group_id: int
    kind: str
    step: int | None
    version: int
    issued_at: float
    generated_at: float | None
    generation_seconds: float
    graded_at: float | None
    grading_seconds: float
    ended: str | None = None
    reward: float | None = None
    num_samples: int = 0
    num_tokens: int = 0

    @property
    def flow(self) -> int:
        """Number of its flow: ids of evaluated groups are those of another lane."""
        return 2 * self.group_id + (self.kind == "evaluation")

    @property
    def name(self) -> str:
        """As it is called on the rows."""
        return f"{'evaluated group' if self.kind == 'evaluation' else 'group'} {self.group_id}"

    def facts(self) -> dict[str, Fact]:
        """Its tooltip."""
        facts: dict[str, Fact] = {"kind": self.kind, "step": self.step, "version": self.version, "ended": self.ended}
        facts |= {"reward": self.reward, "samples": self.num_samples, "tokens": self.num_tokens}
        return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step of the trainer, which ended at a time, and how many seconds each of ``STEP_PARTS`` took."""

    step: int
    version: int
    ended_at: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationTimes:
    """A publication, and how many seconds each of ``PUBLICATION_PARTS`` took, as far as that is known."""

    version: int
    phase: str
    announced_at: float
    ended_at: float
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """An event of the experiment's log; what lasted until then has ``seconds``."""

    type: str
    at: float
    data: Mapping[str, Any]


def timeline_of(
    groups: Sequence[GroupTimes],
    steps: Sequence[StepTimes],
    publications: Sequence[PublicationTimes],
    events: Sequence[Occurrence],
) -> Timeline:
    """Make the document.

    Returns:
        ``traceEvents`` with times in microseconds since the first of them, which ``otherData`` has in seconds since
        the epoch.
    """
    made = [*_of_steps(steps), *_of_groups(groups, steps), *_of_publications(publications), *_of_events(events)]
    began = min((each["ts"] for each in made), default=0.0)
    for each in made:
        each["ts"] = round((each["ts"] - began) * 1e6)
        if "dur" in each:
            each["dur"] = max(1, round(each["dur"] * 1e6))
    made.sort(key=lambda each: each["ts"])
    used = {(each["pid"], each["tid"]) for each in made}
    return {"traceEvents": [*_names(used), *made], "displayTimeUnit": "ms", "otherData": {"began": began}}


def _slice(
    pid: int, tid: int, name: str, at: float, seconds: float, facts: Mapping[str, Fact] | None = None
) -> TraceEvent:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at, "dur": max(0.0, seconds), "args": facts or {}}


def _flow(phase: str, group: GroupTimes, pid: int, tid: int, at: float) -> TraceEvent:
    made: TraceEvent = {"ph": phase, "pid": pid, "tid": tid, "name": group.name, "cat": "group", "id": group.flow}
    made["ts"] = at
    if phase == "f":
        made["bp"] = "e"
    return made


def _of_groups(groups: Sequence[GroupTimes], steps: Sequence[StepTimes]) -> Iterator[TraceEvent]:
    """Make the slices of each group, and the flow through them; one without recorded times is only issued."""
    computed_at = {each.step: _begin(each) + each.seconds.get("wait", 0.0) for each in steps}
    sampled, graded = _Rows(ROLLOUT), _Rows(REWARD)
    ordered = sorted(groups, key=lambda each: (each.generated_at or 0.0) - each.generation_seconds)
    for each in ordered:
        name, facts = each.name, each.facts()
        yield _slice(GATEWAY, ISSUES, name, each.issued_at, ISSUE_SECONDS, facts)
        stops = [(GATEWAY, ISSUES, each.issued_at)]
        for rows, ended_at, seconds in (
            (sampled, each.generated_at, each.generation_seconds),
            (graded, each.graded_at, each.grading_seconds),
        ):
            if ended_at is not None:
                at = max(each.issued_at, ended_at - seconds)
                row = rows.take(at, ended_at)
                yield _slice(rows.pid, row, name, at, ended_at - at, facts)
                stops.append((rows.pid, row, at))
        if each.kind == "trained" and each.step in computed_at:
            stops.append((TRAINER, 1, computed_at[each.step]))
        for number, (pid, row, at) in enumerate(stops if len(stops) > 1 else ()):
            phase = "s" if number == 0 else "f" if number == len(stops) - 1 else "t"
            yield _flow(phase, each, pid, row, at)


class _Rows:
    """Rows of one process: a slice takes the first that is free."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._free_at: list[float] = []

    def take(self, begin: float, end: float) -> int:
        """Find a row for a slice; they come by their beginnings, more or less."""
        for number, free_at in enumerate(self._free_at):
            if free_at <= begin:
                self._free_at[number] = end
                return number + 1
        self._free_at.append(end)
        return len(self._free_at)


def _begin(step: StepTimes) -> float:
    return step.ended_at - sum(step.seconds.get(part, 0.0) for part in STEP_PARTS)


def _of_steps(steps: Iterable[StepTimes]) -> Iterator[TraceEvent]:
    for step in steps:
        at = _begin(step)
        yield _slice(TRAINER, 1, f"step {step.step}", at, step.ended_at - at, {"version": step.version})
        for part in STEP_PARTS:
            if seconds := step.seconds.get(part, 0.0):
                yield _slice(TRAINER, 1, part, at, seconds)
                at += seconds


def _of_publications(publications: Iterable[PublicationTimes]) -> Iterator[TraceEvent]:
    for each in publications:
        at = each.announced_at
        yield _slice(GATEWAY, PUBLICATIONS, f"version {each.version}", at, each.ended_at - at, {"phase": each.phase})
        for part in PUBLICATION_PARTS:
            # Rollouts switch after the commit is recorded: that part may end later than the publication.
            if seconds := min(each.seconds.get(part, 0.0), max(0.0, each.ended_at - at)):
                yield _slice(GATEWAY, PUBLICATIONS, part, at, seconds, {"whole_seconds": each.seconds[part]})
                at += seconds


def _of_events(events: Iterable[Occurrence]) -> Iterator[TraceEvent]:
    for each in events:
        if each.type == "evaluation":
            seconds = float(each.data["seconds"])
            facts = {"accuracy": each.data["metrics"].get("evaluation/accuracy")}
            name = f"evaluation of version {each.data['version']}"
            yield _slice(GATEWAY, EVALUATIONS, name, each.at - seconds, seconds, facts)
        elif not each.type.startswith("publication_"):
            facts = {name: value for name, value in each.data.items() if isinstance(value, str | int | float)}
            yield {
                "ph": "i", "s": "p", "pid": GATEWAY, "tid": EVENTS, "name": each.type, "ts": each.at, "args": facts,
            }  # fmt: skip


def _names(used: set[tuple[int, int]]) -> Iterator[TraceEvent]:
    for pid in sorted({pid for pid, _ in used}):
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": PROCESSES[pid]}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for pid, tid in sorted(used):
        name = GATEWAY_ROWS[tid] if pid == GATEWAY else "steps" if pid == TRAINER else f"groups {tid}"
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
