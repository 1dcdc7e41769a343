"""Sizes of what an experiment left on the disk, and its end."""

import os
from pathlib import Path

import pytest

from flotilla.receipts import FOLDER
from flotilla.services.gateway.retention.pruning import remove, sizes_of
from flotilla.services.gateway.retention.references import KEPT
from flotilla.services.trainer.worker.session import UNSENT
from flotilla.shared.schemas.retention import Part


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make what an experiment left."""
    for name, size in {
        "checkpoints/step-00000001/w": 100,
        "samples/s": 30,
        "profiles/p": 5,
        "metrics.jsonl": 2,
    }.items():
        file = tmp_path / "e" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    return tmp_path / "e"


def test_each_part_is_counted(directory: Path) -> None:
    assert sizes_of(directory) == {Part.CHECKPOINTS: 100, Part.SAMPLES: 30, Part.LOGS: 7}
    assert sizes_of(directory / "gone") == {}


def test_what_a_fork_has_links_to_frees_nothing(directory: Path, tmp_path: Path) -> None:
    os.link(directory / "checkpoints/step-00000001/w", tmp_path / "forks")

    assert sizes_of(directory)[Part.CHECKPOINTS] == 0


@pytest.mark.parametrize("part", [Part.CHECKPOINTS, Part.SAMPLES, Part.LOGS])
def test_one_part_goes_and_the_others_stay(directory: Path, part: Part) -> None:
    before = sizes_of(directory)

    remove(directory, part)

    assert sizes_of(directory) == {name: size for name, size in before.items() if name is not part}
    remove(directory, part)


def test_a_run_goes_with_its_directory(directory: Path) -> None:
    remove(directory, Part.RUN)

    assert not directory.exists()
    remove(directory, Part.RUN)


@pytest.mark.parametrize("part", [Part.CHECKPOINTS, Part.RUN])
def test_nothing_behind_a_link_is_counted_or_deleted(directory: Path, tmp_path: Path, part: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"x" * 1000)
    (directory / "checkpoints" / "link").symlink_to(kept)
    (directory / "wandb").symlink_to(kept)

    assert sum(sizes_of(directory).values()) == 137
    remove(directory, part)

    assert (kept / "file").exists()


def test_receipts_and_unsent_metrics_go_with_the_run_alone(directory: Path) -> None:
    (directory / "receipts").mkdir()
    (directory / "receipts" / "step-00000001.json").write_text("signed")
    (directory / UNSENT).write_text("{}")
    kept = {"receipts", UNSENT}

    for part in (Part.CHECKPOINTS, Part.SAMPLES, Part.LOGS):
        remove(directory, part)

    assert {path.name for path in directory.iterdir()} == kept == KEPT
    assert FOLDER in kept
    assert sizes_of(directory) == {Part.RUN: 8}
    remove(directory, Part.RUN)
    assert not directory.exists()
