"""Reads samples out of their files, a page at a time."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import InvalidRequest
from shared.samples.index import Found, SampleIndex
from shared.schemas.samples import SamplePage, SampleQuery, SampleView

TOKEN_COLUMNS = (
    "token_ids",
    "loss_mask",
    "log_probs",
    "version_starts",
    "versions",
    "advantages",
    "old_log_probs",
    "trained_log_probs",
    "ref_log_probs",
    "loss_weights",
    "clipped",
    "lag_starts",
    "lags",
)
_TEXTS = (
    "kind",
    "step",
    "version",
    "group_id",
    "member",
    "row",
    "data_source",
    "label",
    "prompt",
    "completion",
    "finish_reason",
    "status",
    "reward",
    "reason",
    "answer",
    "ended",
    "num_sampled",
)
_MAPS = ("components", "metrics", "timings")
_READ = ("place", *_TEXTS, *_MAPS, "messages", "turns", "is_baseline", "versions", "lags", "advantages")


def read_page(
    index: SampleIndex, query: SampleQuery, *, limit: int, after: str | None, with_tokens: bool, seconds: float
) -> SamplePage:
    """Find and read one page; blocks.

    Args:
        index: of the experiment.
        query: which samples.
        limit: most of them.
        after: ``next`` of the page before.
        with_tokens: whether each comes with its tokens.
        seconds: that reading new files into the index may take.

    Raises:
        InvalidRequest: ``after`` is not a cursor of this list.
    """
    newest, offset = _position(after)
    answer = index.find(query, limit=limit, offset=offset, newest=newest, seconds=seconds)
    return SamplePage(
        items=tuple(read_samples(index.path, answer.found, with_tokens=with_tokens)),
        next=f"{answer.newest}-{offset + limit}" if answer.has_more else None,
        num_files=answer.num_files,
        num_unread=answer.num_unread,
    )


def read_samples(folder: Path, found: Sequence[Found], *, with_tokens: bool) -> list[SampleView]:
    """Read samples in the order in which they were found; one whose file went meanwhile is left out."""
    from pyarrow import ArrowException, parquet

    members: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for number, each in enumerate(found):
        members[each.file][each.place, each.member] = number
    views: dict[int, SampleView] = {}
    names = [*_READ, *(TOKEN_COLUMNS if with_tokens else ())]
    for name, wanted in members.items():
        try:
            table = parquet.ParquetFile(folder / name).read(columns=list(dict.fromkeys(names)))
        except (OSError, ArrowException):
            continue
        keys = zip(table.column("place").to_pylist(), table.column("member").to_pylist(), strict=True)
        rows = [number for number, key in enumerate(keys) if key in wanted]
        # Not ``take``: it imports pyarrow.compute, and pandas where there is one, 0.3 s of CPU time.
        for row in (table.slice(number, 1).to_pylist()[0] for number in rows):
            views[wanted[row["place"], row["member"]]] = _view(name, row, with_tokens=with_tokens)
    return [views[number] for number in sorted(views)]


def _view(file: str, row: Mapping[str, Any], *, with_tokens: bool) -> SampleView:
    advantages = None if row["advantages"] is None else np.array(row["advantages"], np.float32)
    mean = None if advantages is None or np.isnan(advantages).all() else float(np.nanmean(advantages))
    return SampleView(
        id=f"{file.removesuffix('.parquet')}/{row['place']}/{row['member']}",
        **{name: row.get(name) for name in _TEXTS},
        **{name: dict(row.get(name) or ()) for name in _MAPS},
        messages=tuple({"role": role, "content": content} for role, content in json.loads(row["messages"])),
        is_baseline=bool(row.get("is_baseline")),
        turns=tuple(json.loads(row.get("turns") or "[]")),
        oldest_version=min(row["versions"]),
        newest_version=max(row["versions"]),
        lag=max(row["lags"]) if row["lags"] else None,
        advantage=mean,
        tokens={name: _finite(row.get(name)) for name in TOKEN_COLUMNS} if with_tokens else None,
    )


def _finite(values: Sequence[Any] | None) -> list[Any] | None:
    """Let NaN be null: JSON has none."""
    if values is None:
        return None
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def _position(after: str | None) -> tuple[int | None, int]:
    if after is None:
        return None, 0
    newest, dash, offset = after.partition("-")
    if not dash or not newest.isdigit() or not offset.isdigit():
        raise InvalidRequest(f"after: {after!r} is not a cursor of this list")
    return int(newest), int(offset)
