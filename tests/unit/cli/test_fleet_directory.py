"""A fleet that cannot have its directory leaves there what it finds."""

import fcntl
from pathlib import Path

import pytest

from flotilla.cli.fleet import FleetOptions, LocalFleet
from flotilla.connection import FLEET_FILE
from shared.errors import Conflict, InvalidRequest


async def begin(data: Path) -> None:
    async with LocalFleet(FleetOptions(data, port=0), lambda line: None):
        raise AssertionError("nothing should have started")


async def test_a_second_fleet_leaves_the_note_of_the_first(tmp_path: Path) -> None:
    """Else nobody finds the first one any more, and `flotilla down` cannot end it."""
    (tmp_path / FLEET_FILE).write_text("of the first")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(Conflict, match=r"another fleet runs with .*: end it with `flotilla down"):
            await begin(tmp_path)

    assert (tmp_path / FLEET_FILE).read_text() == "of the first"


@pytest.mark.parametrize("name", ["file", "file/below"])
async def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(InvalidRequest, match=f"{name} is no directory and cannot become one: a file is in its place"):
        await begin(tmp_path / name)

    assert (tmp_path / "file").read_text() == "mine"
