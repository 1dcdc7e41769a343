"""Removing what a program has made."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla.services.sandbox.trees import (
    FEW,
    LOCK,
    PREFIX,
    SMALL_BYTES,
    own_directory,
    remove_if_small,
    remove_tree,
    sweep_groups,
    sweep_leftovers,
)
from flotilla.shared.host.control_groups import Mounts


def test_any_depth_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("flotilla-1", dir_fd=here)
        inner = os.open("flotilla-1", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)

    remove_tree(top)

    assert not top.exists()


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "work"
    outside.mkdir(mode=0o755)
    (outside / "file").touch()
    (top / "inner").mkdir(parents=True)
    (top / "link").symlink_to(outside)
    (top / "inner" / "link").symlink_to(outside)
    os.mkfifo(top / "inner" / "pipe")
    (top / "inner").chmod(0)

    remove_tree(top)

    assert not top.exists()
    assert (outside / "file").exists()
    assert outside.stat().st_mode & 0o777 == 0o755


def test_nothing_to_remove_is_no_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "work")


def test_a_few_small_files_are_removed_at_once(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "work"
    outside.touch()
    top.mkdir()
    (top / "file").write_text("x")
    (top / "link").symlink_to(outside)
    os.mkfifo(top / "pipe")

    assert remove_if_small(top)

    assert not top.exists()
    assert outside.exists()


@pytest.mark.parametrize(
    "fill",
    [
        lambda top: (top / "directory").mkdir(),
        lambda top: (top / "large").write_bytes(bytes(SMALL_BYTES)),
        lambda top: [(top / str(number)).touch() for number in range(FEW + 1)],
    ],
    ids=["a directory", "a large file", "many files"],
)
def test_what_takes_longer_is_left_to_a_thread(tmp_path: Path, fill: Callable[[Path], object]) -> None:
    fill(tmp_path)

    assert not remove_if_small(tmp_path)

    remove_tree(tmp_path)


def a_directory(parent: Path, name: str, *, has_lock: bool = True) -> Path:
    directory = parent / f"{PREFIX}{name}"
    (directory / "slot-0" / "work").mkdir(parents=True)
    if has_lock:
        (directory / LOCK).touch()
    return directory


def test_only_what_nobody_uses_is_removed(tmp_path: Path) -> None:
    left, used = a_directory(tmp_path, "left"), a_directory(tmp_path, "used")
    made = a_directory(tmp_path, "just-made", has_lock=False)
    holder = os.open(used / LOCK, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)

    sweep_leftovers(tmp_path)

    assert (left.exists(), used.exists(), made.exists()) == (False, True, True)
    os.close(holder)


def test_a_directory_is_ones_own_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with own_directory() as first, own_directory() as second:
        assert first.exists()
        assert first != second

    assert list(tmp_path.iterdir()) == []


def test_only_empty_groups_of_services_that_live_no_more_are_removed(tmp_path: Path) -> None:
    dead = 2**22 + 1  # no kernel gives a process such a number
    names = {
        "left": f"flotilla-sandbox-{dead}-3-0123abcd",
        "left by an older one": f"flotilla-sandbox-{dead}-0123abcd",
        "of a service that lives": f"flotilla-sandbox-{os.getpid()}-3-0123abcd",
        "in use": f"flotilla-sandbox-{dead}-4-0123abcd",
        "the service's own": "flotilla-sandbox-service",
        "another's": "docker",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
    (tmp_path / names["in use"] / "process").touch()

    sweep_groups(Mounts({"memory": tmp_path, "cpu": tmp_path / "nowhere"}, None))

    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == {"of a service that lives", "in use", "the service's own", "another's"}
