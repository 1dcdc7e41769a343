"""``flotilla report | compare``: what experiments have come to, as tables and pictures."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import JsonValue

from flotilla.cli.comparison import USUAL, ComparedSeries, ComparedSetting, compare_metrics, compare_specs, remarks
from flotilla.cli.gateway import ACT_SECONDS
from flotilla.cli.noise import (
    Difference,
    SeedsCompared,
    Setting,
    Spread,
    as_chosen,
    have_seeds,
    over_seeds,
    settings_of,
)
from flotilla.cli.output import new_console, short_path, table_of, write_json
from flotilla.cli.plots import write_comparison, write_plot
from flotilla.cli.progress import Progress
from flotilla.cli.right_and_wrong import read_last
from flotilla.cli.run_directory import FLEET
from flotilla.cli.stored import Source, StoredExperiments, open_source
from flotilla.cli.summary import show_summary, summarise
from flotilla.connection import FleetInfo
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.schemas.experiment import ExperimentView
from flotilla.shared.schemas.metric_names import check_names, is_pattern

PICTURES = (".png", ".pdf", ".svg")
NO_FLEET = "its fleet does not run now: no ledger, and nothing goes on"
NO_MATPLOTLIB = "no plot: matplotlib is not installed (pip install 'flotilla[plot]')"


async def report(arguments: argparse.Namespace) -> int:
    """Print the summary of an experiment, at work or ended, and plot it if that is asked for."""
    source, reference = open_source(arguments.gateway, Path(arguments.data), arguments.experiment)
    async with source as client:
        progress = Progress(await client.experiment(reference))
        await progress.refresh(client)
        checkpoints = await client.with_deadline(ACT_SECONDS).checkpoints(progress.view)
        is_stored = isinstance(client, StoredExperiments)
        logs = _logs_of(client, Path(arguments.data))
        samples = await read_last(client, progress)
    plot = _plot_path(arguments)
    is_drawn = plot is not None and write_plot(progress, plot)
    summary = summarise(
        progress,
        wall_seconds=_seconds(progress.view, is_stored=is_stored),
        checkpoints=checkpoints,
        logs=logs,
        plot=plot if is_drawn else None,
        samples=samples,
        run=_run_of(arguments.experiment),
    )
    if arguments.json:
        write_json(summary.document())
        return 0
    console = new_console()
    show_summary(console, summary, took=_took(progress.view, is_stored=is_stored))
    if is_stored and not progress.view.state.is_final:
        console.print(NO_FLEET, markup=False)
    if plot is not None and not is_drawn:
        console.print(NO_MATPLOTLIB, markup=False)
    return 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: that are compared.
        metrics: each at the last step that all have.
        settings: in which their specs differ.
        groups: runs that differ in their seeds alone.
        seeds: metrics over the seeds of each; empty where none has several.
        at_most: the step beyond which nothing is compared, if one was named.
    """

    runs: Sequence[Progress]
    metrics: Sequence[ComparedSeries]
    settings: Sequence[ComparedSetting]
    groups: Sequence[Setting]
    seeds: Sequence[SeedsCompared]
    at_most: int | None = None

    @classmethod
    def of(cls, runs: Sequence[Progress], asked: Sequence[str] = (), *, step: int | None = None) -> "Comparison":
        """Compare runs by the metrics that are asked for, or the usual ones."""
        named = [name for name in asked if not is_pattern(name)]
        metrics = compare_metrics(runs, asked or USUAL, step=step, named=named)
        specs = [run.view.spec for run in runs]
        groups = settings_of([as_chosen(run.view.spec, run.view.changes) for run in runs])
        seeds = over_seeds(metrics, groups) if have_seeds(groups) else []
        return cls(runs, metrics, compare_specs(specs), groups, seeds, step)

    def document(self) -> dict[str, JsonValue]:
        """Return all of it as JSON."""
        return {
            "experiments": [_facts(run.view) for run in self.runs],
            "metrics": [each._asdict() for each in self.metrics],
            "spec": [each._asdict() for each in self.settings],
            "seeds": _seeds_document(self.groups, self.seeds),
        }

    def show(self) -> None:
        """Print all of it."""
        letters = _show(self.runs, self.metrics, self.settings, at_most=self.at_most)
        if self.seeds:
            _show_seeds([" ".join(letters[place] for place in each.members) for each in self.groups], self.seeds)


async def compare(arguments: argparse.Namespace) -> int:
    """Show experiments side by side: metrics at equal steps, differences of their specs, and a plot.

    Raises:
        InvalidRequest: the same experiment was named twice.
    """
    runs: list[Progress] = []
    for named in (arguments.experiment, *arguments.others):
        source, reference = open_source(arguments.gateway, Path(arguments.data), named)
        async with source as client:
            runs.append(Progress(await client.experiment(reference)))
            await runs[-1].refresh(client)
    if len({run.view.id for run in runs}) < len(runs):
        raise InvalidRequest(f"name different experiments: {', '.join(run.view.id for run in runs)}")
    asked = arguments.metric or ()
    check_names(asked, {name for run in runs for name in run.series}, patterns=True)
    comparison = Comparison.of(runs, asked, step=arguments.step)
    plot = _plot_path(arguments)
    is_drawn = plot is not None and write_comparison({run.view.id: run for run in runs}, plot)
    if arguments.json:
        write_json({**comparison.document(), "plot": str(plot) if is_drawn else None})
        return 0
    comparison.show()
    if plot is not None:
        new_console().print(f"plot       {short_path(plot)}" if is_drawn else NO_MATPLOTLIB, markup=False)
    return 0


def _facts(view: ExperimentView) -> dict[str, JsonValue]:
    return view.model_dump(mode="json", include={"id", "name", "state", "step", "total_steps", "policy_version"})


def _show(
    runs: Sequence[Progress],
    metrics: Sequence[ComparedSeries],
    settings: Sequence[ComparedSetting],
    *,
    at_most: int | None,
) -> list[str]:
    """Print what was compared; return the letter of each run."""
    console = new_console()
    letters = [chr(ord("A") + index) if index < 26 else f"#{index + 1}" for index in range(len(runs))]
    for letter, run in zip(letters, runs, strict=True):
        view = run.view
        step = f"step {view.step}/{view.total_steps}, version {view.policy_version}"
        console.print(f"{letter}  {view.id}  {view.state}, {step}", markup=False)
        for remark in remarks(run, at_most=at_most):
            console.print(f"   {remark}", markup=False)
    rows = [
        (each.name, "last" if each.step is None else str(each.step), *map(_number, each.values)) for each in metrics
    ]
    if rows:
        console.print(table_of(("metric", "step", *letters), rows, whole=("metric",)))
    else:
        console.print("there is nothing to compare yet: none has a value of these metrics")
    if settings:
        cells = [(each.path, *map(_setting, each.values)) for each in settings]
        console.print(table_of(("setting", *letters), cells))
    else:
        console.print("their specs are the same")
    return letters


def _show_seeds(names: Sequence[str], compared: Sequence[SeedsCompared]) -> None:
    """Print means over seeds with their spread, and whether settings differ by more than noise."""
    rows = []
    for each in compared:
        differences = ["-" if found is None else _difference(found) for found in each.differences[1:]]
        rows.append([each.name, str(each.step), *map(_spread, each.spreads), *differences])
    others = [f"{name} - {names[0]}" for name in names[1:]]
    title = "over seeds: mean ± standard deviation (runs); differences with 95 % intervals"
    console = new_console()
    console.print(table_of(("metric", "step", *names, *others), rows, whole=("metric",), title=title))


def _spread(spread: Spread) -> str:
    if spread.mean is None:
        return "-"
    deviation = "" if spread.deviation is None else f" ± {_number(spread.deviation)}"
    return f"{_number(spread.mean)}{deviation} ({spread.num_runs})"


def _difference(difference: Difference) -> str:
    width = "" if difference.half_width is None else f" ± {_number(difference.half_width)}"
    return f"{difference.value:+.4g}{width}: {difference.verdict}"


def _seeds_document(groups: Sequence[Setting], compared: Sequence[SeedsCompared]) -> JsonValue:
    if not compared:
        return None
    return {
        "settings": [{"experiments": list(each.members), "seeds": list(each.seeds)} for each in groups],
        "metrics": [
            {
                "name": each.name,
                "step": each.step,
                "spreads": [dict(spread._asdict()) for spread in each.spreads],
                "differences": [
                    None if found is None else {**found._asdict(), "verdict": found.verdict}
                    for found in each.differences
                ],
            }
            for each in compared
        ],
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"


def _setting(value: object) -> str:
    return "(not set)" if value is None else str(value)


def _plot_path(arguments: argparse.Namespace) -> Path | None:
    """Where to plot, if that was asked for."""
    if arguments.plot is None:
        return None
    path = Path(arguments.plot)
    if not path.parent.is_dir():
        raise InvalidRequest(f"the plot cannot be written: there is no directory {path.parent}")
    if path.suffix not in PICTURES:
        raise InvalidRequest(f"--plot {path}: the name must end with {', '.join(PICTURES)}, by which it is drawn")
    return path


def _took(view: ExperimentView, *, is_stored: bool) -> str:
    """Name the time that ``_seconds`` gives."""
    return "creation to end" if view.state.is_final else "creation to last word" if is_stored else "since creation"


def _seconds(view: ExperimentView, *, is_stored: bool) -> float:
    """How long an experiment has been there, until its end, or the last that was stored of it."""
    begin, end = (datetime.fromisoformat(text).timestamp() for text in (view.created_at, view.updated_at))
    return (end if view.state.is_final or is_stored else time.time()) - begin


def _run_of(reference: str | None) -> Path | None:
    """Find the directory of ``flotilla run`` that a reference names, if it does."""
    named = Path(reference) if reference else None
    return named if named is not None and (named / FLEET).is_dir() else None


def _logs_of(client: Source, data: Path) -> Path | None:
    """Where the processes of the fleet that was asked keep their logs, if that is here."""
    if isinstance(client, StoredExperiments):
        return client.data / "logs"
    try:
        info = FleetInfo.read(data)
    except Unavailable:
        return None
    return data / "logs" if info.gateway_url.rstrip("/") == client.base_url else None
