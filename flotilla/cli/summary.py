"""The end of a run: one table, one plot, one JSON file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flotilla.cli.health import finding_lines
from flotilla.cli.output import short_path
from flotilla.cli.progress import REWARD_STEPS, HeldOut, Progress, duration, number, of_rows
from flotilla.cli.reasons import ended_lines
from flotilla.cli.right_and_wrong import lines_of
from flotilla.shared.schemas.experiment import CheckpointView
from flotilla.shared.schemas.health import HealthFinding

SHOWN = ("row", "messages", "prompt", "completion", "label", "reward", "reason")
"""Columns of a sample."""
EVALUATION = "evaluation/"
WITHOUT_TRAINING = frozenset({"lag_versions"})
"""Series that say nothing where one version alone is evaluated."""
SUCCESS = "evaluation/grader/environment/success/mean"
TURNS = "evaluation/grader/episode/turns/mean"
"""Series of the share of held-out episodes that their environment calls a success."""


def summarise(
    progress: Progress,
    *,
    wall_seconds: float,
    checkpoints: Sequence[CheckpointView],
    logs: Path | None,
    plot: Path | None,
    samples: Sequence[Mapping[str, Any]] = (),
    run: Path | None = None,
) -> dict[str, Any]:
    """Collect what a run has come to.

    Args:
        run: directory of ``flotilla run``.

    Returns:
        What ``summary.json`` holds. Accuracies are None where nothing was evaluated or rewards are
        not 0 or 1; ``held_out`` has what was found, whatever it is; tokens are those that the policy
        sampled; ``max_lag_trained`` is in versions. Successes are shares of the held-out episodes of many turns:
        as the environment says, else those with the reward 1.
    """
    held_out, is_ungraded = progress.held_out, progress.learned[0] == "loss"
    accuracy = held_out.points if held_out.name == "accuracy" else []
    points = _with_rows(held_out)
    success = progress.series.get(SUCCESS, []) or (accuracy if TURNS in progress.series else [])
    directory = Path(checkpoints[-1].path) if checkpoints else None
    return {
        "name": progress.view.name,
        "run": str(run) if run else None,
        "experiment_id": progress.view.id,
        "status": progress.view.state.value,
        "problem": progress.view.problem.model_dump(mode="json") if progress.view.problem else None,
        "health": [finding.model_dump(mode="json") for finding in progress.view.health],
        "steps": progress.view.step,
        "total_steps": progress.view.total_steps,
        "policy_version": progress.view.policy_version,
        "origin": progress.view.origin.model_dump(mode="json") if progress.view.origin else None,
        "reward": progress.mean_of_last("reward/mean", REWARD_STEPS),
        "reward_steps": min(REWARD_STEPS, len(progress.series.get(progress.learned[1], []))),
        "accuracy_before": accuracy[0][2] if accuracy else None,
        "accuracy_after": accuracy[-1][2] if len(accuracy) > 1 else None,
        "accuracy": points if accuracy else [],
        "success_before": success[0][2] if success else None,
        "success_after": success[-1][2] if len(success) > 1 else None,
        "evaluation": _last_evaluation(progress),
        "held_out": {"metric": held_out.name, "points": points},
        "loss": progress.mean_of_last("loss/total", REWARD_STEPS) if is_ungraded else None,
        "held_out_loss": [value for _, _, value in progress.held_out_loss],
        "held_out_pairs": [value for _, _, value in progress.series.get("held_out/preference/accuracy", [])],
        "wall_seconds": round(wall_seconds, 2),
        "tokens_generated": progress.ledger.get("tokens", {}).get("generated"),
        "tokens_trained": progress.ledger.get("tokens", {}).get("trained"),
        "max_lag_trained": progress.greatest("lag/max"),
        "ledger": dict(progress.ledger),
        "checkpoint": str(directory / "model") if directory else None,
        "plot": str(plot) if plot else None,
        "logs": str(logs) if logs else None,
        "samples": [{key: sample[key] for key in SHOWN} for sample in samples],
    }


def _last_evaluation(progress: Progress) -> dict[str, float]:
    """Collect the newest value of each series of evaluations."""
    series = sorted(progress.series.items())
    return {
        name.removeprefix(EVALUATION): points[-1][2]
        for name, points in series
        if name.startswith(EVALUATION) and points
    }


def summary_table(summary: Mapping[str, Any], *, took: str) -> Table:
    """Show a summary to a person.

    Args:
        took: whose time ``wall_seconds`` is.
    """
    run = Path(summary["run"]).name if summary["run"] else summary["name"]
    title = f"{run} ({summary['experiment_id']}): {summary['status']}"
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if summary["problem"]:
        table.add_row("problem", Text(f"{summary['problem']['component']}: {summary['problem']['cause']}"))
    for finding in summary["health"]:
        table.add_row("health", Text("\n".join(finding_lines(HealthFinding.model_validate(finding)))))
    for name, text in [*_results(summary), (took, duration(summary["wall_seconds"])), *_ledger_lines(summary)]:
        table.add_row(name, Text(text))
    for name, line in lines_of(summary["samples"]):
        table.add_row(f"{name} answer", Text(line))
    return table


def _results(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write what training has come to."""
    held_out, origin = summary["held_out"], summary["origin"]
    form = ".1%" if held_out["metric"] == "accuracy" else ".3f"
    if not summary["total_steps"]:
        return _evaluated(summary)
    rows = []
    if held_out["points"]:
        rows.append((f"held-out {held_out['metric']}", _from_to(held_out["points"], form)))
    if summary["reward"] is not None:
        is_filtered = any(summary["ledger"].get("filtered", {}).values())
        without = ", of the groups that were not filtered" if is_filtered else ""
        rows.append(
            ("training reward", f"{summary['reward']:.3f}, mean of the last {summary['reward_steps']} steps{without}")
        )
    if summary["loss"] is not None:
        rows.append(("training loss", f"{summary['loss']:.3f}, mean of the last {summary['reward_steps']} steps"))
    if summary["held_out_loss"] and held_out["metric"] != "loss":
        rows.append(("held-out loss", _first_and_last(summary["held_out_loss"], ".3f")))
    if summary["held_out_pairs"]:
        rows.append(("held-out pairs ranked right", _first_and_last(summary["held_out_pairs"], ".1%")))
    begin = f"; from step {origin['step']} of {origin['experiment_id']}" if origin else ""
    if summary["success_before"] is not None:
        successes = (number(summary[f"success_{which}"], ".1%") for which in ("before", "after"))
        rows.append(("held-out success", " -> ".join(successes)))
    rows.append(("steps", f"{summary['steps']}, policy version {summary['policy_version']}{begin}"))
    made = "read" if summary["loss"] is not None else "generated"
    tokens = f"{summary['tokens_generated']} {made}, {summary['tokens_trained']} trained"
    if summary["tokens_generated"] is not None:
        rows.append(("tokens", f"{tokens} since step {origin['step']}" if origin else tokens))
    if summary["max_lag_trained"] is not None:
        lag = round(summary["max_lag_trained"])
        rows.append(("largest lag trained", f"{lag} version{'' if lag == 1 else 's'}"))
    return rows


def _evaluated(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write what an evaluation without training has found: shares as percentages."""
    found = {name: value for name, value in summary["evaluation"].items() if name not in WITHOUT_TRAINING}
    rows = [
        (name, f"{number(value, '.1%' if _is_share(name, summary) else '.4g')} {_rows_of(name, found)}".rstrip())
        for name, value in found.items()
    ]
    return [*rows, ("tokens", f"{summary['tokens_generated'] or 0} in the answers")]


def _rows_of(name: str, found: Mapping[str, float]) -> str:
    """Write of how many rows an accuracy, of all or of a set, is."""
    prefix, _, last = name.rpartition("/")
    counts = [found.get(f"{prefix}/{each}".removeprefix("/")) for each in ("num_graded_rows", "num_rows")]
    graded, asked = counts
    return of_rows((int(graded), int(asked))) if last == "accuracy" and graded is not None and asked is not None else ""


def _is_share(name: str, summary: Mapping[str, Any]) -> bool:
    last = name.rpartition("/")[2]
    return (
        last == "accuracy"
        or last.startswith("pass@")
        or (
            last.startswith(("mean@", "maj@", "best@"))
            and (name.removesuffix(last) + "accuracy" in summary["evaluation"])
        )
    )


def _from_to(points: Sequence[Mapping[str, Any]], form: str) -> str:
    """Write the first and the last value, and of how many rows: once, where that is the same."""
    ends = [points[0], *points[1:][-1:]]
    values = [end["value"] for end in ends]
    of = [of_rows((end["graded_rows"], end["rows"]) if "rows" in end else None) for end in ends]
    if len(set(of)) == 1:
        return f"{_first_and_last(values, form)} {of[0]}".rstrip()
    return " -> ".join(f"{number(value, form)} {rows}".rstrip() for value, rows in zip(values, of, strict=True))


def _with_rows(held_out: HeldOut) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step, version, value in held_out.points:
        graded, asked = held_out.rows.get(step, (None, None))
        found.append({"step": step, "version": version, "value": value})
        found[-1] |= {} if asked is None else {"graded_rows": graded, "rows": asked}
    return found


def _first_and_last(values: Sequence[float], form: str) -> str:
    return " -> ".join(number(value, form) for value in [values[0], *values[1:][-1:]])


def _ledger_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write what became of all groups."""
    ledger = summary["ledger"]
    if not ledger:
        return []
    ended = {kind: sum(ledger.get(kind, {}).values()) for kind in ("filtered", "dropped", "failed")}
    taken = "trained" if summary["total_steps"] else "evaluated"
    parts = {taken: ledger.get("trained", 0), **{kind: count for kind, count in ended.items() if count}}
    parts |= {kind: ledger[kind] for kind in ("planned", "outstanding") if ledger.get(kind)}
    total = " + ".join(f"{count} {kind}" for kind, count in parts.items())
    verdict = "balanced" if ledger.get("balanced") else "NOT balanced"
    rows = [("ledger", f"{ledger.get('issued', 0)} groups issued = {total} ({verdict})")]
    return rows + [(f"  {kind}", text) for kind, text in ended_lines(ledger)]


def show_summary(console: Console, summary: Mapping[str, Any], *, took: str) -> None:
    """Show a summary to a person; paths are below the table, whole, so that they can be copied."""
    console.print(summary_table(summary, took=took))
    for name in ("checkpoint", "plot", "logs"):
        if summary[name]:
            console.print(f"{name:<10} {short_path(summary[name])}", markup=False)


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write ``summary.json`` in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
