"""The real client of the Tinker API, in an environment of its own, against a whole fleet."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.fleet import tinker_key
from tests.fleet import RunningFleet, running_fleet, tiny_model, until

pytestmark = [pytest.mark.tinker, pytest.mark.slow]

HERE = Path(__file__).parent
SECONDS = 240.0
STEPS = 20
TRAINER, SAMPLER = "flotilla.services.trainer.tinker", "flotilla.services.rollout.tinker"
GATEWAY = "flotilla.services.gateway"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("tinker") / "fleet", tinker=tiny_model()) as found:
        yield found


class Loop:
    """A loop of the client, in a process of its own."""

    def __init__(self, fleet: RunningFleet, kind: str, log: Path) -> None:
        self._log = log
        arguments = [fleet.url, tinker_key(fleet.token), str(tiny_model()), kind, str(STEPS)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python(), str(HERE / "loop.py"), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def lines(self) -> list[dict[str, Any]]:
        found = self._log.read_text().splitlines()
        return [json.loads(line) for line in found if line.startswith("{") and line.endswith("}")]

    def reaches(self, step: int) -> None:
        until(
            lambda: any(line.get("step", -1) >= step for line in self.lines()) or self._ended(), SECONDS, f"step {step}"
        )

    def _ended(self) -> bool:
        code = self._process.poll()
        assert code in {None, 0}, self._log.read_text()
        return code == 0

    def finish(self) -> list[dict[str, Any]]:
        assert self._process.wait(SECONDS) == 0, self._log.read_text()
        return [line for line in self.lines() if "step" in line]

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def python() -> str:
    found = os.environ.get("FLOTILLA_TINKER_PYTHON")
    if not found:
        pytest.fail("FLOTILLA_TINKER_PYTHON must be the interpreter that has the client: make test-tinker sets it")
    return found


def test_the_client_asks_for_everything_that_is_served(fleet: RunningFleet) -> None:
    command = [python(), str(HERE / "all_verbs.py"), fleet.url, tinker_key(fleet.token), str(tiny_model())]

    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)

    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("loop", ["sl_loop", "rl_loop"])
def test_loops_of_the_cookbook_run_as_they_are(fleet: RunningFleet, loop: str, tmp_path: Path) -> None:
    arguments = [fleet.url, tinker_key(fleet.token), str(tiny_model()), loop, str(tmp_path / "log")]
    command = [python(), str(HERE / "cookbook.py"), *arguments]

    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)

    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    saved = [json.loads(line) for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert all(line["grad_norm"] > 0 for line in lines)
    assert saved[-1]["sampler_path"].endswith("sampler_weights/final")
    if loop == "sl_loop":
        assert lines[-1]["train_mean_nll"] < 0.8 * lines[0]["train_mean_nll"]


@pytest.mark.timeout(600)
def test_trainers_of_the_cookbook_learn(fleet: RunningFleet, tmp_path: Path) -> None:
    """The distilled one learns from what the supervised one saved."""
    arguments = [fleet.url, tinker_key(fleet.token), str(tiny_model()), str(tmp_path)]
    command = [python(), str(HERE / "cookbook_trainers.py"), *arguments]

    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, check=False)

    assert found.returncode == 0, found.stderr[-6000:]
    figures = {"supervised": "train_mean_nll", "reinforced": "env/all/reward/total", "distilled": "teacher_kl"}
    for kind, figure in figures.items():
        lines = [json.loads(line) for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        values = [line[figure] for line in lines if figure in line]
        first, last = sum(values[:4]), sum(values[-4:])
        assert len(values) >= 14, (kind, lines[0].keys())
        assert last > 1.05 * first if kind == "reinforced" else last < 0.8 * first, (kind, values)


@pytest.mark.parametrize("kind", ["supervised", "reinforced"])
def test_a_loop_ends_with_the_same_losses_whoever_is_killed_meanwhile(
    fleet: RunningFleet, kind: str, tmp_path: Path
) -> None:
    quiet = Loop(fleet, kind, tmp_path / "quiet.log")
    try:
        expected = quiet.finish()
    finally:
        quiet.end()
    loop = Loop(fleet, kind, tmp_path / "killed.log")

    try:
        for step, name in ((2, TRAINER), (6, GATEWAY), (11, SAMPLER), (14, TRAINER)):
            loop.reaches(step)
            fleet.kill(name)
        found = loop.finish()
    finally:
        loop.end()

    assert [line["step"] for line in found] == list(range(STEPS))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-5, abs=1e-5)
    if kind == "supervised":
        assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    else:
        assert sum(line["reward"] for line in found[-4:]) > sum(line["reward"] for line in found[:4])
