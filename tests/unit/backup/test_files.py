"""Copies of a directory in which somebody writes."""

from pathlib import Path

import pytest

from flotilla.backup import files
from flotilla.backup.files import copy_experiment
from flotilla.shared.checkpoints.folders import complete
from tests.unit.gateway.stored import store_checkpoint


def test_whole_checkpoints_and_other_files_are_copied_and_no_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    store_checkpoint(source, 2, {})
    (source / "checkpoints" / "step-00000004").mkdir()
    (source / "metrics.jsonl").write_text("{}\n")
    (source / "link").symlink_to("/etc/passwd")

    copied = copy_experiment(source, tmp_path / "copy")

    names = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert [stored.step for stored in complete(tmp_path / "copy" / "checkpoints")] == [2]
    assert "metrics.jsonl" in names and "link" not in names
    assert copied > 0


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    store_checkpoint(source, 2, {})
    original = files._files

    def deleting(folder: Path, leave_out: Path | None) -> object:
        found = list(original(folder, leave_out))  # type: ignore[arg-type]
        if folder.name == "step-00000002":
            found[-1].unlink()
        return iter(found)

    monkeypatch.setattr(files, "_files", deleting)

    copy_experiment(source, tmp_path / "copy")

    assert list(complete(tmp_path / "copy" / "checkpoints")) == []
    assert not (tmp_path / "copy" / "checkpoints" / "step-00000002").exists()
