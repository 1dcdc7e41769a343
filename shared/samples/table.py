"""Samples as columns: one row per trajectory, and back to the very same groups.

pyarrow is imported where it is needed: it takes 0.1 s and 50 MB, which a process that keeps nothing does without.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from flotilla.shared.schemas.prompt_image import ImageTable, PromptImage, read_images
from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind, TrainedTokens
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.schemas.turns import Turn

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1
ILLUSTRATED_SCHEMA = 2
"""Of a file with trajectories that list what they were shown: earlier releases would read such images as text."""
FACTS = b"flotilla"
"""Key of the file's facts among the schema's metadata."""

SETTINGS = "settings"
"""Column of what was changed while the experiment ran; in files with groups that carry such settings."""

EXPERTS = "experts"
"""Column of the experts that engines chose, which a step's replay needs; in files with trajectories that have some."""

SHOWN, ADDED = "shown_images", "added_images"
"""Columns of the images that trajectories list, as start, tokens and number, and of those that no row above in the
group has; in files with such trajectories."""

REQUIRED = frozenset(
    {"kind", "place", "group_id", "row", "messages", "group_size", "seed", "label", "data_source", "metadata"}
    | {"min_version", "pinned_version", "greedy", "issued_at", "prompt", "ended", "completion", "finish_reason"}
    | {"status", "reward", "components", "reason", "timings", "resumed_tokens", "token_ids", "loss_mask", "log_probs"}
    | {"version_starts", "versions", "advantages", "old_log_probs", "trained_log_probs", "loss_weights", "clipped"}
    | {"ref_log_probs", "lag_starts", "lags"}
)
"""Columns that are in every file, of earlier releases too, and without which no group can be made."""

_Pair = tuple[KeptGroup, int]
"""A group, and the number of one of its trajectories."""


def to_table(file: SampleFile) -> pa.Table:
    """Lay out a file's samples as columns."""
    import pyarrow as pa

    _look_for_no_pandas()
    pairs = [(kept, member) for kept in file.groups for member in range(len(kept.group.trajectories))]
    places = [place for place, kept in enumerate(file.groups) for _ in kept.group.trajectories]
    columns: dict[str, pa.Array] = {
        "kind": pa.array([kept.kind for kept, _ in pairs], pa.string()),
        "step": pa.array([file.step] * len(pairs), pa.int64()),
        "version": pa.array([file.version] * len(pairs), pa.int64()),
        "place": pa.array(places, pa.int32()),
        "member": pa.array([member for _, member in pairs], pa.int32()),
    }
    for name, kind, read in _of_tasks():
        values = [read(kept.group.task) for kept in file.groups]  # of which each row of the group has the same
        columns[name] = pa.array([values[place] for place in places], kind)
    if any(kept.group.task.images for kept in file.groups):
        # With the first of a group alone: they are its prompt's.
        shown = [list(kept.group.task.images) if member == 0 else None for kept, member in pairs]
        columns |= {"images": pa.array(shown, pa.list_(pa.binary()))}
    if any(kept.group.task.settings for kept in file.groups):
        columns |= {SETTINGS: pa.array([_json(dict(kept.group.task.settings)) for kept, _ in pairs], pa.string())}
    columns["prompt"] = pa.array([kept.group.prompt for kept, _ in pairs], pa.string())
    columns["ended"] = pa.array([kept.reason for kept, _ in pairs], pa.string())
    trajectories = [kept.group.trajectories[member] for kept, member in pairs]
    is_illustrated = any(each.images for each in trajectories)
    if is_illustrated:
        columns |= _shown_columns(file.groups)
    if any(each.experts is not None for each in trajectories):
        packed = [None if each.experts is None else msgpack.packb(each.experts.to_wire()) for each in trajectories]
        columns |= {EXPERTS: pa.array(packed, pa.binary())}
    for name, kind, read_grade in _of_trajectories():
        columns[name] = pa.array([read_grade(each) for each in trajectories], kind)
    columns |= _token_columns(trajectories) | _trained_columns(pairs)
    schema = ILLUSTRATED_SCHEMA if is_illustrated else SCHEMA
    facts = {"schema": schema, "step": file.step, "version": file.version} | dict(file.facts)
    table = pa.table(columns)
    return table.replace_schema_metadata({FACTS: json.dumps(facts).encode()})


def _shown_columns(groups: Sequence[KeptGroup]) -> dict[str, pa.Array]:
    """Lay out what trajectories list of what they were shown; the bytes of an image once for a group."""
    import pyarrow as pa

    places, added = list[str | None](), list[list[bytes] | None]()
    for kept in groups:
        table = ImageTable(kept.group.task.images)
        for each in kept.group.trajectories:
            where, new = table.placed(each.images)
            places.append(_json(where) if where else None)
            added.append(new or None)
    return {SHOWN: pa.array(places, pa.string()), ADDED: pa.array(added, pa.list_(pa.binary()))}


@cache
def _look_for_no_pandas() -> None:
    """Keep pyarrow from importing pandas, half a second of a processor, to see whether its first list is a series.

    A frame asked for later is searched for again.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    sys.modules["pandas"] = None  # type: ignore[assignment]
    try:
        with contextlib.suppress(ImportError, AttributeError):
            pa.array([])
    finally:
        del sys.modules["pandas"]


def facts_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Read the facts about a file from its schema's metadata.

    Raises:
        ValueError: another program, or another release, wrote it.
    """
    facts: dict[str, Any] = json.loads((metadata or {}).get(FACTS, b"{}"))
    if facts.get("schema") not in (SCHEMA, ILLUSTRATED_SCHEMA):
        known = f"{SCHEMA} and {ILLUSTRATED_SCHEMA}"
        raise ValueError(f"the file has schema {facts.get('schema')!r} of samples, this version reads {known}")
    return facts


def to_groups(table: pa.Table) -> list[KeptGroup]:
    """Make the groups that ``to_table`` laid out, in their order; what is NaN without a value stays so.

    Raises:
        ValueError: the table has another schema.
    """
    facts_of(table.schema.metadata)
    rows = table.to_pylist()
    return [_group(list(members)) for _, members in groupby(rows, key=lambda row: row["place"])]


def _of_tasks() -> list[tuple[str, pa.DataType, Callable[[Task], Any]]]:
    import pyarrow as pa

    return [
        ("group_id", pa.int64(), lambda t: t.group_id),
        ("row", pa.int64(), lambda t: t.row),
        ("messages", pa.string(), _messages),
        ("label", pa.string(), lambda t: t.label),
        ("data_source", pa.string(), lambda t: t.data_source),
        ("metadata", pa.string(), _metadata),
        ("group_size", pa.int32(), lambda t: t.group_size),
        ("seed", pa.int64(), lambda t: t.seed),
        ("min_version", pa.int64(), lambda t: t.min_version),
        ("pinned_version", pa.int64(), lambda t: t.pinned_version),
        ("greedy", pa.bool_(), lambda t: t.greedy),
        ("issued_at", pa.float64(), lambda t: t.issued_at),
    ]


def _of_trajectories() -> list[tuple[str, pa.DataType, Callable[[Trajectory], Any]]]:
    import pyarrow as pa

    numbers = pa.map_(pa.string(), pa.float64())
    return [
        ("completion", pa.string(), lambda t: t.text),
        ("finish_reason", pa.string(), lambda t: t.finish_reason),
        ("status", pa.string(), lambda t: t.status),
        ("reward", pa.float64(), lambda t: t.reward),
        ("components", numbers, lambda t: list(t.components.items())),
        ("reason", pa.string(), lambda t: t.reason),
        ("answer", pa.string(), lambda t: t.answer),
        ("timings", numbers, lambda t: list(t.timings.items())),
        ("metrics", numbers, lambda t: list(t.metrics.items())),
        ("num_sampled", pa.int32(), lambda t: t.num_sampled),
        ("resumed_tokens", pa.int32(), lambda t: t.resumed_tokens),
        ("turns", pa.string(), lambda t: _json([turn.to_wire() for turn in t.turns]) if t.turns else None),
        ("is_baseline", pa.bool_(), lambda t: t.is_baseline),
        ("episode", pa.string(), lambda t: t.episode),
    ]


def _token_columns(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    return {
        "token_ids": _lists([t.token_ids for t in trajectories], np.int32),
        "loss_mask": _lists([t.loss_mask for t in trajectories], np.uint8),
        "log_probs": _lists([t.log_probs for t in trajectories], np.float32),
        "version_starts": _lists([[start for start, _ in t.versions] for t in trajectories], np.int32),
        "versions": _lists([[version for _, version in t.versions] for t in trajectories], np.int64),
        "teacher_log_probs": _lists([t.teacher_log_probs for t in trajectories], np.float32),
    }


_TRAINED = (
    ("advantages", "advantages"),
    ("old_log_probs", "old_log_probs"),
    ("trained_log_probs", "log_probs"),
    ("loss_weights", "weights"),
    ("clipped", "clipped"),
    ("ref_log_probs", "ref_log_probs"),
)
"""Columns of [T] floats, and the attribute of ``TrainedTokens`` that each holds."""


def _trained_columns(pairs: Sequence[_Pair]) -> dict[str, pa.Array]:
    found = [kept.tokens[member] if kept.tokens else None for kept, member in pairs]
    columns = {
        name: _lists([None if each is None else getattr(each, attribute) for each in found], np.float32)
        for name, attribute in _TRAINED
    }
    lags = [None if each is None else each.lags for each in found]
    columns["lag_starts"] = _lists([None if each is None else [start for start, _ in each] for each in lags], np.int32)
    columns["lags"] = _lists([None if each is None else [lag for _, lag in each] for each in lags], np.int32)
    return columns


def _lists(values: Sequence[Any], dtype: type[np.generic]) -> pa.Array:
    """Lay lists end to end; a None becomes a null."""
    import pyarrow as pa

    if all(value is None for value in values):
        return pa.nulls(len(values), pa.list_(pa.from_numpy_dtype(dtype)))
    present = [value for value in values if value is not None]
    if isinstance(present[0], np.ndarray):
        flat = np.concatenate(present).astype(dtype, copy=False)
    else:
        # Mostly of one number each: an array for each of them would take thrice as long.
        flat = np.array(list(chain.from_iterable(present)), dtype)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    mask = None if len(present) == len(values) else pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=mask)


def _group(rows: Sequence[Mapping[str, Any]]) -> KeptGroup:
    first = rows[0]
    task = Task(
        group_id=first["group_id"],
        row=first["row"],
        messages=tuple(Message(role, content) for role, content in json.loads(first["messages"])),
        group_size=first["group_size"],
        seed=first["seed"],
        label=first["label"],
        data_source=first["data_source"],
        metadata=json.loads(first["metadata"] or "{}"),
        min_version=first["min_version"],
        pinned_version=first["pinned_version"],
        greedy=first["greedy"],
        issued_at=first["issued_at"],
        images=tuple(first.get("images") or ()),
        settings=json.loads(first.get(SETTINGS) or "{}"),
    )
    known = list(dict.fromkeys(task.images))
    trajectories = tuple([_trajectory(row, shown_images(row, known)) for row in rows])
    tokens = [_tokens(row) for row in rows]
    return KeptGroup(Group(task, trajectories, first["prompt"]), SampleKind(first["kind"]), first["ended"], tokens)


def shown_images(row: Mapping[str, Any], known: list[bytes]) -> tuple[PromptImage, ...]:
    """Read what a row's trajectory lists; ``known`` are the images of the rows above, and is added to."""
    return read_images(json.loads(row.get(SHOWN) or "[]"), row.get(ADDED) or (), known)


def _trajectory(row: Mapping[str, Any], images: tuple[PromptImage, ...]) -> Trajectory:
    return Trajectory(
        token_ids=np.array(row["token_ids"], np.int32),
        loss_mask=np.array(row["loss_mask"], np.uint8),
        log_probs=np.array(row["log_probs"], np.float32),
        versions=tuple(zip(row["version_starts"], row["versions"], strict=True)),
        finish_reason=FinishReason(row["finish_reason"]),
        text=row["completion"],
        status=GradeStatus(row["status"]),
        reward=row["reward"],
        components=dict(row["components"]),
        reason=row["reason"],
        answer=row.get("answer"),
        timings=dict(row["timings"]),
        metrics=dict(row.get("metrics") or ()),
        resumed_tokens=row["resumed_tokens"],
        # Files that were written before there were turns have neither.
        turns=tuple(Turn.from_wire(turn) for turn in json.loads(row.get("turns") or "[]")),
        is_baseline=row.get("is_baseline") or False,
        episode=row.get("episode"),
        teacher_log_probs=None if (taught := row.get("teacher_log_probs")) is None else np.array(taught, np.float32),
        experts=None if (routed := row.get(EXPERTS)) is None else RoutedExperts.from_wire(msgpack.unpackb(routed)),
        images=images,
    )


def _tokens(row: Mapping[str, Any]) -> TrainedTokens | None:
    if row["advantages"] is None:
        return None
    values: dict[str, Any] = {
        attribute: None if row[name] is None else np.array(row[name], np.float32) for name, attribute in _TRAINED
    }
    return TrainedTokens(**values, lags=tuple(zip(row["lag_starts"], row["lags"], strict=True)))


def _json(value: object) -> str:
    return _ENCODER.encode(value)


def _messages(task: Task) -> str:
    # Word by word: for a list an encoder makes another one each time, which takes longer than to write it.
    encode = _ENCODER.encode
    return f"[{', '.join([f'[{encode(each.role)}, {encode(each.content)}]' for each in task.messages])}]"


def _metadata(task: Task) -> str | None:
    encode, found = _ENCODER.encode, task.metadata.items()
    return f"{{{', '.join([f'{encode(str(name))}: {encode(value)}' for name, value in found])}}}" if found else None


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=repr)


def newest_version(groups: Iterable[KeptGroup]) -> int:
    """Find the newest version that sampled a token of some groups."""
    return max(kept.group.version_range()[1] for kept in groups)
