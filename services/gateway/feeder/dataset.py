"""Datasets: a file of rows, the order in which an experiment issues them, and the task of each.

Group ``g`` answers row ``order(epoch)[g mod N]`` of epoch ``g div N``. The order depends on seed and epoch alone, so a
restarted gateway goes on exactly where it was, from the group id.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.config.data import DataConfig
from shared.errors import DataError
from shared.schemas.task import Message, Task, sample_seed

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows that tasks are made from.

    Attributes:
        rows: at least one.
        config: which columns mean what.
        seed: of the order and of every sample.
    """

    rows: Sequence[Row]
    config: DataConfig
    seed: int

    def row_of(self, group_id: int) -> int:
        """Find the row that a group answers."""
        epoch, position = divmod(group_id, len(self.rows))
        if not self.config.shuffle:
            return position
        return int(order_of_epoch(self.seed, epoch, len(self.rows))[position])

    def task(
        self,
        group_id: int,
        *,
        group_size: int,
        row: int | None = None,
        min_version: int = 0,
        pinned_version: int | None = None,
        greedy: bool = False,
        issued_at: float = 0.0,
    ) -> Task:
        """Make the task of a group; ``row`` overrides the order (evaluation)."""
        row = self.row_of(group_id) if row is None else row
        values = self.rows[row]
        label = values.get(self.config.label_column) if self.config.label_column else None
        source = values.get(self.config.data_source_column) if self.config.data_source_column else None
        used = {self.config.prompt_column, self.config.label_column, self.config.data_source_column}
        return Task(
            group_id=group_id,
            row=row,
            messages=messages_of(values[self.config.prompt_column], self.config.system_prompt, row),
            group_size=group_size,
            seed=sample_seed(self.seed, group_id),
            label=None if label is None else text_of(label),
            data_source=None if source is None else str(source),
            metadata={name: plain(value) for name, value in values.items() if name not in used},
            min_version=min_version,
            pinned_version=pinned_version,
            greedy=greedy,
            issued_at=issued_at,
        )


def load_dataset(path: str, config: DataConfig, *, seed: int, max_rows: int | None) -> Dataset:
    """Read a dataset and check that it has the columns that the spec names.

    Raises:
        DataError: the file is missing, unreadable or empty, or lacks a column; the detail says which there are.
    """
    rows = read_rows(Path(path), max_rows)
    if not rows:
        raise DataError(f"{path} has no rows", path=path)
    present = sorted({name for row in rows for name in row})
    for field in ("prompt_column", "label_column", "data_source_column"):
        column = getattr(config, field)
        missing = next((number for number, row in enumerate(rows) if column not in row), None)
        if column is not None and missing is not None:
            where = f"{path} has no column" if column not in present else f"row {missing} of {path} has no column"
            raise DataError(
                f"{where} {column!r}, which data.{field} names; columns there: {', '.join(present)}",
                path=path,
                field=f"data.{field}",
                columns=", ".join(present),
            )
    for number, row in enumerate(rows):
        messages_of(row[config.prompt_column], config.system_prompt, number)
    return Dataset(rows, config, seed)


def read_rows(path: Path, max_rows: int | None = None) -> list[Row]:
    """Read up to ``max_rows`` rows of a JSONL, JSON, CSV or parquet file, chosen by its suffix.

    Raises:
        DataError: it cannot be read as its suffix says.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} must end in one of {', '.join(SUFFIXES)}", path=str(path))
    try:
        rows = _read(path, max_rows)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}", path=str(path)) from None
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}", path=str(path)) from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {number} of {path} is {type(row).__name__}, not an object", path=str(path))
    return rows


def _read(path: Path, max_rows: int | None) -> list[Row]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _read_json_lines(path, max_rows)
        case ".json":
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, list):
                raise ValueError(  # noqa: TRY004
                    "a .json dataset is a list of objects; one object per line is .jsonl"
                )
            return document[:max_rows]
        case ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return [row for row, _ in zip(csv.DictReader(file), _counter(max_rows), strict=False)]
        case _:
            return _read_parquet(path, max_rows)


def _read_json_lines(path: Path, max_rows: int | None) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if max_rows is not None and len(rows) >= max_rows:
                break
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
    return rows


def _read_parquet(path: Path, max_rows: int | None) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path} is parquet, which needs pyarrow: install flotilla[data]", path=str(path)) from None
    rows: list[Row] = []
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                rows += batch.to_pylist()
                if max_rows is not None and len(rows) >= max_rows:
                    break
    except ArrowException as error:
        raise ValueError(str(error)) from error
    return rows[:max_rows]


def _counter(limit: int | None) -> range:
    return range(limit if limit is not None else 2**62)


def messages_of(prompt: Any, system_prompt: str | None, row: int) -> tuple[Message, ...]:
    """Make the chat prompt of a row.

    Raises:
        DataError: the prompt is neither text nor a list of {role, content}.
    """
    system = (Message("system", system_prompt),) if system_prompt is not None else ()
    if isinstance(prompt, str):
        return (*system, Message("user", prompt))
    if isinstance(prompt, list) and prompt and all(_is_message(each) for each in prompt):
        return (*system, *(Message(each["role"], each["content"]) for each in prompt))
    raise DataError(f"the prompt of row {row} is neither text nor a list of {{role, content}} messages", row=row)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def plain(value: Any) -> Any:
    """Keep what travels in a message as it is, and write everything else, such as a date, as text."""
    if value is None or isinstance(value, str | bool | int | float | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)


def text_of(label: Any) -> str:
    """Write a label as text: text stays, numbers and structures become JSON."""
    return label if isinstance(label, str) else json.dumps(label, default=str)


@lru_cache(maxsize=8)
def order_of_epoch(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Permute the rows of one epoch, the same on every machine and with every version of NumPy.

    Rows are sorted by SplitMix64 of (seed, epoch, row); equal keys keep the file's order.

    Returns:
        [num_rows] int64, each row once.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    start = np.uint64(sample_seed(sample_seed(seed, epoch), 0))
    with np.errstate(over="ignore"):
        state = start + (np.arange(num_rows, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    order: npt.NDArray[np.int64] = np.argsort(state ^ (state >> np.uint64(31)), kind="stable")
    return order
