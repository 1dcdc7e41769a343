"""Experiments are reported and compared at equal steps, from what the gateway keeps."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.comparison import common_step, compare_metrics, compare_specs, remarks
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.points import Points
from flotilla.cli.progress import Progress
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView
from tests.unit.cli.gateway import ScriptedGateway, serve
from tests.unit.cli.test_progress import a_view, point

LEDGER = {"train": {"issued": 8, "trained": 8, "balanced": True, "tokens": {"generated": 70, "trained": 64}}}
PNG = b"\x89PNG"


def a_run(**series: list[tuple[int, float]]) -> Progress:
    named = {
        name.replace("_", "/"): Points((step, step, value) for step, value in points) for name, points in series.items()
    }
    return Progress(a_view(), series=named)


def fleet_of(monkeypatch: pytest.MonkeyPatch, *runs: tuple[ExperimentView, list[dict[str, Any]]]) -> ScriptedGateway:
    answers: dict[str, Any] = {"/services": []}
    for view, metrics in runs:
        path = f"/experiments/{view.id}"
        made = {"step": 5, "version": 5, "path": f"/data/{view.id}/step-5", "at": "2026-01-01T00:00:00Z"}
        answers |= {f"{path}/metrics": metrics, f"{path}/ledger": LEDGER, f"{path}/checkpoints": [made]}
    return serve(monkeypatch, [view for view, _ in runs], answers)


def ended(name: str, lr: float, **fields: Any) -> ExperimentView:
    spec = {"name": name, "optimisation": {"steps": 10, "lr": lr}, "reward": {"components": [{"kind": "exact"}]}}
    return a_view(id=f"{name}-aa11", name=name, state=ExperimentState.COMPLETED, step=10, spec=spec, **fields)


def test_values_are_compared_at_the_last_step_that_all_have() -> None:
    runs = [a_run(reward_mean=[(1, 0.1), (2, 0.2), (3, 0.3)]), a_run(reward_mean=[(1, 0.4), (2, 0.5)])]

    assert compare_metrics(runs, ["reward/*"]) == [("reward/mean", 2, [0.2, 0.5])]
    assert compare_metrics(runs, ["reward/*"], step=1)[0].values == [0.1, 0.4]


def test_series_without_a_common_step_are_shown_by_their_last_values() -> None:
    runs = [a_run(reward_mean=[(1, 0.1), (3, 0.3)]), a_run(reward_mean=[(2, 0.4)]), a_run()]

    assert compare_metrics(runs, ["reward/mean"], step=2) == [("reward/mean", None, [0.1, 0.4, None])]
    assert common_step([], None) is None


def test_a_series_that_was_named_is_shown_before_it_has_a_value() -> None:
    runs = [a_run(reward=[(1, 0.1)]), a_run(reward=[(1, 0.2)])]

    found = compare_metrics(runs, ["kl/mean", "reward*"], named=["kl/mean"])

    assert found[0] == ("kl/mean", None, [None, None])
    assert [each.name for each in found] == ["kl/mean", "reward"]


def test_a_fork_says_that_it_began_later_and_whose_tokens_it_counts() -> None:
    origin = {"experiment_id": "one-1", "step": 20, "version": 20, "path": "/x", "first_group_id": 9}
    fork = a_run(reward_mean=[(21, 0.1)])
    fork.view = a_view(origin=origin)

    assert remarks(a_run(reward_mean=[(1, 0.1)]), at_most=5) == []
    assert remarks(fork, at_most=None) == ["began from step 20 of one-1: tokens/trained counts those of before, too"]
    assert remarks(fork, at_most=5)[1] == "has no value up to step 5: its first is of step 21"


def test_specs_differ_where_a_setting_differs_or_is_missing() -> None:
    first = {"name": "a", "model": {"path": "m", "dtype": None}, "parts": [{"kind": "x", "weight": 1.0}]}
    second = {"name": "a", "model": {"path": "n"}, "parts": [{"kind": "x", "weight": 1.0}, {"kind": "y"}]}

    assert compare_specs([first, second]) == [
        ("model.path", ["m", "n"]),
        ("model.dtype", [None, "-"]),
        ("parts.1.kind", ["-", "y"]),
    ]
    assert compare_specs([first, first]) == []


def test_what_is_still_to_be_decided_is_no_difference() -> None:
    specs = [{"model": {"dtype": dtype, "path": "/m"}} for dtype in ("auto", "float32", "bfloat16")]

    assert compare_specs(specs[:2]) == []
    assert [row.path for row in compare_specs(specs)] == ["model.dtype"]
    assert [row.path for row in compare_specs([{"threads": "auto"}, {"threads": 2}])] == ["threads"]


def test_a_comparison_shows_metrics_settings_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = ended("one", 1e-3), ended("two", 1e-2)
    fleet_of(
        monkeypatch,
        (one, [point("reward/mean", 4, 0.25), point("reward/mean", 5, 0.5), point("evaluation/reward_mean", 5, 0.75)]),
        (two, [point("reward/mean", 4, 0.375), point("secret", 4, 9.0)]),
    )
    plot = tmp_path / "both.png"

    assert main(["compare", "one", "two", "--plot", str(plot)]) == 0

    said = capsys.readouterr().out
    assert "A  one-aa11  completed, step 10/10" in said and "B  two-aa11" in said
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "│" in line]
    assert ["reward/mean", "4", "0.25", "0.375"] in rows
    assert ["evaluation/reward_mean", "last", "0.75", "-"] in rows
    assert ["optimisation.lr", "0.001", "0.01"] in rows
    assert "secret" not in said
    assert f"\nplot       {plot}\n" in said
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["plot", "plot.foo", "plot.PNG.txt"])
def test_a_picture_of_no_known_kind_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fleet_of(monkeypatch, (ended("one", 1e-3), [point("reward/mean", 4, 0.25)]))

    assert main(["report", "one", "--plot", str(tmp_path / name)]) == ExitCode.FAILED

    assert f"{name}: the name must end with .png, .pdf, .svg, by which it is drawn\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_as_json_plots_only_where_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fleet_of(monkeypatch, (ended("one", 1.0), [point("loss", 1, 0.5)]), (ended("two", 1.0), [point("loss", 1, 0.25)]))

    assert main(["compare", "one", "two", "--metric", "loss", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in found["experiments"]] == ["one-aa11", "two-aa11"]
    assert found["metrics"] == [{"name": "loss", "step": 1, "values": [0.5, 0.25]}]
    assert found["spec"] == [{"path": "name", "values": ["one", "two"]}]
    assert found["plot"] is None and list(tmp_path.iterdir()) == []


def test_an_experiment_is_not_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_of(monkeypatch, (ended("one", 1.0), []))

    assert main(["compare", "one", "one-a"]) == ExitCode.FAILED

    assert "name different experiments: one-aa11, one-aa11" in capsys.readouterr().err


def test_a_report_has_a_summary_and_a_plot_where_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    times = {"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:02:05Z"}
    metrics = [point("evaluation/accuracy", 0, 0.25), point("reward/mean", 4, 0.5), point("evaluation/accuracy", 9, 1)]
    fleet_of(monkeypatch, (ended("one", 1.0, **times), metrics))

    assert main(["report", "one"]) == 0
    assert list(tmp_path.iterdir()) == [], "nothing is written unasked"
    assert "plot " not in capsys.readouterr().out
    assert main(["report", "one", "--plot", "one-aa11.png"]) == 0

    said = capsys.readouterr().out
    assert "25.0% -> 100.0%" in said and "2:05" in said
    assert "\ncheckpoint /data/one-aa11/step-5/model\nplot       one-aa11.png\n" in said
    assert (tmp_path / "one-aa11.png").read_bytes().startswith(PNG)


def test_a_report_as_json_is_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fleet_of(monkeypatch, (ended("one", 1.0), [point("evaluation/reward_mean", 0, 2.5)]))

    assert main(["report", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["held_out"] == {"metric": "reward", "points": [{"step": 0, "version": 0, "value": 2.5}]}
    assert (found["experiment_id"], found["plot"], found["logs"]) == ("one-aa11", None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_that_cannot_be_written_is_said_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_of(monkeypatch, (ended("one", 1.0), []))

    assert main(["report", "one", "--plot", str(tmp_path / "nowhere" / "x.png")]) == ExitCode.FAILED

    said = capsys.readouterr()
    assert said.out == "" and f"there is no directory {tmp_path / 'nowhere'}" in said.err
