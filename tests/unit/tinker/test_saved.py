"""Saved models of the Tinker API on the disk: gone at once when they are deleted, whoever is killed meanwhile."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.tinker.saved import SavedModels
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import NotFound
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.records import MANIFEST, Saved

ME = Principal(Scope.TINKER, "me")
PATH = SavedPath("s:train:0", Kind.TRAINING, "a")


def save(data: Path, expires: float | None = None) -> None:
    directory = PATH.below(data)
    directory.mkdir(parents=True)
    saved = Saved(path=str(PATH), owner=ME.actor, created=0.0, step=1, num_bytes=1, expires=expires)
    (directory / MANIFEST).write_text(saved.model_dump_json(), encoding="utf-8")


def killed(path: Path, **_: Any) -> None:
    if path.exists():
        raise KeyboardInterrupt


def test_what_is_deleted_is_gone_before_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = SavedModels(tmp_path, ManualClock())
    save(tmp_path)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        models.delete(ME, PATH)

    with pytest.raises(NotFound):
        models.read(ME, PATH)
    assert models.of_run(PATH.run) == []


def test_what_expired_is_deleted_beside_a_folder_of_another_kind(tmp_path: Path) -> None:
    clock = ManualClock()
    models = SavedModels(tmp_path, clock)
    save(tmp_path, expires=clock.now() - 1)
    (tmp_path / "tinker" / "saved" / "lost+found").mkdir()

    assert models.delete_expired() == 1
    assert not PATH.below(tmp_path).exists()
