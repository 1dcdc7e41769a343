"""A checkpoint is whole or not there."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.trainer.checkpoint.manager import CheckpointState, check_same_lineage
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.shared.checkpoints.folders import complete
from flotilla.shared.config.sections.checkpoint import BestCheckpointsConfig
from flotilla.shared.errors import ModelError, Unavailable
from tests.unit.trainer.builders import a_spec


def a_state(step: int, files: dict[str, int] | None = None, **fields: Any) -> CheckpointState:
    defaults: dict[str, Any] = {
        "experiment_id": "e",
        "step": step,
        "version": step,
        "updates": step,
        "trained": [[0, step]],
        "seed": 0,
        "kl_coefficient": None,
        "totals": {},
        "spec": a_spec().model_dump(mode="json"),
        "software": {},
        "files": files or {},
    }
    return CheckpointState(**(defaults | fields))


def write(storage: CheckpointStorage, step: int, content: bytes = b"weights", figure: float | None = None) -> Path:
    def fill(directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "weights").write_bytes(content)

    return storage.write(step, fill, lambda files: a_state(step, files, figure=figure))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "checkpoints", keep=2)

    for step in (20, 40, 60):
        write(storage, step)

    assert names(tmp_path / "checkpoints") == ["step-00000040", "step-00000060"]
    newest = next(iter(storage.complete()), None)
    assert newest is not None
    assert (newest.step, newest.state.trained) == (60, [[0, 60]])


@pytest.mark.parametrize(("mode", "kept"), [("max", (20, 60)), ("min", (30, 40))])
def test_the_best_ones_are_kept_beside_the_newest(tmp_path: Path, mode: Any, kept: tuple[int, ...]) -> None:
    storage = CheckpointStorage(tmp_path, keep=1, best=BestCheckpointsConfig(keep=2, mode=mode))

    for step, figure in ((10, None), (20, 0.9), (30, 0.2), (40, 0.2), (50, 0.5), (60, 0.9), (70, 0.8), (80, 1.0)):
        write(storage, step, figure=figure)

    # The newest stays as such; of the others those with the best figures, and none without a figure.
    assert names(tmp_path) == [f"step-{step:08d}" for step in (*kept, 80)]


@pytest.mark.parametrize("damage", ["truncated file", "missing file", "missing state", "torn state"])
def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    storage = CheckpointStorage(tmp_path, keep=2)
    write(storage, 20)
    path = write(storage, 40)
    match damage:
        case "truncated file":
            (path / "model" / "weights").write_bytes(b"wei")
        case "missing file":
            (path / "model" / "weights").unlink()
        case "missing state":
            (path / "state.json").unlink()
        case "torn state":
            (path / "state.json").write_text((path / "state.json").read_text()[:50])

    newest = next(iter(storage.complete()), None)

    assert newest is not None
    assert newest.step == 20


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path, keep=2)
    write(storage, 20)

    def fill(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unavailable, match=r"step 40 could not be written: the disk of .* is full"):
        storage.write(40, fill, lambda files: a_state(40, files))

    assert names(tmp_path) == ["step-00000020"]


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path, keep=2)
    write(storage, 20)
    (tmp_path / ".step-00000040.0badcafe").mkdir()
    (tmp_path / "notes").mkdir()

    storage.sweep()

    assert names(tmp_path) == ["notes", "step-00000020"]


def test_a_crash_between_two_checkpoints_of_a_step_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(tmp_path, keep=1)
    write(storage, 20, b"old")
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if self.name.startswith(".step-"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            write(storage, 20, b"new")
    storage.sweep()

    assert names(tmp_path) == ["step-00000020"]
    assert [each.step for each in storage.complete()] == [20]


def test_a_checkpoint_that_cannot_get_its_name_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(tmp_path, keep=1)
    path = write(storage, 20, b"old")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".step-") and "replaced" not in self.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails)
        with pytest.raises(Unavailable, match="is full"):
            write(storage, 20, b"new")

    assert names(tmp_path) == ["step-00000020"]
    assert (path / "model" / "weights").read_bytes() == b"old"


def test_what_a_later_trainer_sweeps_beside_its_writer_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(tmp_path, keep=2)

    def remove_files(path: Path, ignore_errors: bool) -> None:
        for each in Path(path).rglob("*"):
            if each.is_file():
                each.unlink()

    def fill(directory: Path) -> None:
        (directory / "weights").write_bytes(b"weights")
        with monkeypatch.context() as patched:
            # It has come as far as the folder's files when the other writes its next one.
            patched.setattr("shutil.rmtree", remove_files)
            CheckpointStorage(tmp_path, keep=2).sweep()
        (directory / "moments").write_bytes(b"moments")

    with pytest.raises(Unavailable, match="step 20 could not be written"):
        storage.write(20, fill, lambda files: a_state(20, files))

    assert list(storage.complete()) == []


def test_every_folder_above_a_checkpoint_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[str]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = write(CheckpointStorage(tmp_path / "experiments" / "e" / "checkpoints", keep=2), 20)

    assert {str(each) for each in list(path.parents)[:3]} <= set(flushed)


def test_a_step_is_written_again(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path, keep=2)
    write(storage, 20, b"old")

    path = write(storage, 20, b"new")

    assert (path / "model" / "weights").read_bytes() == b"new"
    assert names(tmp_path) == ["step-00000020"]


def test_a_checkpoint_of_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model.path '/nowhere', the spec now says '/elsewhere'"):
        check_same_lineage(a_state(20), a_spec(model={"path": "/elsewhere"}))


def test_a_changed_learning_rate_goes_on() -> None:
    check_same_lineage(
        a_state(20), a_spec(optimisation={"learning_rate": 1e-5, "steps": 500, "groups_per_mini_batch": 4})
    )


def test_an_earlier_release_reads_a_checkpoint_in_which_later_keys_hold_nothing(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path, keep=1)
    earlier = CheckpointState.model_fields.keys() - {"changes", "reward_moments", "curriculum", "closed"}

    assert json.loads((write(storage, 1) / "state.json").read_text()).keys() == earlier

    def describe(files: dict[str, int]) -> CheckpointState:
        return a_state(2, files, reward_moments=(8, 0.5, 0.25))

    path = storage.write(2, lambda directory: (directory / "weights").touch(), describe)
    assert json.loads((path / "state.json").read_text())["reward_moments"] == [8, 0.5, 0.25]


def test_a_checkpoint_of_a_newer_release_is_no_incomplete_one(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path, keep=2, best=BestCheckpointsConfig(keep=1))
    write(storage, 1)
    file = write(storage, 2) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tides": 3}))

    with pytest.raises(ModelError, match=r"step-00000002 was written by a newer release .* does not know tides"):
        next(storage.complete())
    assert [each.step for each in complete(tmp_path, only=1)] == [1]
    for step in (3, 4):
        write(storage, step, figure=0.5)
    assert next(storage.complete()).step == 4
