"""What the client answers with: the wire's schemas, shown as tables in notebooks."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

from flotilla.shared.schemas.experiment import ExperimentView, MetricPoint
from flotilla.shared.schemas.samples import SampleView

if TYPE_CHECKING:
    import pandas as pd


def plot_series(series: Mapping[str, Sequence[MetricPoint]], *, ylabel: str = "") -> Any:
    """Draw series over steps.

    Args:
        series: points by label; a label without points is marked so in the legend.
        ylabel: what the values are.

    Returns:
        A ``matplotlib.figure.Figure``: ``savefig`` writes it, a notebook shows it. No display is needed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'flotilla[plot]'") from None

    class NotebookFigure(Figure):
        """A figure that a notebook shows without a backend."""

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    figure = NotebookFigure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in series.items():
        style = "o-" if len(points) <= 50 else "-"
        axes.plot(
            [point.step for point in points],
            [point.value for point in points],
            style,
            lw=1,
            ms=3,
            label=label if points else f"{label} (no values)",
        )
    axes.set(xlabel="step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    if series:
        axes.legend()
    return figure


SHOWN_ROWS = 20


class Experiment(ExperimentView):
    """An experiment and where it stands."""

    def __repr__(self) -> str:
        name, id_, state, step, version, problem = _cells(self)
        return f"Experiment({name}, {id_}, {state}, step {step}, version {version}{problem and f', {problem!r}'})"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return _table(COLUMNS, [_cells(self)])


class Experiments(list[Experiment]):
    """Several of them, oldest first."""

    def _repr_html_(self) -> str:
        return _table(COLUMNS, [_cells(view) for view in self])


COLUMNS = ("experiment", "id", "state", "step", "version", "problem")


def _cells(view: ExperimentView) -> tuple[str, ...]:
    problem = f"{view.problem.component}: {view.problem.cause}" if view.problem else ""
    step = view.reached
    return view.name, view.id, view.state, step, str(view.policy_version), problem


class Metrics(list[MetricPoint]):
    """Values of one experiment's series, in the order of writing."""

    def frame(self) -> "pd.DataFrame":
        """Make a data frame: one row per step, one column per series.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("a frame needs pandas: pip install pandas") from None
        rows: dict[int, dict[str, float]] = {}
        for point in self:
            rows.setdefault(point.step, {})[point.name] = point.value
        steps = sorted(rows)
        return pd.DataFrame([rows[step] for step in steps], index=pd.Index(steps, name="step"))

    def plot(self) -> Any:
        """Draw each series over steps; see :func:`plot_series`."""
        return plot_series({name: [p for p in self if p.name == name] for name in dict.fromkeys(p.name for p in self)})

    def _repr_html_(self) -> str:
        last = {point.name: point for point in self}
        rows = [(name, str(point.step), f"{point.value:.6g}") for name, point in sorted(last.items())]
        return _table(("series", "last step", "value"), rows)


class Samples(list[SampleView]):
    """Samples in the order that was asked for.

    Attributes:
        num_unread: files that are not in the index yet: ask again soon for what may be in them.
    """

    num_unread = 0


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = list(rows)
    more = f"<p>... and {len(rows) - SHOWN_ROWS} more</p>" if len(rows) > SHOWN_ROWS else ""
    body = "".join(line("td", row) for row in rows[:SHOWN_ROWS])
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>{more}"
