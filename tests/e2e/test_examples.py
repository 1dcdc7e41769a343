"""Every example trains: two steps of each on one fleet, with a model and problems that need no preparation."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import flotilla
from examples.sweep.sweep import sweep
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.schemas.experiment import ExperimentState
from tests.fleet import ROOT, make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

EXAMPLES = ROOT / "examples"
STEPS = 2
END_SECONDS = 200.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    spec = make_experiment(directory, optimisation={"steps": STEPS, "groups_per_mini_batch": 2})
    (directory / "tiny.yaml").write_text(yaml.safe_dump(spec))
    return directory


@pytest.fixture(scope="module")
def client(made: Path) -> Iterator[flotilla.Client]:
    with (
        pytest.MonkeyPatch.context() as environment,
        running_fleet(made / "fleet", FLOTILLA_CODE_FOLDERS=f"{EXAMPLES}{os.pathsep}{made}") as fleet,
    ):
        environment.setenv("FLOTILLA_GATEWAY_URL", fleet.url)
        environment.setenv("FLOTILLA_TOKEN", fleet.token)
        with flotilla.Client() as client:
            yield client


def train(client: flotilla.Client, made: Path, example: str, **changes: Any) -> str:
    """Train an example's file for two steps and return the experiment's id."""
    small = {
        "prepare": None,
        "model.path": str(made / "model"),
        "data.path": str(made / "train.jsonl"),
        "optimisation.steps": STEPS,
        "optimisation.groups_per_mini_batch": 2,
        "rollout.group_size": 2,
        # A model of random weights is never right.
        "reward.filter_zero_spread": False,
        "evaluation": None,
    }
    run = client.create(EXAMPLES / example, overrides=small | changes, start=True)
    view = client.wait(run.id, timeout_seconds=END_SECONDS)
    assert (view.state, view.problem) == (ExperimentState.COMPLETED, None)
    return run.id


def test_a_grader_over_http_grades(client: flotilla.Client, made: Path) -> None:
    port = lasting_port("127.0.0.1")
    command = [sys.executable, str(EXAMPLES / "http_grader" / "grader.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as grader:
        try:
            assert grader.stdout is not None and "grading at" in grader.stdout.readline()
            url = {"reward.components.0.url": f"http://127.0.0.1:{port}/"}
            run = train(client, made, "http_grader/experiment.yaml", **url)
        finally:
            grader.kill()

    assert [point.step for point in client.metrics(run, ["grader/remote/characters/mean"])] == [1, 2]


def test_two_components_are_rewarded_and_recorded(client: flotilla.Client, made: Path) -> None:
    run = train(client, made, "short_answers/experiment.yaml")

    assert {"reward/right/mean", "reward/short/mean"} <= {point.name for point in client.metrics(run)}


def test_a_tool_is_offered(client: flotilla.Client, made: Path) -> None:
    run = train(client, made, "tool_use/experiment.yaml")

    assert [point.step for point in client.metrics(run, ["grader/tools/calls/mean"])] == [1, 2]


def test_a_run_goes_on_from_another(client: flotilla.Client, made: Path) -> None:
    train(client, made, "continue_a_run/first.yaml")

    second = {"checkpoint.resume_from": "first", "optimisation.steps": STEPS + 1}
    run = train(client, made, "continue_a_run/second.yaml", **second)

    assert [point.step for point in client.metrics(run, ["reward/mean"])] == [3]


def test_the_sweep_trains_compares_and_fetches(client: flotilla.Client, made: Path, tmp_path: Path) -> None:
    best = sweep(made / "tiny.yaml", [1e-4, 3e-4], 1, str(tmp_path / "sweep.png"))

    assert best in {1e-4, 3e-4}
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["notebook.ipynb", "sweep/sweep.ipynb"])
def test_a_notebooks_cells_run(name: str, client: flotilla.Client, made: Path) -> None:
    notebook = json.loads((EXAMPLES / name).read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}

    exec(cells[0], names)
    names |= {"SPEC": str(made / "tiny.yaml"), "RATES": [1e-4], "STEPS": 1}
    for cell in cells[1:]:
        exec(cell, names)

    assert (Path(names["model"]) / "config.json").is_file()
