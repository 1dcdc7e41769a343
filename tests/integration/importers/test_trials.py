"""Imported launch files of each class of recipes train two steps, scaled down as ``flotilla import --try`` does.

One goes through the command itself. The others share a fleet, and take turns with other long tests.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.commands.trial import write_trial
from flotilla.launch_file import read_launch_file, run_prepare
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView
from flotilla.trial_run.agent import play_trial
from flotilla.trial_run.scaling import Trial
from tests.fleet import RunningFleet, running_fleet
from tests.unit.trial_run.recipes import FILES, FOLDER, trial_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

BY_DAY = "openrlhf_reinforce.sh"
"""Through the command: a grader that is not here, a filter of groups, KL, messages."""
SECONDS = 400


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    allowed = str(tmp_path_factory.getbasetemp())
    data = tmp_path_factory.mktemp("fleet") / "data"
    with running_fleet(data, sandbox=True, FLOTILLA_CODE_FOLDERS=allowed) as running:
        yield running


def test_the_command_trains_two_steps_says_what_it_changed_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    code = main(["import", "openrlhf", str(FOLDER / BY_DAY), "--rows", "10000", "--try"])

    out = capfd.readouterr().out
    assert code == 0, out
    assert "same signature" in out and "rewards/check.py" in out
    assert "\ntried      2 of 2 steps" in out
    assert list(temporary.iterdir()) == []
    ended = out[out.index("this command took") :]
    assert "flotilla-try-" not in ended, "what is gone is named nowhere"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FILES if name != BY_DAY])
def test_a_recipe_of_each_class_trains_two_steps(name: str, fleet: RunningFleet, tmp_path: Path) -> None:
    trial = trial_of(name, tmp_path)

    view = asyncio.run(trained(fleet, trial, tmp_path))

    assert (view.state, view.step) == (ExperimentState.COMPLETED, 2), view


async def trained(fleet: RunningFleet, trial: Trial, folder: Path) -> ExperimentView:
    """Run a trial on a fleet that is there."""
    write_trial(trial, folder)
    launch = read_launch_file(folder / "spec.yaml")
    await run_prepare(launch, print)
    async with asyncio.timeout(SECONDS), fleet.client() as client:
        made = ExperimentView.model_validate(await client.call("POST", "/v1/experiments", body=launch.document))
        await client.call("POST", f"/v1/experiments/{made.id}/start")
        playing = None
        if launch.spec.rollout.agents is not None:
            playing = asyncio.create_task(play_trial(fleet.url, fleet.token, made.id, None))
        try:
            while True:
                view = ExperimentView.model_validate(await client.call("GET", f"/v1/experiments/{made.id}"))
                if view.state.is_final:
                    return view
                await asyncio.sleep(0.2)
        finally:
            if playing is not None:
                playing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await playing
