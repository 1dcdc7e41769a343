"""What is copied into a box stays in it, whatever a task's folders hold."""

from pathlib import Path, PurePosixPath

import pytest

from flotilla.agents import box as boxes
from flotilla.agents.box import Box, furnish
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


@pytest.mark.parametrize("target", ["/app", "/"])
def test_a_file_that_goes_into_a_folder_does_not_go_through_a_link_there(
    tmp_path: Path, box: Path, target: str
) -> None:
    (tmp_path / "outside").write_text("ours")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "file").symlink_to(tmp_path / "outside")
    (tmp_path / "file").write_text("hostile")

    with pytest.raises(InvalidSpec, match="through a link"):
        furnish(box, [(tmp_path / "links", PurePosixPath(target)), (tmp_path / "file", PurePosixPath(target))])

    assert (tmp_path / "outside").read_text() == "ours"


def test_a_file_for_a_folder_that_is_there_goes_into_it(tmp_path: Path, box: Path) -> None:
    (tmp_path / "file").write_text("1")

    furnish(box, [(tmp_path / "file", PurePosixPath("/tmp"))])

    assert (box / "root/tmp/file").read_text() == "1"


def test_a_copy_for_which_something_else_is_there_is_refused_and_not_tried_for_ever(tmp_path: Path, box: Path) -> None:
    (tmp_path / "folder" / "name").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "name").write_text("1")

    with pytest.raises(InvalidSpec, match="folder cannot be copied to /app"):
        furnish(box, [(tmp_path / each, PurePosixPath("/app")) for each in ("other", "folder")])


@pytest.mark.parametrize("secret", ["/etc/ssl/private/key.pem", "/etc/pki/tls/private/key.pem", "/etc/shadow"])
def test_keys_of_this_machine_are_not_in_a_box(box: Path, secret: str) -> None:
    words = boxes._arguments(box, (), is_closed=False)

    bound = [Path(words[at + 1]) for at, word in enumerate(words) if word in {"--ro-bind", "--ro-bind-try", "--bind"}]
    assert [each for each in bound if Path(secret).is_relative_to(each)] == []
    assert Path("/etc/ssl/certs") in bound


def test_what_an_agent_leaves_without_rights_is_cleared_and_removed(box: Path) -> None:
    furnish(box, [])
    left = box / "verifier" / "reward.json" / "deep"
    left.mkdir(parents=True)
    (left / "file").write_text("1")
    for each in (left, left.parent, box / "verifier"):
        each.chmod(0o500 if each != left.parent else 0)
    (box / "root" / "cache").mkdir()
    (box / "root" / "cache" / "file").write_text("1")
    (box / "root" / "cache").chmod(0o500)

    Box(box, None).clear("verifier", "reward.json")  # type: ignore[arg-type]

    assert list((box / "verifier").iterdir()) == []
    boxes._remove(box)
    assert not box.exists()
