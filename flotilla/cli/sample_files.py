"""Samples read from an experiment's directory, where no gateway is asked."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.shared.samples.query import SampleQuery

if TYPE_CHECKING:
    from flotilla.shared.samples.reading import ReadSample

READ_SECONDS = 30.0


def import_pyarrow_alone() -> None:
    """Import pyarrow without numpy, which takes a third of the command's time and makes arrays that it does not need.

    pyarrow works without numpy ever after: only for a process that does nothing else.
    """
    if "numpy" in sys.modules or "pyarrow" in sys.modules:
        return
    sys.modules["numpy"] = None  # type: ignore[assignment] # Documented: importing it then fails.
    try:
        from pyarrow import parquet  # noqa: F401
    finally:
        del sys.modules["numpy"]


def read_files(
    directory: Path, query: SampleQuery, limit: int, *, with_tokens: bool = False
) -> "tuple[list[ReadSample], int]":
    """Read samples of an experiment's directory; return them, and how many files are not in the index yet."""
    from flotilla.shared.samples.index import SampleIndex
    from flotilla.shared.samples.reading import read_page

    index = SampleIndex(directory)
    try:
        page = read_page(index, query, limit=limit, after=None, with_tokens=with_tokens, seconds=READ_SECONDS)
    finally:
        index.close()
    return page.items, page.num_unread
