"""Saved models of the Tinker API on the disk: gone at once when they are deleted, whoever is killed meanwhile."""

import fcntl
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flotilla.services.gateway.tinker.saved import SavedModels
from flotilla.services.trainer.tinker import files
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import NotFound, Unavailable
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.tinker import locks
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


def test_files_are_removed_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = SavedModels(tmp_path, ManualClock())
    save(tmp_path)
    whole, free = shutil.rmtree, list[bool]()

    def noted(path: Path, **options: Any) -> None:
        monkeypatch.setattr(locks, "LOCK_SECONDS", 0.0)
        with locks.changing(tmp_path / "tinker" / "saved"):
            free.append(True)
        whole(path, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    models.delete(ME, PATH)

    assert free
    assert list(PATH.below(tmp_path).parent.iterdir()) == []


def test_a_save_that_fails_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = PATH.below(tmp_path)
    directory.mkdir(parents=True)
    slot: Any = SimpleNamespace(weights=lambda: {"w": torch.zeros(2)}, lora=None, step=1)
    saved = Saved(path=str(PATH), owner=ME.actor, created=0.0, step=1, num_bytes=1)
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.0)

    with locks.changing(tmp_path / "tinker" / "saved"), pytest.raises(Unavailable):
        files.save(directory, slot, "base", saved)

    assert list(directory.parent.iterdir()) == [directory]
    files.save(directory, slot, "base", saved)
    assert list(directory.parent.iterdir()) == [directory]


def test_what_expired_is_deleted_beside_a_folder_of_another_kind(tmp_path: Path) -> None:
    clock = ManualClock()
    models = SavedModels(tmp_path, clock)
    save(tmp_path, expires=clock.now() - 1)
    (tmp_path / "tinker" / "saved" / "lost+found").mkdir()

    assert models.delete_expired() == 1
    assert not PATH.below(tmp_path).exists()


def test_changes_at_once_lose_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = SavedModels(tmp_path, ManualClock())
    save(tmp_path)
    whole, dated = Path.write_text, threading.Thread(target=lambda: models.change(ME, PATH, expires=1e12))

    def late(path: Path, text: str, **options: Any) -> int:
        if not dated.ident:
            # The other change comes between what this one read and what it writes.
            dated.start()
            dated.join(0.2)
        return whole(path, text, **options)

    monkeypatch.setattr(Path, "write_text", late)
    models.change(ME, PATH, is_public=True)
    dated.join()

    found = models.read(ME, PATH)
    assert (found.is_public, found.expires) == (True, 1e12)


def test_what_got_another_date_meanwhile_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    models = SavedModels(tmp_path, clock)
    save(tmp_path, expires=clock.now() - 1)
    whole = locks.changing

    def dated_first(saved: Path) -> Any:
        manifest = PATH.below(tmp_path) / MANIFEST
        kept = Saved.model_validate_json(manifest.read_bytes()).model_copy(update={"expires": None})
        manifest.write_text(kept.model_dump_json())
        return whole(saved)

    monkeypatch.setattr("flotilla.services.gateway.tinker.saved.changing", dated_first)

    assert models.delete_expired() == 0
    assert models.read(ME, PATH).expires is None


def test_a_process_that_was_stopped_in_a_change_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.05)
    save(tmp_path)

    with (tmp_path / "tinker" / "saved" / locks.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Unavailable):
            SavedModels(tmp_path, ManualClock()).change(ME, PATH, is_public=True)
