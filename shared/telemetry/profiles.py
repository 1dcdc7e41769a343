"""Where traces of torch's profiler lie, and how they are named."""

import gzip
import re
import shutil
from collections.abc import Callable
from pathlib import Path

PROFILES = "profiles"
"""Folder of an experiment's directory."""
SUFFIX = ".json.gz"
NAME = re.compile(r"(?:trainer|engine)-[A-Za-z0-9.-]{1,120}\.json\.gz")
"""A whole trace; what is being written is hidden."""
CHUNK_BYTES = 1 << 20
"""Compressed at once, while other threads continue."""


def trainer_trace(step: int, rank: int) -> str:
    """Name the trace of a step on a rank."""
    return f"trainer-step{step:08d}-rank{rank}{SUFFIX}"


def engine_trace(version: int, process_id: int, service_id: str) -> str:
    """Name the trace of an engine's process under a version; processes of two containers may have one number."""
    return f"engine-version{version:08d}-process{process_id}-{service_id}{SUFFIX}"


def write_trace(directory: Path, name: str, export: Callable[[str], None]) -> Path:
    """Write a trace atomically.

    Args:
        directory: made if it is not there.
        name: of the file in it.
        export: writes it to a path, not compressed.

    Raises:
        OSError: it cannot be written.
    """
    directory.mkdir(exist_ok=True)
    path, part, plain = directory / name, directory / f".{name}", directory / f".{name}.json"
    try:
        export(str(plain))
        # torch would compress it line by line, and let no other thread continue.
        with plain.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(source, packed, CHUNK_BYTES)
        part.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    return path
