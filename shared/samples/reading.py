"""Reads samples out of their files, a page at a time."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.samples.folder import open_samples_file, read_columns
from flotilla.shared.samples.index import Found, SampleIndex
from flotilla.shared.samples.query import SampleQuery

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
CURSOR = re.compile(r"([0-3]?[0-9]{1,12})-([0-9]{1,15})", re.ASCII)
"""Milliseconds and a number of samples, which the index makes numbers of 63 bits of."""


@dataclass(frozen=True, kw_only=True)
class ReadSample:
    """One sample, in the fields of ``SampleView``, and as plain as JSON.

    Neither numpy nor a validated model: each costs a command more than all of its reading.
    """

    id: str
    kind: str
    step: int | None
    version: int
    group_id: int
    member: int
    row: int
    data_source: str | None
    label: str | None
    prompt: str
    completion: str
    finish_reason: str
    status: str
    reward: float | None
    reason: str | None
    answer: str | None
    ended: str | None
    num_sampled: int
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    messages: Sequence[Mapping[str, Any]]
    turns: Sequence[Mapping[str, Any]]
    is_baseline: bool
    oldest_version: int
    newest_version: int
    lag: int | None
    advantage: float | None
    tokens: Mapping[str, Any] | None


_MADE = {"id", "messages", "turns", "is_baseline", "oldest_version", "newest_version", "lag", "advantage", "tokens"}
_MAPS = ("components", "metrics", "timings")
_TEXTS = tuple(each.name for each in fields(ReadSample) if each.name not in {*_MADE, *_MAPS})
_READ = ("place", *_TEXTS, *_MAPS, "messages", "turns", "is_baseline", "versions", "lags", "advantages")


class FoundPage(NamedTuple):
    """One page of samples, in the fields of ``SamplePage``."""

    items: list[ReadSample]
    next: str | None
    num_files: int
    num_unread: int

    def plain(self) -> dict[str, Any]:
        """Write it as ``SamplePage`` has it in JSON."""
        return self._asdict() | {"items": [dict(vars(each)) for each in self.items]}


def read_page(
    index: SampleIndex, query: SampleQuery, *, limit: int, after: str | None, with_tokens: bool, seconds: float
) -> FoundPage:
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
    return FoundPage(
        items=read_samples(index.path, answer.found, with_tokens=with_tokens),
        next=f"{answer.newest}-{offset + limit}" if answer.has_more else None,
        num_files=answer.num_files,
        num_unread=answer.num_unread,
    )


def read_samples(folder: Path, found: Sequence[Found], *, with_tokens: bool) -> list[ReadSample]:
    """Read samples in the order in which they were found; one whose file went meanwhile is left out."""
    from pyarrow import ArrowException

    members: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for number, each in enumerate(found):
        members[each.file][each.place, each.member] = number
    views: dict[int, ReadSample] = {}
    names = [*_READ, *(TOKEN_COLUMNS if with_tokens else ())]
    for name, wanted in members.items():
        try:
            table = read_columns(folder, name, list(dict.fromkeys(names)))
        except (OSError, ArrowException):
            continue
        keys = zip(table.column("place").to_pylist(), table.column("member").to_pylist(), strict=True)
        rows = [number for number, key in enumerate(keys) if key in wanted]
        # Not ``take``: it imports pyarrow.compute, and pandas where there is one, 0.3 s of CPU time.
        for row in (table.slice(number, 1).to_pylist()[0] for number in rows):
            views[wanted[row["place"], row["member"]]] = _view(name, row, with_tokens=with_tokens)
    return [views[number] for number in sorted(views)]


class Picture(NamedTuple):
    """An image that the policy was shown.

    Attributes:
        turn: that it was shown before, from 0.
        data: as it was encoded.
    """

    turn: int
    data: bytes


def images_of(folder: Path, samples: Sequence[ReadSample]) -> dict[str, list[Picture]]:
    """Read the images that samples were shown, by the sample's id; without those whose file went, or that have none."""
    from pyarrow import ArrowException, parquet

    from flotilla.shared.samples.table import ADDED, SHOWN

    found: dict[str, list[Picture]] = {}
    for sample in samples:
        name, place, member = sample.id.rsplit("/", 2)
        try:
            with open_samples_file(folder, f"{name}.parquet") as file:
                stored = parquet.ParquetFile(file)
                held = {"images", SHOWN, ADDED} & {*stored.schema_arrow.names}
                if not held:
                    continue
                rows = stored.read(columns=["place", *held]).to_pylist()
        except (OSError, ArrowException):
            continue
        shown = _pictures([row for row in rows if row["place"] == int(place)], int(member), sample.turns)
        if shown:
            found[sample.id] = shown
    return found


def _pictures(rows: Sequence[Mapping[str, Any]], member: int, turns: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Find the images of a member among the rows of its group, which are in the members' order."""
    from flotilla.shared.samples.table import shown_images

    if member >= len(rows):  # the file is another one by now
        return []
    of_task = rows[0].get("images") or ()
    known = list(dict.fromkeys(of_task))
    listed = [shown_images(row, known) for row in rows][member]
    if not listed:
        return [Picture(0, image) for image in of_task]
    ends = [int(turn["end"]) for turn in turns]
    return [Picture(sum(end <= each.start for end in ends), each.data) for each in listed]


def _view(file: str, row: Mapping[str, Any], *, with_tokens: bool) -> ReadSample:
    messages, versions, lags = json.loads(row["messages"]), row["versions"], row["lags"]
    advantages = [value for value in row["advantages"] or () if not math.isnan(value)]
    plain: dict[str, Any] = {name: row.get(name) for name in _TEXTS} | {
        name: dict(row.get(name) or ()) for name in _MAPS
    }
    return ReadSample(
        id=f"{file.removesuffix('.parquet')}/{row['place']}/{row['member']}",
        **plain,
        messages=[{"role": role, "content": content} for role, content in messages],
        turns=json.loads(row.get("turns") or "[]"),
        is_baseline=bool(row.get("is_baseline")),
        oldest_version=min(versions),
        newest_version=max(versions),
        lag=max(lags) if lags else None,
        advantage=fmean(advantages) if advantages else None,
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
    found = CURSOR.fullmatch(after)
    if found is None:
        raise InvalidRequest(f"after: {after!r} is not a cursor of this list")
    return int(found[1]), int(found[2])
