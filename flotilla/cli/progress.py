"""What is known about a running experiment, collected from the REST API, and how it is shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shared.client import GatewayClient
from shared.schemas.experiment import ExperimentState, ExperimentView, MetricPoint, Page

PAGE = 1000


@dataclass
class Progress:
    """An experiment as far as it has been read; ``refresh`` reads on.

    Attributes:
        view: state, step, version.
        series: values by name: (step, version, value) in the order of steps.
        ledger: the train lane's ledger.
        services: those that work for it.
    """

    view: ExperimentView
    series: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    services: list[Mapping[str, Any]] = field(default_factory=list)
    cursor: str | None = None

    def last(self, name: str) -> float | None:
        """Newest value of a series."""
        points = self.series.get(name)
        return points[-1][2] if points else None

    def mean_of_last(self, name: str, count: int) -> float | None:
        """Mean of the newest values of a series."""
        points = self.series.get(name, [])[-count:]
        return sum(value for _, _, value in points) / len(points) if points else None

    def greatest(self, name: str) -> float | None:
        """Largest value of a series."""
        return max((value for _, _, value in self.series.get(name, [])), default=None)

    @property
    def accuracy(self) -> list[tuple[int, int, float]]:
        """Held-out accuracy over steps."""
        return self.series.get("evaluation/accuracy", [])

    def tokens_per_second(self) -> float:
        """Tokens that the rollouts sample now."""
        return sum(
            float(service["observed"]["load"].get("tokens_per_second", 0.0))
            for service in self.services
            if service["kind"] == "rollout"
        )

    async def refresh(self, client: GatewayClient) -> None:
        """Read what is new."""
        path = f"/v1/experiments/{self.view.id}"
        self.view = ExperimentView.model_validate(await client.call("GET", path))
        self.ledger = (await client.call("GET", f"{path}/ledger"))["train"]
        everyone = Page.model_validate(await client.call("GET", "/v1/services", params={"limit": PAGE})).items
        mine = {service for ids in self.view.services.values() for service in ids}
        self.services = [service for service in everyone if service["service_id"] in mine]
        while True:
            query = {"after": self.cursor, "limit": PAGE}
            page = Page.model_validate(await client.call("GET", f"{path}/metrics", params=query))
            for item in page.items:
                point = MetricPoint.model_validate({key: item[key] for key in MetricPoint.model_fields if key in item})
                self._add(point)
            if page.next is not None:
                self.cursor = page.next
            if len(page.items) < PAGE:
                return

    def _add(self, point: MetricPoint) -> None:
        points = self.series.setdefault(point.name, [])
        # A replayed step replaces what the crashed trainer had said of it.
        while points and points[-1][0] >= point.step:
            points.pop()
        points.append((point.step, point.version, point.value))


def number(value: float | None, form: str = ".3f") -> str:
    """Format a number that may not be there yet."""
    return "-" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Format seconds as m:ss."""
    return "-" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def seconds_left(progress: Progress, seconds_since_first_step: float | None) -> float | None:
    """Estimate the time until the last step from the pace so far."""
    step = progress.view.step
    if not step or not seconds_since_first_step:
        return None
    return seconds_since_first_step / step * (progress.view.total_steps - step)


def live_line(progress: Progress, elapsed: float, left: float | None) -> str:
    """One line of progress, for a terminal that cannot redraw."""
    view, ledger = progress.view, progress.ledger
    accuracy = progress.accuracy[-1][2] if progress.accuracy else None
    waiting = ledger.get("waiting", {})
    queues = "/".join(str(waiting.get(hop, 0)) for hop in ("tasks", "generated", "scored"))
    problem = f"  ! {view.problem.component}: {view.problem.cause}" if view.problem else ""
    return (
        f"{duration(elapsed)} {view.state:<9} step {view.step}/{view.total_steps} version {view.policy_version} "
        f"reward {number(progress.mean_of_last('reward/mean', 5))} held-out {number(accuracy)} "
        f"lag {number(progress.last('lag/mean'), '.2f')} {progress.tokens_per_second():.0f} tok/s "
        f"queues {queues} left {duration(left)}{problem}"
    )


def live_view(progress: Progress, elapsed: float, left: float | None) -> RenderableType:
    """The live view of a terminal."""
    view, ledger = progress.view, progress.ledger
    accuracy = progress.accuracy
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(style="dim", justify="right")
        table.add_column(min_width=18)
    shown = f"{number(accuracy[-1][2])} (at the start {number(accuracy[0][2])})" if accuracy else "-"
    waiting, claimed = ledger.get("waiting", {}), ledger.get("claimed", {})
    table.add_row(
        "reward",
        number(progress.mean_of_last("reward/mean", 5)),
        "held-out accuracy",
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
        "  ".join(f"{hop} {waiting.get(hop, 0)}+{claimed.get(hop, 0)}" for hop in ("tasks", "generated", "scored")),
        "groups",
        f"{ledger.get('issued', 0)} issued, {ledger.get('planned', 0)} planned, {ledger.get('trained', 0)} trained",
        "time",
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
    if view.problem is not None:
        parts.append(Text(f"{view.problem.component}: {view.problem.cause}", style="bold red"))
    return Group(*parts)
