"""Series over steps, drawn by matplotlib where it is installed."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from flotilla.shared.schemas.experiment import MetricPoint


def plot_series(series: Mapping[str, Sequence[MetricPoint]], *, ylabel: str = "") -> Any:
    """Draw series over steps.

    Args:
        series: points by label; a label without points is in the legend, and says so.
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
