"""A tracker as a protocol: it takes records in order, and knows itself how far it came.

The cursor lives where the records go, and is written with them. So a gateway that died between two writes, or within
one, continues exactly after the tracker's last record.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from flotilla.shared.files.beneath import open_beneath


@dataclass(frozen=True, slots=True)
class Record:
    """Values that were measured together.

    Attributes:
        cursor: place of the last of them in the store's order of writing.
        step: training step that they belong to.
        version: policy version that they belong to.
        at: when they were stored, seconds since the epoch.
        values: by name.
    """

    cursor: int
    step: int
    version: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The experiment, as a tracker presents it.

    Attributes:
        id: unique, and the same after a restart.
        name: as people call it.
        directory: the experiment's own.
        spec: the resolved spec, as plain data.
    """

    id: str
    name: str
    directory: Path
    spec: Mapping[str, Any]


class Tracker(Protocol):
    """All calls come from one thread, one after the other; each may raise whatever its library raises."""

    def cursor(self) -> int:
        """Return the cursor of the last record that it holds; 0 if it holds none."""

    def write(self, records: Sequence[Record]) -> None:
        """Write records; they are durable when it returns."""

    def close(self) -> None:
        """Finish: no more records come."""


def own_folder(directory: str | None, run: TrackedRun) -> Path:
    """Return the folder of this run alone, below a directory that several runs may share."""
    return run.directory if directory is None else Path(directory) / run.id


def open_own(directory: str | None, run: TrackedRun, name: str) -> BinaryIO:
    """Open a file below ``own_folder`` to read and write it; made where it is not there.

    The trainer writes into the experiment's directory, too: a link that it made there is not followed.

    Raises:
        OSError: it cannot be opened, or a link leads to it.
    """
    folder = own_folder(directory, run)
    descriptor = open_beneath(folder.parent, f"{folder.name}/{name}", os.O_RDWR | os.O_CREAT, 0o666)
    return os.fdopen(descriptor, "r+b", buffering=0)  # type: ignore[return-value]
