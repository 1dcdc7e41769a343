"""``flotilla run --seeds``: an experiment for each seed, created once, however often the command is begun again."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli import following
from flotilla.cli.command_line import build_parser
from flotilla.cli.commands import run_seeds
from flotilla.cli.commands.run_seeds import launches_of
from flotilla.cli.continuing import continue_command
from flotilla.cli.points import Points
from flotilla.cli.progress import Progress
from flotilla.cli.run_directory import RunDirectory
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView
from tests.unit.cli.test_progress import a_view
from tests.unit.gateway.builders import spec_document


def arguments_of(tmp_path: Path, *words: str) -> argparse.Namespace:
    file = tmp_path / "spec.yaml"
    document = spec_document(model={"path": "made/{seed}/model"}, seed=5)
    file.write_text(json.dumps(document))
    return build_parser().parse_args(["run", str(file), *words])


class Fleet:
    """What is asked of a gateway that has some experiments."""

    def __init__(self, *known: ExperimentView) -> None:
        self.known, self.created = list(known), list[str]()

    def with_deadline(self, _seconds: float) -> "Fleet":
        return self

    async def experiments(self) -> list[ExperimentView]:
        return self.known

    async def create(self, document: Any, *, start: bool) -> ExperimentView:
        assert start
        self.created.append(document["name"])
        return a_view(id=f"{document['name']}-aa", name=document["name"])


def test_each_seed_has_a_name_a_seed_and_paths_of_its_own(tmp_path: Path) -> None:
    launches = launches_of(arguments_of(tmp_path, "--seeds", "3"), "tiny", 5)

    assert [each.spec.name for each in launches] == ["tiny-seed-5", "tiny-seed-6", "tiny-seed-7"]
    assert [each.spec.seed for each in launches] == [5, 6, 7]
    assert [Path(each.spec.model.path).parent.name for each in launches] == ["5", "6", "7"]


async def test_an_interrupted_command_creates_only_the_seeds_that_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(tmp_path, "--seeds", "2", "--continue")
    gone_on: list[str] = []

    async def go_on(_client: Any, experiment_id: str, *_: Any) -> ExperimentView:
        gone_on.append(experiment_id)
        return a_view(id=experiment_id, name="tiny-seed-5")

    monkeypatch.setattr(run_seeds, "go_on", go_on)
    directory = RunDirectory(tmp_path, "tiny")
    directory.take()
    fleet: Any = Fleet(a_view(id="tiny-seed-5-bb", name="tiny-seed-5"))

    views = await run_seeds.begun(fleet, launches_of(arguments, "tiny", 5), directory, tmp_path, arguments)
    directory.release()

    assert gone_on == ["tiny-seed-5-bb"] and fleet.created == ["tiny-seed-6"]
    assert [view.id for view in views] == ["tiny-seed-5-bb", "tiny-seed-6-aa"]
    assert directory.experiment_id == "tiny-seed-5-bb"
    assert "--seeds 2" in continue_command(arguments, name="tiny", default_name="tiny")


def test_the_figures_are_kept_and_one_failed_seed_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def a_run(seed: int, reward: float, state: ExperimentState) -> Progress:
        view = a_view(id=f"tiny-seed-{seed}", state=state, spec={"name": f"tiny-seed-{seed}", "seed": seed})
        return Progress(view, series={"reward/mean": Points([(4, 4, reward)])})

    runs = [a_run(0, 0.25, ExperimentState.COMPLETED), a_run(1, 0.75, ExperimentState.COMPLETED)]
    assert run_seeds.report(runs, tmp_path, 61.0) == 0
    found = json.loads((tmp_path / "seeds.json").read_text())["seeds"]["metrics"][0]
    assert (found["name"], found["spreads"][0]["mean"], found["spreads"][0]["num_runs"]) == ("reward/mean", 0.5, 2)
    assert "0.5 ± 0.3536 (2)" in capsys.readouterr().out

    runs[1].view = runs[1].view.model_copy(update={"state": ExperimentState.FAILED})
    assert run_seeds.report(runs, tmp_path, 61.0) == 1


@pytest.mark.parametrize("count", ["1", "0", "x", "65"])
def test_fewer_than_two_seeds_are_refused(count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(tmp_path, "--seeds", count)

    assert "must be a whole number from 2 to 64" in capsys.readouterr().err


class Scripted:
    """A gateway whose experiments are read in turn, each as the next of its views; the last one stays."""

    def __init__(self, **views: list[ExperimentView]) -> None:
        self.views = {name: iter(each) for name, each in views.items()}
        self.read: list[str] = []

    def run(self, name: str) -> Progress:
        progress = Progress(a_view(id=name, name=name, state=ExperimentState.STARTING))

        async def refresh(_client: Any) -> None:
            self.read.append(name)
            progress.view = next(self.views[name], progress.view)

        progress.refresh = refresh  # type: ignore[method-assign]
        return progress

    def check(self) -> None: ...


def seen(name: str, state: ExperimentState, **services: tuple[str, ...]) -> ExperimentView:
    return a_view(id=name, name=name, state=state, services=services)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_seeds, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(following, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(run_seeds, "PAUSED_SECONDS", 0.1)


@pytest.mark.usefixtures("_quick")
async def test_a_paused_seed_is_named_and_the_others_go_on_and_it_is_followed_again_once_it_is_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    states = ExperimentState
    paused, done = seen("a", states.PAUSED, trainer=("t",)), seen("b", states.COMPLETED)
    resumed = [seen("a", states.RUNNING, trainer=("t",)), seen("a", states.COMPLETED)]
    gateway: Any = Scripted(a=[paused] * 4 + resumed, b=[seen("b", states.RUNNING, trainer=("u",))] * 3 + [done])
    runs = [gateway.run("a"), gateway.run("b")]

    async with asyncio.timeout(20):
        left = await run_seeds.follow_all(runs, gateway, gateway, plain=True)

    assert left == [] and [run.view.state for run in runs] == [states.COMPLETED] * 2
    assert capsys.readouterr().out.count("flotilla resume a") == 1


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("other", [ExperimentState.PAUSED, ExperimentState.STARTING])
async def test_seeds_that_are_paused_or_wait_for_what_paused_ones_hold_are_not_waited_for_for_ever(
    other: ExperimentState,
) -> None:
    gateway: Any = Scripted(a=[seen("a", ExperimentState.PAUSED, trainer=("t",))], b=[seen("b", other)])
    runs = [gateway.run("a"), gateway.run("b")]

    async with asyncio.timeout(20):
        left = await run_seeds.follow_all(runs, gateway, gateway, plain=True)

    assert left == runs
    assert gateway.read.count("a") > 5, "somebody may have resumed it"


@pytest.mark.usefixtures("_quick")
async def test_a_run_that_is_followed_says_once_that_it_is_paused_and_how_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    states = [
        ExperimentState.RUNNING,
        *[ExperimentState.PAUSED] * 4,
        ExperimentState.RUNNING,
        ExperimentState.COMPLETED,
    ]
    gateway: Any = Scripted(a=[seen("a", state) for state in states])

    async with asyncio.timeout(20):
        await following.follow(gateway.run("a"), gateway, gateway, plain=True)

    assert capsys.readouterr().out.count("flotilla resume a") == 1
