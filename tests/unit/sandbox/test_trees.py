"""Removing what a program has made."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla.services.sandbox.trees import FEW, SMALL_BYTES, remove_if_small, remove_tree


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
