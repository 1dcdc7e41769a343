"""Rows of an experiment's data, as other frameworks' tasks become them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as JSON lines; return how many."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)
