"""Samples read from an experiment's directory, where no gateway is asked."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def read_files(directory: Path, query: Mapping[str, Any], limit: int) -> tuple[list[dict[str, Any]], int]:
    """Read samples of an experiment's directory; return them, and how many files are not in the index yet."""
    from flotilla.shared.samples.index import SampleIndex
    from flotilla.shared.samples.query import SampleOrder, SampleQuery
    from flotilla.shared.samples.reading import read_page
    from flotilla.shared.schemas.sample_kinds import SampleKind

    wanted = SampleQuery(
        step=query.get("step"),
        kinds=tuple(SampleKind(kind) for kind in query["kind"].split(",")) if "kind" in query else (),
        row=query.get("row"),
        group=query.get("group"),
        is_failure="failed" in query,
        order=SampleOrder(query["order"]),
    )
    index = SampleIndex(directory)
    try:
        page = read_page(
            index,
            wanted,
            limit=limit,
            after=None,
            with_tokens="tokens" in query,
            seconds=READ_SECONDS,
        )
    finally:
        index.close()
    return page.items, page.num_unread
