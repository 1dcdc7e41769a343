"""Where traces of torch's profiler lie, and how they are named."""

import re
from collections.abc import Callable
from pathlib import Path

PROFILES = "profiles"
"""Folder of an experiment's directory."""
SUFFIX = ".json.gz"
NAME = re.compile(r"(?:trainer|engine)-[A-Za-z0-9.-]{1,120}\.json\.gz")
"""A whole trace; what is being written is hidden."""


def trainer_trace(step: int, rank: int) -> str:
    """Name the trace of a step on a rank."""
    return f"trainer-step{step:08d}-rank{rank}{SUFFIX}"


def engine_trace(version: int, process_id: int) -> str:
    """Name the trace of an engine's process under a version."""
    return f"engine-version{version:08d}-process{process_id}{SUFFIX}"


def write_trace(directory: Path, name: str, export: Callable[[str], None]) -> Path:
    """Write a trace, so that nobody sees a part of it.

    Args:
        directory: made if it is not there.
        name: of the file in it.
        export: writes to a path.

    Raises:
        OSError: it cannot be written.
    """
    directory.mkdir(exist_ok=True)
    path, part = directory / name, directory / f".{name}"
    try:
        export(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
