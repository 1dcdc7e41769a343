"""Pictures of experiments, drawn by matplotlib where it is installed; no display is needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla.cli.points import Point, Points
from flotilla.cli.progress import Progress


def write_plot(progress: Progress, path: Path) -> bool:
    """Plot reward and what held-out problems came to over steps as a PNG; False where matplotlib is missing.

    Raises:
        OSError: the file cannot be written.
    """
    figure = _new_figure(8, 4.5)
    if figure is None:
        return False
    axes = figure.add_subplot()
    learned, series = progress.learned
    rewards = progress.series.get(series, Points())
    if rewards:
        _draw(axes, rewards, "-", lw=1, label=f"training {learned}")
    name, held_out, _ = progress.held_out
    if held_out:
        _draw(axes, held_out, "o-", label=f"held-out {name}")
    axes.set(xlabel="step", title=progress.view.name)
    if all(0 <= value <= 1 for _, _, value in [*rewards, *held_out]):
        axes.set(ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    lines = axes.get_lines()
    lengths = progress.series.get("completion_tokens/mean", Points())
    if lengths:
        right = axes.twinx()
        _draw(right, lengths, ":", color="grey", lw=0.8, label="completion tokens (right)")
        right.set_ylabel("completion tokens")
        lines = [*lines, *right.get_lines()]
    if lines:
        # On one of the axes alone it would hide behind the other's lines, and lack them.
        (right if lengths else axes).legend(handles=lines, loc="lower right")
    figure.savefig(path, dpi=120)
    return True


def write_comparison(runs: Mapping[str, Progress], path: Path) -> bool:
    """Plot training reward, held-out problems and lengths of several experiments, by label; False without matplotlib.

    Raises:
        OSError: the file cannot be written.
    """
    figure = _new_figure(15, 4.5)
    if figure is None:
        return False
    names = {run.held_out.name for run in runs.values()}
    panels = figure.subplots(1, 3)
    for label, run in runs.items():
        _draw(panels[0], run.series.get("reward/mean", Points()), "-", lw=1, label=label)
        _draw(panels[1], run.held_out.points, "o-", lw=1, ms=3, label=label)
        _draw(panels[2], run.series.get("completion_tokens/mean", Points()), "-", lw=1, label=label)
    titles = ("training reward", f"held-out {' / '.join(sorted(names))}", "completion tokens")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
    figure.legend(handles=panels[0].get_lines(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    return True


def _draw(axes: Any, points: Sequence[Point], style: str, **options: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)  # there is no half of a step
    axes.plot([step for step, _, _ in points], [value for _, _, value in points], style, **options)


def _new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), layout="constrained")
