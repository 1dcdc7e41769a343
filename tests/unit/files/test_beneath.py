"""No name and no link leads out of the folder that a file is opened below."""

import os
from pathlib import Path

import pytest

from flotilla.shared.files.beneath import Outside, link_to, open_beneath, read_beneath, sizes_beneath

SECRET = "the gateway's token"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file in a folder, beside a secret."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "config.json").write_text("{}")
    return tmp_path / "own"


def test_a_file_below_the_folder_is_read(folder: Path) -> None:
    with read_beneath(folder, "model/config.json") as file:
        assert file.read() == b"{}"


@pytest.mark.parametrize(
    "name", ["../secret", "model/../../secret", "/etc/passwd", "", ".", "model//config.json", "a\0"]
)
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(Outside, match="no plain name"):
        read_beneath(folder, name)


def test_no_link_is_followed_at_any_component(folder: Path) -> None:
    (folder / "token").symlink_to(folder.parent / "secret")
    (folder / "up").symlink_to(folder.parent)
    (folder / "model" / "same").symlink_to("config.json")

    for name in ("token", "up/secret", "model/same"):
        with pytest.raises(Outside, match="is a link"):
            read_beneath(folder, name)
    with pytest.raises(Outside, match="is a link"):
        sizes_beneath(folder, "up")
    assert sizes_beneath(folder) == {"model/config.json": 2}


def test_nothing_is_created_or_cut_off_through_a_link(folder: Path) -> None:
    (folder / "metrics.jsonl").symlink_to(folder.parent / "secret")

    with pytest.raises(Outside):
        open_beneath(folder, "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    assert (folder.parent / "secret").read_text() == SECRET


def test_what_is_no_file_is_refused_and_a_pipe_waits_for_nobody(folder: Path) -> None:
    os.mkfifo(folder / "pipe")

    for name in ("pipe", "model"):
        with pytest.raises(Outside, match="no regular file"):
            read_beneath(folder, name)


def test_an_open_file_gets_a_second_name_whatever_its_first_leads_to_by_then(folder: Path) -> None:
    with read_beneath(folder, "model/config.json") as file:
        (folder / "model" / "config.json").unlink()
        (folder / "model" / "config.json").symlink_to(folder.parent / "secret")
        try:
            link_to(file.fileno(), folder / "second")
        except OSError:
            return  # without a name the kernel gives it none, either
        assert (folder / "second").read_text() == "{}"
