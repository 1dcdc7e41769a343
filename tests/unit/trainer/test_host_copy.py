"""A checkpoint that was copied into memory is, byte for byte, the one that would have been written in its place."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flotilla.services.trainer.checkpoint import host_copy
from flotilla.services.trainer.checkpoint.files import shared_files
from flotilla.services.trainer.checkpoint.host_copy import HostCopy
from flotilla.services.trainer.checkpoint.manager import CheckpointManager, Progress, beginning, copy_alone, fill_alone
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.checkpoints.folders import MODEL
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.errors import Unavailable
from tests.fleet import tiny_model
from tests.unit.trainer.builders import a_spec, uneven_groups

CPU = torch.device("cpu")


def a_learner(*, steps: int = 1, **sections: object) -> Learner:
    settings = {"steps": 5, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "average_decay": 0.9}
    spec = a_spec(model={"path": str(tiny_model())}, optimisation=settings, **sections)
    learner = beginning(spec, CPU).learner
    for step in range(1, steps + 1):
        learner.train(uneven_groups(2, seed=step), step)
    return learner


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}


def copy_of(learner: Learner) -> HostCopy:
    copy = copy_alone(learner)
    assert copy is not None
    return copy


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"advantage": {"kind": "gae"}}, {"old_log_probs": "recompute_at_version"}],
    ids=["policy", "critic", "versions"],
)
def test_what_is_trained_after_the_copy_is_not_in_it(tmp_path: Path, algorithm: dict[str, object]) -> None:
    learner = a_learner(algorithm=algorithm)
    for name in ("at once", "copied"):
        (tmp_path / name).mkdir()
    fill_alone(learner, tmp_path / "at once")

    copy = copy_of(learner)
    learner.train(uneven_groups(2, seed=2), 2)
    copy.write(tmp_path / "copied")

    written = bytes_of(tmp_path / "at once")
    assert bytes_of(tmp_path / "copied") == written
    assert {f"{MODEL}/model.safetensors", f"{MODEL}/config.json", f"{MODEL}/tokenizer.json"} < written.keys()
    assert copy.num_bytes == 0


def test_before_the_first_update_there_is_no_optimiser_state(tmp_path: Path) -> None:
    copy_of(a_learner(steps=0)).write(tmp_path)

    assert load_file(tmp_path / "optimizer.safetensors") == {}


def test_persistent_buffers_are_written(tmp_path: Path) -> None:
    learner = a_learner()
    layer = learner.loaded.model.get_submodule("model.layers.0.mlp")
    layer.register_buffer("correction", torch.arange(3.0))
    layer.register_buffer("derived", torch.ones(2), persistent=False)

    copy_of(learner).write(tmp_path)

    found = load_file(tmp_path / MODEL / "model.safetensors")
    assert torch.equal(found["model.layers.0.mlp.correction"], torch.arange(3.0))
    assert "model.layers.0.mlp.derived" not in found
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[weight], learner.loaded.model.get_parameter(weight))


def test_no_copy_is_made_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = a_learner()
    wanted = sum(each.layout.image_bytes for each in shared_files(learner) if each.layout is not None)

    monkeypatch.setattr(host_copy, "available_bytes", lambda: 2 * wanted - 1)
    assert copy_alone(learner) is None
    monkeypatch.setattr(host_copy, "available_bytes", lambda: 2 * wanted)
    copy = copy_of(learner)
    assert copy.num_bytes == wanted
    copy.close()


@pytest.fixture(scope="module")
def trained() -> Learner:
    return a_learner()


WRITES = {
    "os.posix_fallocate": [False],
    "os.pwrite": [True, False],
    "os.memfd_create": [True],
    "os.truncate": [True],
    "os.sendfile": [True],
    "os.fsync": [True, False],
    "shutil.copyfile": [True, False],
    "pathlib.Path.mkdir": [True, False],
    "pathlib.Path.write_text": [True, False],
    "pathlib.Path.rename": [True, False],
    "transformers.PreTrainedConfig.to_json_file": [True, False],
}
"""What a checkpoint is written by, and whether that is a copy's, that of one that is written at once, or both."""


@pytest.mark.parametrize(
    ("write", "is_copied"), [(name, each) for name, kinds in WRITES.items() for each in kinds], ids=str
)
def test_wherever_the_disk_is_full_nothing_remains_and_the_next_one_is_whole(
    write: str, is_copied: bool, trained: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(tmp_path / "checkpoints", keep=1)
    manager, progress = CheckpointManager("e", storage), Progress.start()
    line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=9)

    def save(step: int) -> None:
        progress.step = step
        if not is_copied:
            manager.save(trained, progress, line)
        elif (copied := manager.copy(trained, progress, line)) is not None:
            manager.write(copied)

    save(1)
    before = bytes_of(storage.directory)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(write, full)
        with pytest.raises(Unavailable, match=r"full|No space left"):
            save(2)
    assert [each.name for each in storage.directory.iterdir()] == ["step-00000001"]
    assert bytes_of(storage.directory) == before
    assert not [each for each in Path("/proc/self/fd").iterdir() if "flotilla-checkpoint" in _link_of(each)]

    save(3)

    assert [each.step for each in storage.complete()] == [3]


def _link_of(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # of the listing itself
        return ""


def test_a_copy_that_cannot_be_written_leaves_no_memory_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of(a_learner())
    descriptors = [int(path.name) for path in copy.paths.values()]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(OSError, match="No space left"):
        copy.write(tmp_path)
    copy.close()

    for number in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
