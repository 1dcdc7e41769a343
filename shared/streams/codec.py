"""Tasks and groups as the fields of a stream entry, all msgpack: a small header, a payload and, of groups, grades.

The header can be read without the payload, by dashboards and by the server's scripts. Both have a schema number; a
reader refuses a payload of another schema and ignores header fields that it does not know.

A group's payload is its body: task, tokens, log-probabilities, all that its grading leaves as it was. What a grader
sets is a field of its own, some hundred bytes, so that a hop which only grades need not encode and send the body.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any

import msgpack

from flotilla.shared.schemas.prompt_image import ImageTable
from flotilla.shared.schemas.task import TASK_SCHEMA, Task
from flotilla.shared.schemas.trajectory import GROUP_SCHEMA, Group, Trajectory
from flotilla.shared.streams.partials import Partials, num_kept

PARTIALS = "partials"
"""Field of a task's payload."""


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """An entry's description of its payload.

    Attributes:
        schema: schema number of the payload.
        group_id: the group that the payload is, or will be.
        size: number of trajectories, made or wanted.
        token_count: tokens that the policy sampled, in all trajectories; for a task those that it was handed over with.
        oldest_version, newest_version: policy versions that sampled a token; the version at issue for a fresh task.
        reward_mean: mean of the scored trajectories' rewards; None if none is scored.
        reward_spread: their population standard deviation; None if none is scored.
        created_at: when the entry was made, seconds since the epoch.
    """

    schema: int
    group_id: int
    size: int
    token_count: int
    oldest_version: int
    newest_version: int
    reward_mean: float | None
    reward_spread: float | None
    created_at: float

    def to_bytes(self) -> bytes:
        """Encode it as a msgpack mapping."""
        packed: bytes = msgpack.packb(dict(zip(HEADER_FIELDS, _values(self), strict=True)))
        return packed

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "EntryHeader":
        """Read what ``to_bytes`` made, ignoring unknown fields.

        Raises:
            ValueError: a field is missing.
        """
        wire = msgpack.unpackb(encoded)
        try:
            return cls(*_fields(wire))
        except KeyError:
            missing = [name for name in HEADER_FIELDS if name not in wire]
            raise ValueError(f"entry header lacks {', '.join(missing)}") from None


HEADER_FIELDS = tuple(each.name for each in fields(EntryHeader))
_values = attrgetter(*HEADER_FIELDS)
_fields = itemgetter(*HEADER_FIELDS)


def task_header(task: Task, created_at: float | None = None, *, partials: Partials = ()) -> EntryHeader:
    """Describe a task, and what was sampled of it before; ``created_at`` defaults to now."""
    versions = [version for member in partials if member is not None for _, version in member.versions]
    return EntryHeader(
        schema=TASK_SCHEMA,
        group_id=task.group_id,
        size=task.group_size,
        token_count=num_kept(partials),
        oldest_version=min(versions, default=task.min_version),
        newest_version=max(versions, default=task.min_version),
        reward_mean=None,
        reward_spread=None,
        created_at=time.time() if created_at is None else created_at,
    )


def encode_fresh_header(task: Task) -> bytes:
    """Encode what ``task_header`` makes, as of now, of a task that nothing was sampled of."""
    version = task.min_version
    header = (TASK_SCHEMA, task.group_id, task.group_size, 0, version, version, None, None, time.time())
    packed: bytes = msgpack.packb(dict(zip(HEADER_FIELDS, header, strict=True)))
    return packed


def graded_header(group: Group, sampled: EntryHeader) -> EntryHeader:
    """Describe, as of now, a group that differs from the one that ``sampled`` describes in its grades only."""
    mean, spread = _moments(group.rewards())
    return EntryHeader(
        schema=GROUP_SCHEMA,
        group_id=sampled.group_id,
        size=sampled.size,
        token_count=sampled.token_count,
        oldest_version=sampled.oldest_version,
        newest_version=sampled.newest_version,
        reward_mean=mean,
        reward_spread=spread,
        created_at=time.time(),
    )


def group_header(group: Group, created_at: float | None = None) -> EntryHeader:
    """Describe a group; ``created_at`` defaults to now."""
    oldest, newest = group.version_range()
    mean, spread = _moments(group.rewards())
    return EntryHeader(
        schema=GROUP_SCHEMA,
        group_id=group.task.group_id,
        size=len(group.trajectories),
        token_count=group.num_sampled,
        oldest_version=oldest,
        newest_version=newest,
        reward_mean=mean,
        reward_spread=spread,
        created_at=time.time() if created_at is None else created_at,
    )


def _moments(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return mean and population standard deviation; None without rewards."""
    if not rewards:
        return None, None
    # Plain arithmetic: numpy and statistics take longer to start than a handful of rewards to sum.
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum([(reward - mean) ** 2 for reward in rewards]) / len(rewards))


def encode_task(task: Task, partials: Partials = ()) -> bytes:
    """Encode a task as a payload, with what was sampled of it before."""
    wire = task.to_wire()
    if partials:
        table = ImageTable(task.images)
        wire[PARTIALS] = [None if member is None else member.to_wire(table) for member in partials]
    packed: bytes = msgpack.packb(wire)
    return packed


def encode_body(group: Group) -> bytes:
    """Encode all of a group but its grades, as a payload."""
    packed: bytes = msgpack.packb(group.body_to_wire())
    return packed


def encode_grades(group: Group) -> bytes:
    """Encode what graders have set of a group."""
    packed: bytes = msgpack.packb(group.grades_to_wire())
    return packed


def decode_task(payload: bytes) -> Task:
    """Read a task.

    Raises:
        ValueError: the payload has another schema; the message names both numbers.
    """
    wire = _unpack(payload)
    wire.pop(PARTIALS, None)
    return Task.from_wire(wire)


def decode_partials(payload: bytes) -> Partials:
    """Read what was sampled of a task before it was handed over; empty for a fresh one.

    Raises:
        ValueError: the payload is no mapping.
    """
    wire = _unpack(payload)
    known: list[bytes] = list(wire.get("images", ()))
    return tuple([None if member is None else Trajectory.from_wire(member, known) for member in wire.get(PARTIALS, ())])


def decode_group(payload: bytes, grades: bytes) -> Group:
    """Read a group; its arrays are read-only.

    Raises:
        ValueError: the payload has another schema; the message names both numbers. Or the grades are not the group's.
    """
    # An entry of another schema may have no grades, and it is its schema that matters then.
    return Group.from_wire(_unpack(payload), msgpack.unpackb(grades) if grades else ())


def _unpack(payload: bytes) -> dict[str, Any]:
    unpacked = msgpack.unpackb(payload, strict_map_key=False)
    if not isinstance(unpacked, dict):
        raise ValueError(f"a payload is a mapping, got {type(unpacked).__name__}")  # noqa: TRY004
    return unpacked
