"""What is known about a running experiment, collected from the REST API, and how it is shown."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flotilla.cli.health import finding_lines, one_line
from flotilla.cli.points import Point, Points
from flotilla.cli.stored import Source
from flotilla.client.asynchronous import AsyncClient
from flotilla.client.calls import PAGE
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView, MetricPoint
from flotilla.shared.schemas.service import ServiceKind, ServiceView, WorkState
from flotilla.shared.streams.ledger import Ledger

NOT_READY = frozenset({WorkState.IDLE, WorkState.STARTING})
SPEED_SECONDS = 60.0
"""Window of the shown speed."""
REWARD_STEPS = 5
"""Steps over which the shown training reward is averaged: single steps jump."""
FOLLOWED = (
    "reward/mean",
    "loss/total",
    "completion_tokens/mean",
    "lag/mean",
    "lag/max",
    "trainer/idle_ratio",
    "evaluation/accuracy",
    "evaluation/reward_mean",
    "evaluation/num_graded_rows",
    "evaluation/num_rows",
    "held_out/loss",
    "held_out/preference/accuracy",
)
"""Series shown to those who follow a run, while it trains and in the end: a tenth of those of a step. The others of an
evaluation are in its event."""
EVALUATED = "evaluation"
SHORTEST_SECONDS = 5.0
"""Before that much was seen, the rollouts' own momentary figure is shown."""


class HeldOut(NamedTuple):
    """What held-out problems came to: its name, and (step, version, value) in the order of steps."""

    name: str
    points: Sequence[Point]
    rows: Mapping[int, tuple[int, int]] = MappingProxyType({})
    """Rows with a grade, and all rows, by the step of an evaluation; none of a loss."""

    @property
    def newest(self) -> dict[str, str | float | None] | None:
        """The newest value, with its rows, in JSON; None where there is none."""
        if not self.points:
            return None
        step, _, value = self.points[-1]
        graded, asked = self.rows.get(step, (None, None))
        return {"metric": self.name, "value": value, "graded_rows": graded, "rows": asked}


def of_rows(rows: tuple[int, int] | None) -> str:
    """Write of how many rows a held-out value is, given those with a grade and all; nothing where that is not known."""
    if rows is None:
        return ""
    graded, asked = rows
    return f"of {asked} rows" if graded == asked else f"of {graded} of {asked} rows"


@dataclass
class Progress:
    """An experiment as far as it has been read; ``refresh`` reads on.

    Attributes:
        view: state, step, version.
        names: of the series that are read; empty: all.
        series: values by name: (step, version, value) in the order of steps.
        ledger: the train lane's ledger; the evaluation lane's where nothing is trained; None where it is not known.
        evaluation: the evaluation lane's ledger.
        services: those that work for it.
        answers: a right and a wrong one of the newest evaluation that ``read_evaluations`` has read.
    """

    view: ExperimentView
    names: Sequence[str] = ()
    series: dict[str, Points] = field(default_factory=dict)
    ledger: Ledger | None = None
    evaluation: Ledger = field(default_factory=Ledger)
    services: list[ServiceView] = field(default_factory=list)
    answers: Sequence[Mapping[str, Any]] = ()
    cursor: str | None = None
    monotonic: Callable[[], float] = time.monotonic
    _sampled: deque[tuple[float, int]] = field(default_factory=deque)
    _tokens_of: dict[str, int] = field(default_factory=dict)
    _num_evaluated: int = 0
    _last_event: int = 0

    def last(self, name: str) -> float | None:
        """Newest value of a series."""
        points = self.series.get(name)
        return points[-1][2] if points else None

    def mean_of_last(self, name: str, count: int) -> float | None:
        """Mean of the newest values of a series."""
        points = self.series.get(name, Points())[-count:]
        return sum(value for _, _, value in points) / len(points) if points else None

    def greatest(self, name: str) -> float | None:
        """Largest value of a series."""
        return max((value for _, _, value in self.series.get(name, Points())), default=None)

    @property
    def held_out(self) -> "HeldOut":
        """What held-out problems came to over steps: an accuracy where every reward was 0 or 1."""
        accuracy, reward = (self.series.get(f"evaluation/{name}", Points()) for name in ("accuracy", "reward_mean"))
        graded, asked = (
            {step: int(value) for step, _, value in self.series.get(f"evaluation/{name}", Points())}
            for name in ("num_graded_rows", "num_rows")
        )
        rows = {step: (graded[step], asked[step]) for step in graded if step in asked}
        is_accuracy = len(accuracy) >= len(reward)
        found = HeldOut("accuracy", accuracy, rows) if is_accuracy else HeldOut("reward", reward, rows)
        return found if found.points else HeldOut("loss", self.held_out_loss)

    @property
    def held_out_loss(self) -> Sequence[Point]:
        """The loss on held-out rows that hold answers, over steps."""
        return self.series.get("held_out/loss", Points())

    @property
    def learned(self) -> tuple[str, str]:
        """What training is followed by, and its series: the reward, or the loss where nothing is graded."""
        is_graded = "reward/mean" in self.series or "loss/total" not in self.series
        return ("reward", "reward/mean") if is_graded else ("loss", "loss/total")

    @property
    def waits_for(self) -> str:
        """Return why no step is made yet; empty once there is one, where a problem names it, or where it is unknown."""
        view = self.view
        if view.step > 0 or view.problem is not None:
            return ""
        if view.state is ExperimentState.STARTING:
            late = [each.kind.value for each in self.services if each.observed.state in NOT_READY]
            names = [f"{count} {kind}" for kind, count in Counter(sorted(late)).items()]
            return f"waits for {' and '.join(names)} to load" if names else "waits for services"
        if view.state is ExperimentState.RUNNING and view.total_steps and self.evaluation.outstanding:
            asked = self.evaluation.issued
            return f"evaluates before the first step: {_answered(self.evaluation)} of {asked} problems answered"
        return ""

    def tokens_per_second(self) -> float:
        """Tokens that the rollouts sample, over the last minute: between two bursts the speed is not zero."""
        now, total = self._sampled[-1] if self._sampled else (0.0, 0)
        since, before = self._sampled[0] if self._sampled else (0.0, 0)
        if now - since >= SHORTEST_SECONDS:
            return (total - before) / (now - since)
        return sum(service.observed.load.get("tokens_per_second", 0.0) for service in self._rollouts())

    def _rollouts(self) -> list[ServiceView]:
        return [service for service in self.services if service.kind is ServiceKind.ROLLOUT]

    def _count_sampled(self) -> None:
        """Add what the rollouts sampled since the last look; an engine that was started again counts from zero."""
        total = self._sampled[-1][1] if self._sampled else 0
        for service in self._rollouts():
            tokens = int(service.observed.load.get("generated_tokens", 0))
            before = self._tokens_of.get(service.service_id, tokens)
            total += tokens - before if tokens >= before else tokens
            self._tokens_of[service.service_id] = tokens
        now = self.monotonic()
        self._sampled.append((now, total))
        while now - self._sampled[0][0] > SPEED_SECONDS:
            self._sampled.popleft()

    async def refresh(self, client: Source) -> None:
        """Read what is new."""
        self.view = await client.experiment(self.view)
        ledgers = await client.ledger(self.view)
        if ledgers is not None:
            self.ledger = ledgers.train if self.view.total_steps else ledgers.evaluation
            self.evaluation = ledgers.evaluation
        mine = {service for ids in self.view.services.values() for service in ids}
        self.services = [service for service in await client.services() if service.service_id in mine]
        self._count_sampled()
        while True:
            page = await client.metric_page(self.view, self.names, after=self.cursor)
            for point in page.items:
                self._add(point)
            if page.next is not None:
                self.cursor = page.next
            if len(page.items) < PAGE:
                return

    @property
    def has_unread_evaluation(self) -> bool:
        """Whether an evaluation has ended whose event was not read."""
        return len(self.held_out.points) > self._num_evaluated

    async def read_evaluations(self, client: AsyncClient) -> None:
        """Read the events of evaluations that have ended since: all their series, and answers."""
        while self.has_unread_evaluation:
            page = await client.log_page(self.view.id, types=[EVALUATED], after=self._last_event)
            for event in page.items:
                self._last_event, self.answers = event.id, event.data.get("samples", ())
                for name, value in event.data["metrics"].items():
                    self.series.setdefault(name, Points()).put(event.data["step"], event.data["version"], value)
            if len(page.items) < PAGE:
                # Of one that ended meanwhile the event, too, has brought its point.
                self._num_evaluated = len(self.held_out.points)

    def _add(self, point: MetricPoint) -> None:
        # A replayed step replaces the crashed trainer's report of it.
        self.series.setdefault(point.name, Points()).put(point.step, point.version, point.value)


def number(value: float | None, form: str = ".3f") -> str:
    """Format a number that may not be there yet."""
    return "-" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Format seconds as m:ss."""
    return "-" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Pace:
    """Estimates the time until the last step from the steps that were seen being made.

    Those of before (of an earlier start, of the original of a fork, of before ``watch``) took no time that was seen.
    """

    def __init__(self, step: int) -> None:
        self._before = step
        self._since: float | None = None

    def seconds_left(self, view: ExperimentView, now: float) -> float | None:
        """Estimate from what the experiment has come to at a time; None until a step was seen."""
        if view.step >= view.total_steps:
            return 0.0
        self._before = min(self._before, view.step)  # Steps after the last checkpoint may be made again.
        num_seen = view.step - self._before
        if num_seen == 0:
            return None
        if self._since is None:
            self._since = now - 1.0
        return (now - self._since) / num_seen * (view.total_steps - view.step)


def _recent(progress: Progress) -> str:
    """Write the mean training reward, or loss, of the last steps, and of how many."""
    _, series = progress.learned
    value, count = progress.mean_of_last(series, REWARD_STEPS), len(progress.series.get(series, []))
    return "-" if value is None else f"{value:.3f} (last {min(count, REWARD_STEPS)})"


def _sampling(progress: Progress) -> str:
    if progress.learned[0] == "loss":
        return ""
    return f"lag {number(progress.last('lag/mean'), '.2f')} {progress.tokens_per_second():.0f} tok/s "


def _answered(ledger: Ledger) -> int:
    """Count the problems of an evaluation that need no more work."""
    return ledger.issued - ledger.outstanding


def _evaluation_line(progress: Progress, elapsed: float) -> str:
    """Write how far an experiment is that only evaluates."""
    view, ledger = progress.view, progress.ledger or Ledger()
    why = f"  {progress.waits_for}" if progress.waits_for else ""
    problem = f"  ! {view.problem.component}: {view.problem.cause}" if view.problem else ""
    return (
        f"{duration(elapsed)} {view.state:<9} {_answered(ledger)} of {ledger.issued} problems answered, "
        f"{progress.tokens_per_second():.0f} tok/s{why}{problem}"
    )


def _last_of(held_out: HeldOut) -> str:
    """Write the newest value, and of how many rows it is."""
    step, _, value = held_out.points[-1]
    return f"{number(value)} {of_rows(held_out.rows.get(step))}".rstrip()


def live_line(progress: Progress, elapsed: float, left: float | None) -> str:
    """One line of progress, for a terminal that cannot redraw."""
    view, ledger = progress.view, progress.ledger or Ledger()
    if not view.total_steps:
        return _evaluation_line(progress, elapsed)
    held_out = progress.held_out
    told = f"held-out {held_out.name} {_last_of(held_out)} " if held_out.points else ""
    waiting = ledger.waiting
    queues = f"{waiting.tasks}/{waiting.generated}/{waiting.scored}"
    problem = f"  ! {view.problem.component}: {view.problem.cause}" if view.problem else ""
    why = f"  {progress.waits_for}" if progress.waits_for else ""
    findings = [each for each in view.health if each.check not in problem]
    return (
        f"{duration(elapsed)} {view.state:<9} step {view.step}/{view.total_steps} version {view.policy_version} "
        f"{progress.learned[0]} {_recent(progress)} {told}{_sampling(progress)}"
        f"queues {queues} left {duration(left)}{why}{problem}{one_line(findings)}"
    )


def live_view(progress: Progress, elapsed: float, left: float | None) -> RenderableType:
    """The live view of a terminal."""
    view, ledger = progress.view, progress.ledger or Ledger()
    if not view.total_steps:
        return Text(_evaluation_line(progress, elapsed))
    held_out = progress.held_out
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(style="dim", justify="right")
        table.add_column(min_width=18)
    points = held_out.points
    shown = f"{_last_of(held_out)} (at the start {number(points[0][2])})" if points else "-"
    waiting, claimed = ledger.waiting, ledger.claimed
    table.add_row(
        progress.learned[0],
        _recent(progress),
        f"held-out {held_out.name}",
        shown,
        "completion",
        f"{number(progress.last('completion_tokens/mean'), '.1f')} tokens",
    )
    table.add_row(
        "lag",
        f"{number(progress.last('lag/mean'), '.2f')} mean, {number(progress.last('lag/max'), '.0f')} max",
        "speed",
        f"{progress.tokens_per_second():.0f} tokens/s",
        "trainer waits",
        number(progress.last("trainer/idle_ratio"), ".0%"),
    )
    table.add_row(
        "queues",
        f"tasks {waiting.tasks}+{claimed.tasks}  generated {waiting.generated}+{claimed.generated}  "
        f"scored {waiting.scored}+{claimed.scored}",
        "groups",
        f"{ledger.issued} issued, {ledger.planned} planned, {ledger.trained} trained",
        "followed for",
        f"{duration(elapsed)}, about {duration(left)} left",
    )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"{view.name}", style="bold"),
        Text(str(view.state), style="green" if view.state is ExperimentState.RUNNING else "yellow"),
        Text(f"step {view.step}/{view.total_steps}"),
        ProgressBar(total=max(1, view.total_steps), completed=view.step, width=40),
        Text(f"version {view.policy_version}"),
    )
    parts: list[RenderableType] = [bar, table]
    if progress.waits_for:
        parts.append(Text(progress.waits_for))
    if view.problem is not None:
        parts.append(Text(f"{view.problem.component}: {view.problem.cause}", style="bold red"))
    parts += [Text("\n".join(finding_lines(finding)), style="yellow") for finding in view.health]
    return Group(*parts)
