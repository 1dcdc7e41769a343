"""Rows of a class of the user's: read here, or in a child process that knows no secret of the service.

As a program it loads ``[reference, options, limit, field]`` when it is first called, and answers each call, which says
how many rows it has given, with the next ones, in JSON each, after the last ones with none.
"""

import inspect
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flotilla.services.gateway.datasets.columns import Row
from flotilla.shared.children.calls import CallProcess, running
from flotilla.shared.children.custom_code import describe, load_callable
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.serving import serve
from flotilla.shared.errors import DataError, FlotillaError, InvalidSpec, Unavailable, WorkerDied
from flotilla.shared.net.absence import absent_or

WHAT = "custom dataset"
CHILD_SECONDS = 1800.0
BATCH_CHARACTERS = 1 << 20
MAX_LINE_BYTES = 1 << 30
"""A row may be large."""


def rows_of_child(reference: str, options: dict[str, Any], limit: int | None, field: str) -> list[Row]:
    """Read all rows of the user's class in a process of its own; blocks.

    Raises:
        InvalidSpec, DataError: as ``custom_rows``, or the process ended.
        Unavailable, DeadlineExceeded: it was killed, or took too long.
    """
    what = f"{WHAT} {reference!r}"
    process = CallProcess(
        python_module(__name__), [reference, options, limit, field], what, max_line_bytes=MAX_LINE_BYTES
    )
    deadline = time.monotonic() + CHILD_SECONDS
    rows: list[Row] = []
    try:
        with running(process) as calls:
            while batch := calls.call(len(rows), seconds=deadline - time.monotonic()):
                rows += map(json.loads, batch)
    except (InvalidSpec, DataError) as error:
        raise type(error)(error.detail, path=reference) from error
    except WorkerDied as error:
        kind = Unavailable if process.was_killed else DataError
        raise kind(f"{what}: its process {process.cause}", path=reference) from error
    return rows


def custom_rows(reference: str, options: dict[str, Any], limit: int | None, field: str) -> list[Row]:
    """Read all rows of the user's class: it is asked once, in order, so what it computes cannot change meanwhile.

    Raises:
        InvalidSpec: there is no such class, or the options do not fit it.
        DataError: it raised, or a row is no dict.
    """
    make = load_callable(reference, what=WHAT, kind="class", accepts=inspect.isclass)
    path = Path(reference.rpartition(":")[0]).expanduser().resolve()
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise InvalidSpec(f"{WHAT} {reference!r}: {field}.options do not fit its constructor: {error}") from error
    try:
        return [_checked(row, number, reference) for number, row in enumerate(_iterate(make(**options), limit))]
    except FlotillaError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise absent_or(
            error, DataError(f"{WHAT} {reference!r} failed: {describe(error, path)}", path=reference)
        ) from error


def _iterate(dataset: Any, limit: int | None) -> Iterator[Any]:
    for name in ("__len__", "__getitem__"):
        if not hasattr(dataset, name):
            raise TypeError(f"it has no {name}")
    num_rows = len(dataset)
    return (dataset[index] for index in range(num_rows if limit is None else min(limit, num_rows)))


def _checked(row: Any, number: int, reference: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"row {number} of {WHAT} {reference!r} is {type(row).__name__}, not a dict", path=reference)
    return row


class _Rows:
    about = None

    def __init__(self, opening: Any) -> None:
        self._opening = opening
        self._rows: Iterator[str] | None = None

    def handle(self, num_given: int) -> list[str]:
        """Return the next rows.

        Raises:
            DataError: others were given by a process that has ended; what is read again may differ.
        """
        if self._rows is None:
            if num_given:
                raise DataError(f"{WHAT} {self._opening[0]!r}: its process ended, and began again at row {num_given}")
            self._rows = map(self._plain, custom_rows(*self._opening))
        batch: list[str] = []
        num_characters = 0
        for row in self._rows:
            batch.append(row)
            num_characters += len(row)
            if num_characters > BATCH_CHARACTERS:
                break
        return batch

    def _plain(self, row: Row) -> str:
        try:
            return json.dumps(row, default=_plain)
        except (TypeError, ValueError) as error:
            raise DataError(f"{WHAT} {self._opening[0]!r}: a row holds what JSON cannot: {error}") from error


def _plain(value: Any) -> Any:
    """Make a plain value of numpy's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


if __name__ == "__main__":
    serve(_Rows, is_confined=True)
