"""A folder that all processes of a run share: what takes long to make, and is the same each time, is made once."""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # benchmarks, which run fleets too, do without it

VARIABLE = "FLOTILLA_TESTS_FOLDER"


def pytest_configure(config: "pytest.Config") -> None:
    if VARIABLE not in os.environ:  # workers and second runs inherit it
        directory = open_folder()
        config.add_cleanup(lambda: close_folder(directory))


def open_folder() -> str:
    """Make the folder of this process and of those that it starts."""
    os.environ[VARIABLE] = directory = tempfile.mkdtemp(prefix="flotilla-tests-")
    return directory


def close_folder(directory: str) -> None:
    """Remove it."""
    os.environ.pop(VARIABLE, None)
    shutil.rmtree(directory, ignore_errors=True)


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Find what a process of this run has made, or make it; who comes meanwhile waits.

    Args:
        name: of the file or folder, also among what others make.
        make: is given a path at which nothing is.
    """
    if VARIABLE not in os.environ:  # no test: a benchmark that runs a fleet
        atexit.register(close_folder, open_folder())
    folder = Path(os.environ[VARIABLE])
    made, under_way = folder / name, folder / f"{name}.under-way"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with its holder
        if not made.exists():
            shutil.rmtree(under_way, ignore_errors=True)
            make(under_way)
            under_way.rename(made)
    return made
