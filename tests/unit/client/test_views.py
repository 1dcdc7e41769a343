"""What notebooks show, frames and plots, and that the package's import costs nothing."""

import subprocess
import sys
from typing import Any

import pytest

from flotilla.client.views import Experiment, Experiments, Metrics, plot_series
from flotilla.shared.schemas.experiment import ExperimentState, MetricPoint, Problem


def an_experiment(**fields: Any) -> Experiment:
    values: dict[str, Any] = {
        "id": "mine-1a2b3c", "name": "mine", "state": ExperimentState.RUNNING, "revision": 1, "spec": {},
        "created_at": "", "updated_at": "", "step": 3, "total_steps": 10, "policy_version": 3, "services": {},
        "directory": "/nowhere",
    }  # fmt: skip
    return Experiment(**values | fields)


def points(name: str, *values: float) -> list[MetricPoint]:
    return [MetricPoint(name=name, step=step, version=step, value=value) for step, value in enumerate(values, 1)]


def test_a_notebook_shows_experiments_as_a_table_and_no_code_of_theirs() -> None:
    problem = Problem(component="reward", cause="<script>alert(1)</script>", at="")

    html = Experiments([an_experiment(), an_experiment(problem=problem)])._repr_html_()

    assert html.count("<tr>") == 3
    assert "<td>mine-1a2b3c</td><td>running</td><td>3/10</td>" in html
    assert "&lt;script&gt;" in html and "<script>" not in html


def test_an_experiment_is_one_line_and_does_not_print_its_spec() -> None:
    experiment = an_experiment(spec={"secret": "x" * 1000}, problem=Problem(component="reward", cause="down", at=""))

    assert repr(experiment) == "Experiment(mine, mine-1a2b3c, running, step 3/10, version 3, 'reward: down')"
    assert str(experiment) == repr(experiment)


def test_long_tables_are_cut() -> None:
    assert "... and 5 more" in Experiments([an_experiment()] * 25)._repr_html_()


def test_a_frame_has_a_row_per_step_and_a_column_per_series() -> None:
    pytest.importorskip("pandas")
    frame = Metrics([*points("loss", 0.5, 0.25), *points("reward/mean", 1.0)]).frame()

    assert list(frame.index) == [1, 2] and frame.index.name == "step"
    assert list(frame["loss"]) == [0.5, 0.25]
    assert frame["reward/mean"].isna().tolist() == [False, True]


def test_what_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match="a frame needs pandas: pip install pandas"):
        Metrics(points("loss", 1.0)).frame()
    with pytest.raises(ImportError, match=r"a plot needs matplotlib: pip install 'flotilla\[plot\]'"):
        Metrics(points("loss", 1.0)).plot()


def test_a_plot_has_a_line_per_series_and_says_which_has_no_values() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_series({"one": points("loss", 0.5, 0.25), "none": []}, ylabel="loss")

    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["one", "none (no values)"]
    assert axes.get_ylabel() == "loss"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = "import sys, flotilla; print(*{'pydantic', 'httpx', 'numpy', 'torch', 'matplotlib'} & sys.modules.keys())"

    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert said.stdout.split() == []
