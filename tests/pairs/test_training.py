"""Each row of the trainer's table trains, is interrupted, and goes on as if it had not been."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flotilla.services.gateway.lifecycle.origins import check_spec, find, take
from flotilla.services.trainer.checkpoint.manager import CheckpointManager
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from tests.fleet import tiny_model
from tests.pairs.covering import Case, Row, covering_rows
from tests.pairs.documents import spec_of
from tests.pairs.table import FORK_REFUSED, MODEL, OLD, TRAINER, TRAINER_REFUSED, TRAINER_STATES
from tests.pairs.training import Training

STEPS = 3
LEAST = 2000
"""Bytes: less than a matrix of the model takes."""
ROWS = covering_rows(
    {name: list(values) for name, values in TRAINER.items()},
    TRAINER_STATES.values(),
    [*TRAINER_REFUSED, *FORK_REFUSED],
)
DEFAULTS: Row = {name: next(iter(values)) for name, values in TRAINER.items()}


def told(row: Row) -> str:
    """Name a row by what is not as usual."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if value != DEFAULTS[name]) or "as usual"


def a_spec(row: Row, folder: Path, *, steps: int = STEPS, is_fork: bool = False) -> ExperimentSpec:
    event = row["event"] if is_fork or row["event"] in {"killed", "extended"} else "killed"
    places = {MODEL: str(tiny_model()), OLD: str(folder / "old")}
    changes = {"model": {"path": str(tiny_model())}, "optimisation": {"steps": steps}}
    return spec_of(row | {"event": event}, TRAINER, places, **changes)


def manager_in(folder: Path, name: str) -> CheckpointManager:
    return CheckpointManager(name, CheckpointStorage(folder / name / "checkpoints", keep=2))


@contextmanager
def a_training(row: Row, spec: ExperimentSpec, folder: Path, name: str, *, is_twin: bool = False) -> Iterator[Training]:
    images = folder / "images"
    images.mkdir(exist_ok=True)
    training = Training(spec, manager_in(folder, name), images, takes_turns=row["turns"] == "taken" and not is_twin)
    try:
        yield training
    finally:
        training.close()


def after_interruption(row: Row, folder: Path) -> tuple[str, ExperimentSpec]:
    """Let an experiment end as the row's event has it, and say what goes on."""
    is_extended = row["event"] == "extended"
    spec = a_spec(row, folder, steps=STEPS - 1 if is_extended else STEPS)
    with a_training(row, spec, folder, "old") as training:
        training.train_to(STEPS - 1 if is_extended else 1)
        training.save()
    if row["event"] in {"killed", "extended"}:
        return "old", a_spec(row, folder)
    forked = a_spec(row, folder, is_fork=True)
    stored = find(folder / "old", None)
    check_spec(stored, forked)
    take(stored, forked, "new", folder / "new")
    return "new", forked


def keeps_moments(row: Row) -> bool:
    """Whether the checkpoint that training goes on from has, and gives, all that it was written from."""
    without = {"weights", "no optimiser"} | ({"weights at the end"} if row["event"] == "extended" else set())
    return row["contents"] not in without and row["event"] != "forked without moments"


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_training_that_was_interrupted_goes_on_as_if_it_had_not_been(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(told(row))
    monkeypatch.setattr("flotilla.services.trainer.models.offloading.LEAST_BYTES", LEAST)
    name, spec = after_interruption(row, tmp_path)
    is_extended = row["event"] == "extended"
    whole = a_spec(row, tmp_path, steps=STEPS - 1 if is_extended else STEPS)
    with a_training(row, whole, tmp_path, "twin", is_twin=True) as twin, a_training(row, spec, tmp_path, name) as found:
        step = found.progress.step
        assert step == (STEPS - 1 if is_extended else 1)
        twin.train_to(step)
        kept, state = twin.state(), found.state()
        assert found.learner.optimizer.updates == twin.learner.optimizer.updates
        if keeps_moments(row):
            assert state.keys() == kept.keys()
        found.train_to(STEPS)
        assert all(torch.isfinite(torch.tensor(list(each.values()))).all() for each in found.figures.metrics.values())
        for each in state if keeps_moments(row) else [n for n in state if n.startswith("weight/")]:
            assert torch.equal(state[each], kept[each]), each
        if keeps_moments(row) and not (is_extended and row["schedule"] != "constant"):
            twin.train_to(STEPS)
            for number in range(step + 1, STEPS + 1):
                assert found.figures.metrics[number] == twin.figures.metrics[number]
            images, expected_images = found.figures.images, twin.figures.images
            assert all(images[number] == expected_images[number] for number in images.keys() & expected_images.keys())
            ended, expected = found.state(), twin.state()
            assert all(torch.equal(ended[each], expected[each]) for each in expected)


@pytest.mark.parametrize("cases", FORK_REFUSED, ids=lambda cases: " ".join(map(" ".join, sorted(cases))))
def test_a_fork_that_lacks_what_it_goes_on_with_is_refused_by_name(cases: frozenset[Case], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refusal:
        after_interruption(DEFAULTS | dict(cases), tmp_path)

    assert all(name in str(refusal.value) for name in FORK_REFUSED[cases])
