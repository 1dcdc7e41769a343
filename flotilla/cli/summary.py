"""The end of a run: one table, one plot, one JSON file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flotilla.cli.health import finding_lines
from flotilla.cli.progress import Progress, duration, number
from flotilla.cli.right_and_wrong import lines_of
from shared.schemas.experiment import CheckpointView
from shared.schemas.health import HealthFinding


def summarise(
    progress: Progress,
    *,
    wall_seconds: float,
    checkpoints: Sequence[CheckpointView],
    logs: Path | None,
    plot: Path | None,
    samples: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Collect what a run has come to.

    Returns:
        What ``summary.json`` holds. Accuracies are None where nothing was evaluated or rewards are
        not 0 or 1; ``held_out`` has what was found, whatever it is; tokens are those that the policy
        sampled; ``max_lag_trained`` is in versions.
    """
    held_out = progress.held_out
    accuracy = held_out.points if held_out.name == "accuracy" else []
    points = [{"step": step, "version": version, "value": value} for step, version, value in held_out.points]
    directory = Path(checkpoints[-1].path) if checkpoints else None
    return {
        "name": progress.view.name,
        "experiment_id": progress.view.id,
        "status": progress.view.state.value,
        "problem": progress.view.problem.model_dump(mode="json") if progress.view.problem else None,
        "health": [finding.model_dump(mode="json") for finding in progress.view.health],
        "steps": progress.view.step,
        "policy_version": progress.view.policy_version,
        "accuracy_before": accuracy[0][2] if accuracy else None,
        "accuracy_after": accuracy[-1][2] if len(accuracy) > 1 else None,
        "accuracy": points if accuracy else [],
        "held_out": {"metric": held_out.name, "points": points},
        "wall_seconds": round(wall_seconds, 2),
        "tokens_generated": progress.ledger.get("tokens", {}).get("generated"),
        "tokens_trained": progress.ledger.get("tokens", {}).get("trained"),
        "max_lag_trained": progress.greatest("lag/max"),
        "ledger": dict(progress.ledger),
        "checkpoint": str(directory / "model") if directory else None,
        "plot": str(plot) if plot else None,
        "logs": str(logs) if logs else None,
        "samples": [
            {key: sample[key] for key in ("row", "messages", "prompt", "completion", "label", "reward", "reason")}
            for sample in samples
        ],
    }


def lengths_of(ledger: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write the lengths of what was filtered, dropped or failed for a person.

    Returns:
        For each reason its name and its histogram, such as ``("dropped stale", "up to 256 tokens: 3, 512: 1")``:
        groups by the sampled tokens of all their members.
    """
    found = []
    for kind, reasons in ledger.get("lengths", {}).items():
        for reason, histogram in reasons.items():
            (first, count), *others = histogram.items()
            rest = "".join(f", {most}: {number}" for most, number in others)
            found.append((f"{kind} {reason}", f"up to {first} tokens: {count}{rest}"))
    return found


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Show a summary to a person."""
    ledger = summary["ledger"]
    ended = {kind: sum(ledger.get(kind, {}).values()) for kind in ("filtered", "dropped", "failed")}
    table = Table(show_header=False, title=f"{summary['name']}: {summary['status']}", title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    held_out = summary["held_out"]
    values = [point["value"] for point in held_out["points"]]
    form = ".1%" if held_out["metric"] == "accuracy" else ".3f"
    before, after = values[0] if values else None, values[-1] if len(values) > 1 else None
    if values:
        table.add_row(f"held-out {held_out['metric']}", f"{number(before, form)} -> {number(after, form)}")
    table.add_row("steps", f"{summary['steps']}, policy version {summary['policy_version']}")
    table.add_row("tokens", f"{summary['tokens_generated']} generated, {summary['tokens_trained']} trained")
    table.add_row("largest lag trained", f"{number(summary['max_lag_trained'], '.0f')} versions")
    table.add_row("time", duration(summary["wall_seconds"]))
    table.add_row(
        "ledger",
        f"{ledger.get('issued', 0)} groups issued = {ledger.get('trained', 0)} trained"
        + "".join(f" + {count} {kind}" for kind, count in ended.items() if count)
        + (f" + {ledger.get('planned', 0)} planned" if ledger.get("planned") else "")
        + (f" + {ledger.get('outstanding', 0)} outstanding" if ledger.get("outstanding") else "")
        + (" (balanced)" if ledger.get("balanced") else " (NOT balanced)"),
    )
    for what, histogram in lengths_of(ledger):
        table.add_row(f"  {what}", f"groups of {histogram}")
    for name, line in lines_of(summary["samples"]):
        table.add_row(f"{name} answer", Text(line))
    for finding in summary["health"]:
        table.add_row("health", Text("\n".join(finding_lines(HealthFinding.model_validate(finding)))))
    if summary["problem"]:
        table.add_row("problem", f"{summary['problem']['component']}: {summary['problem']['cause']}")
    return table


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Show a summary to a person; paths are below the table, whole, so that they can be copied."""
    console.print(summary_table(summary))
    for name in ("checkpoint", "plot", "logs"):
        if summary[name]:
            console.print(f"{name:<10} {summary[name]}", markup=False)


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Write ``summary.json`` in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
