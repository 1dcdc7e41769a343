"""Directories and control groups of services that were killed."""

import fcntl
import os
from pathlib import Path

import pytest

from flotilla.services.sandbox.leftovers import LOCK, PREFIX, own_directory, sweep_groups, sweep_leftovers
from flotilla.shared.host.control_groups import Mounts


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
