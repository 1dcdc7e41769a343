"""Logs of a local fleet are bounded, and a process that writes knows nothing of it."""

import errno
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from flotilla.cli.command_line import build_parser
from flotilla.cli.fleet import log_bounds_of
from flotilla.cli.log_rotation import older_logs, rotate
from flotilla.cli.processes import LogBounds, OwnedProcess, ProcessSpec


def test_a_full_log_is_put_aside_and_so_many_older_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with path.open("a", buffering=1) as log:
        for text in ("one\n", "two\n", "three\n", "four\n"):
            log.write(text)
            assert rotate(path, 4, 2)
            assert path.read_text() == ""

    assert [each.read_text() for each in older_logs(path)] == ["four\n", "three\n"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]


def test_a_log_that_is_not_full_or_not_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert not rotate(path, 4, 2)
    path.write_text("1\n")
    assert not rotate(path, 4, 2)
    assert [each.name for each in tmp_path.iterdir()] == ["x.log"]


def test_a_log_that_cannot_be_copied_keeps_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("full\n")
    (tmp_path / "x.log.new").mkdir()

    with pytest.raises(OSError):
        rotate(path, 4, 2)

    assert path.read_text() == "full\n" and list(older_logs(path)) == []


@pytest.mark.parametrize("failing", [1, 2])
def test_older_logs_stay_where_a_copy_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    path, calls = tmp_path / "x.log", 0
    copy = shutil.copyfileobj

    def full_disk(source: BinaryIO, target: BinaryIO) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, "no space left")
        copy(source, target)

    for text in ("one\n", "two\n"):
        path.write_text(text)
        rotate(path, 4, 3)
    path.write_text("three\n")
    monkeypatch.setattr("flotilla.cli.log_rotation.shutil.copyfileobj", full_disk)
    for _ in range(4):
        calls = 0
        with pytest.raises(OSError):
            rotate(path, 4, 3)

    assert [each.read_text() for each in older_logs(path)] == ["two\n", "one\n"]
    assert path.read_text() == "three\n"


def test_a_gap_hides_no_older_log_and_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("full\n")
    for number in (2, 3, 10):
        (tmp_path / f"x.log.{number}").write_text(str(number))
    (tmp_path / "x.log.old").write_text("not one of them")
    (tmp_path / "x.log.02").write_text("neither")

    assert [each.read_text() for each in older_logs(path)] == ["2", "3", "10"]
    assert rotate(path, 4, 3)
    assert [each.read_text() for each in older_logs(path)] == ["full\n", "2", "3"]
    assert (tmp_path / "x.log.old").exists() and list(older_logs(tmp_path / "none" / "x.log")) == []


def test_the_bounds_are_options_of_what_starts_a_fleet() -> None:
    arguments = build_parser().parse_args(["up", "--log-size", "2", "--log-files", "3"])

    assert log_bounds_of(arguments) == LogBounds(2 * 2**20, 3)
    assert log_bounds_of(build_parser().parse_args(["up"])) == LogBounds()


def test_the_last_words_before_a_log_was_put_aside_are_still_told(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    process = OwnedProcess(ProcessSpec("x", (), {}), path, lambda line: None)
    assert process.last_words() == ""
    path.write_text("loading\nport 1 is in use\n")
    assert rotate(path, 1, 2)

    assert process.last_words() == "port 1 is in use"
    path.write_text("newer\n")
    assert process.last_words() == "newer"
