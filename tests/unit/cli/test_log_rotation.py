"""Logs of a local fleet are bounded, and a process that writes knows nothing of it."""

from pathlib import Path

import pytest

from flotilla.cli.command_line import build_parser
from flotilla.cli.fleet import log_bounds_of
from flotilla.cli.log_rotation import older_logs, rotate
from flotilla.cli.processes import LogBounds


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


def test_the_bounds_are_options_of_what_starts_a_fleet() -> None:
    arguments = build_parser().parse_args(["up", "--log-size", "2", "--log-files", "3"])

    assert log_bounds_of(arguments) == LogBounds(2 * 2**20, 3)
    assert log_bounds_of(build_parser().parse_args(["up"])) == LogBounds()
