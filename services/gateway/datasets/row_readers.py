"""Files of rows as rows: JSON lines, a JSON list, CSV, parquet, Arrow; the format is the ending of the name."""

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import IO, Any

from flotilla.services.gateway.datasets.locations import open_bytes
from flotilla.shared.config.sections.data import DATA_SUFFIXES
from flotilla.shared.errors import DataError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.net.absence import absent_or

Row = Mapping[str, Any]


def read_rows(path: str, max_rows: int | None = None, places: Places | None = None) -> list[Row]:
    """Read up to ``max_rows`` rows of a file or URL.

    Raises:
        DataError: it is not there, or cannot be read as its ending says.
    """
    suffix = next((suffix for suffix in DATA_SUFFIXES if path.lower().endswith(suffix)), None)
    if suffix is None:
        raise DataError(f"{path} must end in one of {', '.join(DATA_SUFFIXES)}", path=path)
    with open_bytes(path, places) as file:
        try:
            rows = list(islice(_rows(file, suffix, path), max_rows))
        except RecursionError:
            raise DataError(f"cannot read {path}: lists or objects are nested too deep", path=path) from None
        except (OSError, ValueError) as error:
            raise absent_or(error, DataError(f"cannot read {path}: {error}", path=path)) from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {number} of {path} is {type(row).__name__}, not an object", path=path)
    return rows


def _rows(file: IO[bytes], suffix: str, path: str) -> Iterator[Row]:
    match suffix:
        case ".jsonl" | ".ndjson":
            return _json_lines(codecs.iterdecode(file, "utf-8-sig"))
        case ".json":
            document = json.loads(file.read().decode("utf-8-sig"))
            if not isinstance(document, list):
                raise ValueError(  # noqa: TRY004
                    "a .json dataset is a list of objects; one object per line is .jsonl"
                )
            return iter(document)
        case ".csv":
            return _csv_rows(codecs.iterdecode(file, "utf-8-sig"))
        case _:
            return _batches(file, suffix, path)


def _json_lines(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.pos + 1}: {error.msg}") from None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def _csv_rows(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    try:
        head = next(reader, [])
        twice = next((name for name in head if head.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two columns are called {twice!r}: rename one")
        for number, cells in enumerate(cells for cells in reader if cells):
            if len(cells) != len(head):
                raise ValueError(f"row {number}, line {reader.line_num}: {len(cells)} cells, {len(head)} columns")
            yield dict(zip(head, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None


def _batches(file: IO[bytes], suffix: str, path: str) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, ipc, parquet
    except ImportError:
        raise DataError(f"{path} is {suffix[1:]}, which needs pyarrow: install flotilla[data]", path=path) from None
    try:
        if suffix == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches()
        elif file.read(6) == b"ARROW1":
            file.seek(0)
            reader = ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:  # what datasets writes is the streaming format
            file.seek(0)
            batches = iter(ipc.open_stream(file))
        for batch in batches:
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error
