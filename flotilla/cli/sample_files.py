"""Samples read from an experiment's directory, where no gateway is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_SECONDS = 30.0


def read_files(directory: Path, query: Mapping[str, Any], limit: int) -> tuple[list[dict[str, Any]], int]:
    """Read samples of an experiment's directory; return them, and how many files are not in the index yet."""
    from shared.samples.index import SampleIndex
    from shared.samples.kinds import SampleKind
    from shared.samples.query import SampleOrder, SampleQuery
    from shared.samples.reading import read_page

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
