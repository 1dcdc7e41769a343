"""What is copied into a box stays in it, whatever a task's folders hold."""

from pathlib import Path, PurePosixPath

import pytest

from flotilla.agents.box import furnish
from flotilla.shared.errors import InvalidSpec


@pytest.fixture
def box(tmp_path: Path) -> Path:
    (tmp_path / "box").mkdir()
    return tmp_path / "box"


def test_files_folders_and_links_are_copied(tmp_path: Path, box: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "one").write_text("1")
    (source / "link").symlink_to("/etc/hostname")

    furnish(box, [(source, PurePosixPath("/app")), (source / "deep", PurePosixPath("/app"))])

    assert (box / "root/app/deep/one").read_text() == (box / "root/app/one").read_text() == "1"
    assert (box / "root/app/link").is_symlink()


@pytest.mark.parametrize("target", ["/app/../../../outside", "/way/file", "/way"])
def test_nothing_is_written_outside(tmp_path: Path, box: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "way").symlink_to(tmp_path / "outside")
    (tmp_path / "file").write_text("hostile")

    with pytest.raises(InvalidSpec, match="leads out of the box, or through a link"):
        furnish(box, [(tmp_path / "links", PurePosixPath("/")), (tmp_path / "file", PurePosixPath(target))])

    assert list((tmp_path / "outside").iterdir()) == []


def test_a_folder_does_not_go_through_a_link_of_an_earlier_one(tmp_path: Path, box: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sub").symlink_to(tmp_path / "outside")
    (tmp_path / "second" / "sub").mkdir(parents=True)
    (tmp_path / "second" / "sub" / "file").write_text("hostile")

    with pytest.raises(InvalidSpec):
        furnish(box, [(tmp_path / name, PurePosixPath("/app")) for name in ("first", "second")])

    assert list((tmp_path / "outside").iterdir()) == []
