"""A dump: the groups that a run kept as samples, in the order in which they were trained or evaluated.

Blocks, and imports pyarrow where files are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from flotilla.shared.errors import DataError
from flotilla.shared.samples.folder import SAMPLES, StoredFile, open_samples_file, stored_file, stored_files
from flotilla.shared.samples.table import REQUIRED, facts_of, to_groups
from flotilla.shared.schemas.sample_kinds import SampleKind

if TYPE_CHECKING:
    import pyarrow as pa

    from flotilla.shared.schemas.trajectory import Group

EXPERIMENTS: Final = f"fleet/experiments/*/{SAMPLES}"
"""Below the directory of a run."""
KINDS: Final = {"step": SampleKind.TRAINED, "evaluation": SampleKind.EVALUATION}
"""What the groups of a file are, by its family; others were not trained, or have no reward."""
MOST_BYTES: Final = 16 << 30
"""Of one file, unpacked: the file that is read is in memory as a whole."""


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A file with whole groups.

    Attributes:
        folder, name: where it is.
        kind: trained or evaluation.
        num_groups: at least one.
    """

    folder: Path
    name: str
    kind: SampleKind
    num_groups: int


class Dump:
    """Groups, numbered from 0 through all files; the file that was read last is kept in memory.

    Args:
        files: at least one, in order.
        check: called with a file each time that it is about to be read: a link may lead elsewhere by then.
    """

    def __init__(self, files: Sequence[DumpFile], check: Callable[[str], None] | None = None) -> None:
        self.files, self._check = tuple(files), check
        self._ends = list(accumulate(each.num_groups for each in files))
        self._read: tuple[DumpFile, pa.Table, Sequence[int]] | None = None

    def __len__(self) -> int:
        return self._ends[-1]

    def place_of(self, index: int) -> tuple[DumpFile, int]:
        """Find the file of a group, and its number there.

        Raises:
            IndexError: there is no such group.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"the dump has {len(self)} groups, no group {index}")
        at = bisect_right(self._ends, index)
        return self.files[at], index - (self._ends[at - 1] if at else 0)

    def group(self, index: int) -> Group:
        """Read a group as it was kept.

        Raises:
            DataError: its file cannot be read any more, or may not be.
        """
        file, place = self.place_of(index)
        table, starts = self._table(file)
        begin, end = starts[place], starts[place + 1]
        try:
            [kept] = to_groups(table.slice(begin, end - begin))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = f"group {place} of {file.folder / file.name}"
            raise DataError(f"data.dump: {where} is no group of samples: {error!r}", field="data.dump") from error
        return kept.group

    def _table(self, file: DumpFile) -> tuple[pa.Table, Sequence[int]]:
        if self._read is None or self._read[0] is not file:
            self._read = None
            if self._check is not None:
                self._check(str(file.folder / file.name))
            table = _read(file)
            try:
                starts = np.searchsorted(table["place"].to_numpy(), np.arange(file.num_groups + 1)).tolist()
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"data.dump: {file.folder / file.name} has no places of groups: {error!r}", field="data.dump"
                ) from error
            self._read = file, table, starts
        return self._read[1], self._read[2]


def dump_at(path: Path, check: Callable[[str], None] | None = None, *, field: str = "data.dump") -> Dump:
    """Find the groups that were kept in a place.

    Args:
        path: the directory of a run or of an experiment, its folder of samples, or a file of it.
        check: called with the folder that is read, and with its files later; raises where that is not allowed.
        field: of the spec, which names the place.

    Raises:
        DataError: there is no such place, it has no groups, several experiments have some, or a file cannot be read.
    """
    folder, found = _files_at(path, check)
    chosen = sorted(
        (each for each in found if each.family in KINDS), key=lambda each: (each.family != "step", each.number)
    )
    if not found and not path.exists():
        raise DataError(
            f"{field}: {path} does not exist: name the directory of a run or of an experiment, its folder {SAMPLES}, "
            "or one file of it (step-NUMBER.parquet, evaluation-vNUMBER.parquet)",
            path=str(path),
            field=field,
        )
    files = [made for each in chosen if (made := _counted(folder, each)).num_groups]
    if not files:
        raise DataError(
            f"{field}: {path} has no groups that were trained or evaluated: a run keeps them where its spec's "
            "section samples is not null",
            field=field,
        )
    return Dump(files, check)


def check_place(path: Path, check: Callable[[str], None]) -> None:
    """Check where the samples of a place are, without reading them.

    Raises:
        DataError: they may not be there, or several experiments have some.
    """
    _files_at(path, check)


def _files_at(path: Path, check: Callable[[str], None] | None) -> tuple[Path, list[StoredFile]]:
    if path.is_file():
        if check is not None:
            check(str(path))
        one = stored_file(path)
        if one is None or one.family not in KINDS:
            raise DataError(
                f"data.dump: {path.name} is no file of trained or evaluated samples: those are called "
                "step-NUMBER.parquet and evaluation-vNUMBER.parquet",
                field="data.dump",
            )
        return path.parent, [one]
    folders = [path, path / SAMPLES, *sorted(path.glob(EXPERIMENTS))]
    found = [(each, files) for each in folders if (files := list(stored_files(each)))]
    if check is not None:
        # All, before a message names one.
        for folder in [each for each, _ in found] or [path]:
            check(str(folder))
    if len(found) > 1:
        several = ", ".join(str(folder) for folder, _ in found)
        raise DataError(f"data.dump: several experiments are in {path}, choose one: {several}", field="data.dump")
    return found[0] if found else (path, [])


def _counted(folder: Path, file: StoredFile) -> DumpFile:
    """Read how many groups a file has, and refuse one that no trainer wrote before any of its rows is unpacked."""
    from pyarrow import ArrowException, parquet

    try:
        with open_samples_file(folder, file.name) as source:
            found = parquet.ParquetFile(source)
            schema, about = found.schema_arrow, found.metadata
            facts = facts_of(schema.metadata)
            if absent := sorted(REQUIRED.difference(schema.names)):
                raise ValueError(f"it has no column {', '.join(absent)}")
            num_bytes = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if num_bytes > MOST_BYTES:
                raise ValueError(f"it unpacks to {num_bytes} bytes, and {MOST_BYTES} are allowed")
            count = facts.get("num_kept", facts.get("num_groups", 0))
            if type(count) is not int or not 0 <= count <= about.num_rows:
                raise ValueError(f"its metadata names {count!r} groups, and it has {about.num_rows} rows")
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"data.dump: cannot read {folder / file.name}: {error}", field="data.dump") from error
    return DumpFile(folder, file.name, KINDS[file.family], count)


def _read(file: DumpFile) -> pa.Table:
    from pyarrow import ArrowException, parquet

    try:
        with open_samples_file(file.folder, file.name) as source:
            return parquet.read_table(source).combine_chunks()
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(
            f"data.dump: cannot read {file.folder / file.name} (any more): {error}", field="data.dump"
        ) from error
