"""Samples read from an experiment's directory, where no gateway is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_SECONDS = 30.0


def read_files(directory: Path, query: Mapping[str, Any], limit: int) -> tuple[list[dict[str, Any]], int]:
    """Read samples of an experiment's directory; return them, and how many files are not in the index yet."""
    from shared.samples.index import SampleIndex
    from shared.samples.reading import read_page
    from shared.schemas.samples import SampleQuery

    renamed = {"kind": "kinds", "failed": "is_failure"}
    wanted = {renamed.get(name, name): value for name, value in query.items() if name not in {"tokens", "limit"}}
    if "kinds" in wanted:
        wanted["kinds"] = wanted["kinds"].split(",")
    index = SampleIndex(directory)
    try:
        page = read_page(
            index,
            SampleQuery.model_validate(wanted),
            limit=limit,
            after=None,
            with_tokens="tokens" in query,
            seconds=READ_SECONDS,
        )
    finally:
        index.close()
    return [item.model_dump(mode="json") for item in page.items], page.num_unread
