"""The folder of an experiment's samples: names, files that are whole or not there at all, and their bounds.

Several processes write here, each its own files; each writer also keeps to the bounds.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from flotilla.shared.files.beneath import read_beneath

if TYPE_CHECKING:
    import pyarrow as pa

    from flotilla.shared.config.sections.tracking import SamplesConfig
    from flotilla.shared.schemas.sample_kinds import SampleFile
    from flotilla.shared.streams.intervals import IntervalSet

SAMPLES = "samples"
"""Folder of an experiment's directory."""
SPEC_FILE = "spec.json"
CHANGES = "changes"
"""Among the facts about a step: the live changes that it was trained with; where there are none, it is not there."""
"""Within the folder: the spec that the last trainer worked with."""
TEMPORARY = ".tmp"
STALE_SECONDS = 600.0
WHOLE_BYTES = 1 << 20
"""A file of this size or less is read at once; of a larger one the columns that are wanted."""
SLACK = 32
"""A writer scans all files again after it wrote 1/32 of the bound, and leaves that much room."""
_STORED = re.compile(r"(?:step-\d{8}|(?:evaluation|ended)-v\d{8}(?:-.*)?)\.parquet")
_STEP = re.compile(r"step-(\d{8})\.parquet")
_OF_VERSION = re.compile(r"(evaluation|ended)-v(\d{8})(?:-.*)?\.parquet")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of samples on disk.

    Attributes:
        family: ``step``, ``evaluation`` or ``ended``.
        number: of the step, or of the version.
        size_bytes, modified_ns: as the file system has them.
    """

    name: str
    family: str
    number: int
    size_bytes: int
    modified_ns: int


def step_name(step: int) -> str:
    """Name the file of a trained step."""
    return f"step-{step:08d}.parquet"


def evaluation_name(version: int) -> str:
    """Name the file of a version's evaluation."""
    return f"evaluation-v{version:08d}.parquet"


def ended_name(version: int, writer: str, number: int) -> str:
    """Name a file of groups that ended otherwise: each writer has names of its own."""
    return f"ended-v{version:08d}-{writer}-{number:04d}.parquet"


def stored_files(directory: Path) -> Iterator[StoredFile]:
    """Go through the files in a folder, in no order; none where there is no folder."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if (kind := _family(entry.name)) is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found = entry.stat(follow_symlinks=False)
                yield StoredFile(entry.name, *kind, found.st_size, found.st_mtime_ns)


def open_samples_file(folder: Path, name: str) -> BinaryIO:
    """Open a file in the folder of samples; neither it nor the folder may be a link: several services write there.

    Raises:
        OSError: it is not there, cannot be read, or a link leads to it.
    """
    return read_beneath(folder.parent, f"{folder.name}/{name}")


def read_columns(folder: Path, name: str, columns: Sequence[str]) -> pa.Table:
    """Read some columns of a file; those that it has not are left out.

    Raises:
        OSError: as of ``open_samples_file``.
        ArrowException: it is no file of samples, or damaged.
    """
    from pyarrow import BufferReader, parquet

    with open_samples_file(folder, name) as file:
        # At once and by this thread: pyarrow reads column by column, and calls into Python for each piece.
        is_small = os.fstat(file.fileno()).st_size <= WHOLE_BYTES
        source = BufferReader(file.read()) if is_small else file
        return parquet.ParquetFile(source).read(columns=list(columns), use_threads=not is_small)


def stored_file(path: Path) -> StoredFile | None:
    """Describe one file; None if it has no name of a file of samples.

    Raises:
        OSError: it is not there.
    """
    if (kind := _family(path.name)) is None:
        return None
    found = path.stat()
    return StoredFile(path.name, *kind, found.st_size, found.st_mtime_ns)


def stored_states(directory: Path) -> dict[str, tuple[int, int]]:
    """Give each file's time of change (in nanoseconds) and size (in bytes) by its name; costs half of ``stored_files``.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if _STORED.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    state = entry.stat(follow_symlinks=False)
                    found[entry.name] = (state.st_mtime_ns, state.st_size)
    return found


def _family(name: str) -> tuple[str, int] | None:
    if match := _STEP.fullmatch(name):
        return "step", int(match[1])
    if match := _OF_VERSION.fullmatch(name):
        return match[1], int(match[2])
    return None


class SampleFolder:
    """One process's hand on the folder; every call blocks.

    Args:
        directory: of the experiment, which is there: a service on a machine without it has nowhere to write.
        config: the bounds.
    """

    def __init__(self, directory: Path, config: SamplesConfig) -> None:
        self.path = directory / SAMPLES
        self._config = config
        self._written = 0
        self._looked_at: float | None = None

    def write(self, file: SampleFile) -> int:
        """Write a file atomically, replacing one of the same name; returns its size in bytes.

        Raises:
            OSError: the disk is full, or the experiment's directory is not there; nothing of the file remains.
        """
        from pyarrow import parquet

        from flotilla.shared.samples.table import to_table

        self.path.mkdir(exist_ok=True)
        temporary = self.path / f".{file.name}.{os.getpid()}{TEMPORARY}"
        try:
            with temporary.open("wb") as target:
                # Without dictionaries a file is a fifth smaller, and written in less time: zstd finds what is repeated.
                parquet.write_table(to_table(file), target, compression="zstd", use_dictionary=False)
                target.flush()
                os.fsync(target.fileno())
            size = temporary.stat().st_size
            temporary.replace(self.path / file.name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._written += size
        self._keep_to_bounds()
        return size

    def write_spec(self, document: str) -> None:
        """Write the spec beside the samples, in JSON: it records how they were trained.

        Raises:
            OSError: the disk is full, or the experiment's directory is not there.
        """
        self.path.mkdir(exist_ok=True)
        temporary = self.path / f".{SPEC_FILE}.{os.getpid()}{TEMPORARY}"
        temporary.write_text(document, encoding="utf-8")
        temporary.replace(self.path / SPEC_FILE)

    def forget(self, *, after_step: int, lost: IntervalSet) -> int:
        """Remove what an abandoned lineage wrote: steps after one, and lost versions. Counts the files."""
        count = 0
        for file in stored_files(self.path):
            is_gone = file.number > after_step if file.family == "step" else file.number in lost
            if is_gone:
                (self.path / file.name).unlink(missing_ok=True)
                count += 1
        return count

    def _keep_to_bounds(self) -> None:
        now, slack = time.time(), self._config.max_bytes // SLACK
        age = None if self._config.max_age_hours is None else self._config.max_age_hours * 3600
        due = None if self._looked_at is None or age is None else self._looked_at + age / SLACK
        if self._looked_at is not None and self._written < slack and (due is None or now < due):
            return
        self._looked_at, self._written = now, 0
        self._sweep(now)
        files = sorted(stored_files(self.path), key=lambda file: file.modified_ns)
        if age is not None:
            for file in files:
                if file.modified_ns < (now - age) * 1e9:
                    (self.path / file.name).unlink(missing_ok=True)
            files = [file for file in files if file.modified_ns >= (now - age) * 1e9]
        for file in beyond(files, self._config.max_bytes - slack):
            (self.path / file.name).unlink(missing_ok=True)

    def _sweep(self, now: float) -> None:
        """Remove what a writer that was killed left half written."""
        for path in self.path.glob(f".*{TEMPORARY}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < now - STALE_SECONDS:
                    path.unlink()


def beyond(files: list[StoredFile], most_bytes: int) -> list[StoredFile]:
    """Choose which files go so that the others fit: each time the oldest of the family that takes most.

    So a flood of one family never pushes out another.

    Args:
        files: oldest first.
        most_bytes: bound on what stays.
    """
    families: dict[str, list[StoredFile]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for file in reversed(files):
        families[file.family].append(file)
        sizes[file.family] += file.size_bytes
    gone = []
    while sum(sizes.values()) > most_bytes:
        largest = max(sizes, key=lambda family: sizes[family])
        oldest = families[largest].pop()
        sizes[largest] -= oldest.size_bytes
        gone.append(oldest)
    return gone
