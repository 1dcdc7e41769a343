"""The end of a run: one table, one plot, one JSON file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue, SerializerFunctionWrapHandler, model_serializer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flotilla.cli.health import finding_lines
from flotilla.cli.output import short_path
from flotilla.cli.progress import REWARD_STEPS, HeldOut, Progress, duration, number, of_rows
from flotilla.cli.reasons import ended_lines
from flotilla.cli.right_and_wrong import lines_of
from flotilla.shared.schemas.experiment import CheckpointView, Origin, Problem
from flotilla.shared.schemas.health import HealthFinding
from flotilla.shared.schemas.samples import SampleView
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.streams.ledger import Ledger

SHOWN = ("row", "messages", "prompt", "completion", "label", "reward", "reason")
"""Columns of a sample."""
EVALUATION = "evaluation/"
WITHOUT_TRAINING = frozenset({"lag_versions"})
"""Series without meaning if only one version is evaluated."""
SUCCESS = "evaluation/grader/environment/success/mean"
TURNS = "evaluation/grader/episode/turns/mean"
"""Series of the share of held-out episodes that their environment calls a success."""


class HeldOutPoint(Wire):
    """What held-out problems came to at a step; of how many rows with a grade and of all, where that is known."""

    step: int
    version: int
    value: float
    graded_rows: int | None = None
    rows: int | None = None

    @property
    def of(self) -> str:
        """Of how many rows the value is, in words."""
        return of_rows(None if self.graded_rows is None or self.rows is None else (self.graded_rows, self.rows))

    @model_serializer(mode="wrap")
    def _without_unknown_rows(self, write: SerializerFunctionWrapHandler) -> dict[str, JsonValue]:
        written: dict[str, JsonValue] = write(self)
        return {name: value for name, value in written.items() if value is not None}


class HeldOutSeries(Wire):
    """What held-out problems came to over steps, and what that is called."""

    metric: str
    points: tuple[HeldOutPoint, ...]


class Summary(Wire):
    """What a run has come to, as ``summary.json`` holds it.

    Accuracies are None where nothing was evaluated or rewards are not 0 or 1; ``held_out`` has what was found, whatever
    it is; tokens are those that the policy sampled; ``max_lag_trained`` is in versions. Successes are shares of the
    held-out episodes of many turns: as the environment says, else those with the reward 1.
    """

    name: str
    run: str | None
    experiment_id: str
    status: str
    problem: Problem | None
    health: tuple[HealthFinding, ...]
    steps: int
    total_steps: int
    policy_version: int
    origin: Origin | None
    reward: float | None
    reward_steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    accuracy: tuple[HeldOutPoint, ...]
    success_before: float | None
    success_after: float | None
    evaluation: dict[str, float]
    held_out: HeldOutSeries
    loss: float | None
    held_out_loss: tuple[float, ...]
    held_out_pairs: tuple[float, ...]
    wall_seconds: float
    tokens_generated: int | None
    tokens_trained: int | None
    max_lag_trained: float | None
    ledger: Ledger | None
    checkpoint: str | None
    plot: str | None
    logs: str | None
    samples: tuple[SampleView, ...]

    def document(self) -> dict[str, JsonValue]:
        """Write it as JSON has it; of samples some columns."""
        samples: list[JsonValue] = [_shown(sample) for sample in self.samples]
        ledger: JsonValue = {} if self.ledger is None else self.ledger.model_dump(mode="json")
        return {**self.model_dump(mode="json"), "ledger": ledger, "samples": samples}


def _shown(sample: SampleView) -> dict[str, JsonValue]:
    written = sample.model_dump(mode="json", include=set(SHOWN))
    return {name: written[name] for name in SHOWN}


def summarise(
    progress: Progress,
    *,
    wall_seconds: float,
    checkpoints: Sequence[CheckpointView],
    logs: Path | None,
    plot: Path | None,
    samples: Sequence[SampleView] = (),
    run: Path | None = None,
) -> Summary:
    """Collect what a run has come to.

    Args:
        run: directory of ``flotilla run``.
    """
    view, held_out, ledger = progress.view, progress.held_out, progress.ledger
    is_ungraded = progress.learned[0] == "loss"
    points = _with_rows(held_out)
    accuracy = points if held_out.name == "accuracy" else ()
    success = [value for _, _, value in progress.series.get(SUCCESS, [])]
    if not success and TURNS in progress.series:
        success = [point.value for point in accuracy]
    accuracies = [point.value for point in accuracy]
    return Summary(
        name=view.name,
        run=_text(run),
        experiment_id=view.id,
        status=view.state.value,
        problem=view.problem,
        health=view.health,
        steps=view.step,
        total_steps=view.total_steps,
        policy_version=view.policy_version,
        origin=view.origin,
        reward=progress.mean_of_last("reward/mean", REWARD_STEPS),
        reward_steps=min(REWARD_STEPS, len(progress.series.get(progress.learned[1], []))),
        accuracy_before=_first(accuracies),
        accuracy_after=_last_of_several(accuracies),
        accuracy=accuracy,
        success_before=_first(success),
        success_after=_last_of_several(success),
        evaluation=_last_evaluation(progress),
        held_out=HeldOutSeries(metric=held_out.name, points=points),
        loss=progress.mean_of_last("loss/total", REWARD_STEPS) if is_ungraded else None,
        held_out_loss=tuple(value for _, _, value in progress.held_out_loss),
        held_out_pairs=tuple(value for _, _, value in progress.series.get("held_out/preference/accuracy", [])),
        wall_seconds=round(wall_seconds, 2),
        tokens_generated=ledger.tokens.generated if ledger else None,
        tokens_trained=ledger.tokens.trained if ledger else None,
        max_lag_trained=progress.greatest("lag/max"),
        ledger=ledger,
        checkpoint=str(Path(checkpoints[-1].path) / "model") if checkpoints else None,
        plot=_text(plot),
        logs=_text(logs),
        samples=tuple(samples),
    )


def _text(path: Path | None) -> str | None:
    return str(path) if path else None


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _last_of_several(values: Sequence[float]) -> float | None:
    return values[-1] if len(values) > 1 else None


def _last_evaluation(progress: Progress) -> dict[str, float]:
    """Collect the newest value of each series of evaluations."""
    series = sorted(progress.series.items())
    return {
        name.removeprefix(EVALUATION): points[-1][2]
        for name, points in series
        if name.startswith(EVALUATION) and points
    }


def summary_table(summary: Summary, *, took: str) -> Table:
    """Show a summary to a person.

    Args:
        took: whose time ``wall_seconds`` is.
    """
    run = Path(summary.run).name if summary.run else summary.name
    title = f"{run} ({summary.experiment_id}): {summary.status}"
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if summary.problem:
        table.add_row("problem", Text(f"{summary.problem.component}: {summary.problem.cause}"))
    for finding in summary.health:
        table.add_row("health", Text("\n".join(finding_lines(finding))))
    for name, text in [*_results(summary), (took, duration(summary.wall_seconds)), *_ledger_lines(summary)]:
        table.add_row(name, Text(text))
    for name, line in lines_of(summary.samples):
        table.add_row(f"{name} answer", Text(line))
    return table


def _results(summary: Summary) -> list[tuple[str, str]]:
    """Write what training has come to."""
    held_out = summary.held_out
    form = ".1%" if held_out.metric == "accuracy" else ".3f"
    if not summary.total_steps:
        return _evaluated(summary)
    rows = []
    if held_out.points:
        rows.append((f"held-out {held_out.metric}", _from_to(held_out.points, form)))
    if summary.reward is not None:
        is_filtered = summary.ledger is not None and any(summary.ledger.filtered.values())
        without = ", of the groups that were not filtered" if is_filtered else ""
        rows.append(
            ("training reward", f"{summary.reward:.3f}, mean of the last {summary.reward_steps} steps{without}")
        )
    if summary.loss is not None:
        rows.append(("training loss", f"{summary.loss:.3f}, mean of the last {summary.reward_steps} steps"))
    if summary.held_out_loss and held_out.metric != "loss":
        rows.append(("held-out loss", _first_and_last(summary.held_out_loss, ".3f")))
    if summary.held_out_pairs:
        rows.append(("held-out pairs ranked right", _first_and_last(summary.held_out_pairs, ".1%")))
    if summary.success_before is not None:
        successes = (summary.success_before, summary.success_after)
        rows.append(("held-out success", " -> ".join(number(each, ".1%") for each in successes)))
    return [*rows, *_work(summary)]


def _work(summary: Summary) -> list[tuple[str, str]]:
    """Write how many steps and tokens that took."""
    origin = summary.origin
    begin = f"; from step {origin.step} of {origin.experiment_id}" if origin else ""
    rows = [("steps", f"{summary.steps}, policy version {summary.policy_version}{begin}")]
    made = "read" if summary.loss is not None else "generated"
    tokens = f"{summary.tokens_generated} {made}, {summary.tokens_trained} trained"
    if summary.tokens_generated is not None:
        rows.append(("tokens", f"{tokens} since step {origin.step}" if origin else tokens))
    if summary.max_lag_trained is not None:
        lag = round(summary.max_lag_trained)
        rows.append(("largest lag trained", f"{lag} version{'' if lag == 1 else 's'}"))
    return rows


def _evaluated(summary: Summary) -> list[tuple[str, str]]:
    """Write what an evaluation without training has found: shares as percentages."""
    found = {name: value for name, value in summary.evaluation.items() if name not in WITHOUT_TRAINING}
    rows = [
        (name, f"{number(value, '.1%' if _is_share(name, summary) else '.4g')} {_rows_of(name, found)}".rstrip())
        for name, value in found.items()
    ]
    return [*rows, ("tokens", f"{summary.tokens_generated or 0} in the answers")]


def _rows_of(name: str, found: Mapping[str, float]) -> str:
    """Write of how many rows an accuracy, of all or of a set, is."""
    prefix, _, last = name.rpartition("/")
    counts = [found.get(f"{prefix}/{each}".removeprefix("/")) for each in ("num_graded_rows", "num_rows")]
    graded, asked = counts
    return of_rows((int(graded), int(asked))) if last == "accuracy" and graded is not None and asked is not None else ""


def _is_share(name: str, summary: Summary) -> bool:
    last = name.rpartition("/")[2]
    return (
        last == "accuracy"
        or last.startswith("pass@")
        or (
            last.startswith(("mean@", "maj@", "best@")) and (name.removesuffix(last) + "accuracy" in summary.evaluation)
        )
    )


def _from_to(points: Sequence[HeldOutPoint], form: str) -> str:
    """Write the first and the last value, and of how many rows: once, where that is the same."""
    ends = [points[0], *points[1:][-1:]]
    if len({end.of for end in ends}) == 1:
        return f"{_first_and_last([end.value for end in ends], form)} {ends[0].of}".rstrip()
    return " -> ".join(f"{number(end.value, form)} {end.of}".rstrip() for end in ends)


def _with_rows(held_out: HeldOut) -> tuple[HeldOutPoint, ...]:
    found = []
    for step, version, value in held_out.points:
        graded, asked = held_out.rows.get(step, (None, None))
        found.append(HeldOutPoint(step=step, version=version, value=value, graded_rows=graded, rows=asked))
    return tuple(found)


def _first_and_last(values: Sequence[float], form: str) -> str:
    return " -> ".join(number(value, form) for value in [values[0], *values[1:][-1:]])


def _ledger_lines(summary: Summary) -> list[tuple[str, str]]:
    """Write what became of all groups."""
    ledger = summary.ledger
    if ledger is None:
        return []
    taken = "trained" if summary.total_steps else "evaluated"
    ended = {"filtered": ledger.filtered, "dropped": ledger.dropped, "failed": ledger.failed}
    parts = {name: sum(reasons.values()) for name, reasons in ended.items()}
    parts |= {"planned": ledger.planned, "outstanding": ledger.outstanding}
    total = " + ".join([f"{ledger.trained} {taken}", *(f"{count} {name}" for name, count in parts.items() if count)])
    verdict = "balanced" if ledger.balanced else "NOT balanced"
    rows = [("ledger", f"{ledger.issued} groups issued = {total} ({verdict})")]
    return rows + [(f"  {kind}", text) for kind, text in ended_lines(ledger)]


def show_summary(console: Console, summary: Summary, *, took: str, names_files: bool = True) -> None:
    """Show a summary to a person; paths are below the table, whole, so that they can be copied."""
    console.print(summary_table(summary, took=took))
    for name, path in (("checkpoint", summary.checkpoint), ("plot", summary.plot), ("logs", summary.logs)):
        if path and names_files:
            console.print(f"{name:<10} {short_path(path)}", markup=False)


def write_summary(summary: Summary, path: Path) -> None:
    """Write ``summary.json`` in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary.document(), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
