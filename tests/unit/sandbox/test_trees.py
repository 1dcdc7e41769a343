"""Removing what a program has made."""

import os
from pathlib import Path

from services.sandbox.trees import remove_tree


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
