"""Spans, and the ids that every process computes alike. Pure.

A group's trace has an id made of experiment, lane and group: nothing is carried along, and a group that is claimed
again after a crash goes on with its trace. So has the span of its issue, below which all others are.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flotilla.shared.schemas.task import Lane

Attribute = str | int | float | bool
TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8


class Place(NamedTuple):
    """Where a span hangs: its trace, and the span above it. Hexadecimal, as OpenTelemetry has it."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """What was done from one time to another; seconds since the epoch.

    Attributes:
        parent_id: the span above it; None for the first of its trace.
        error: the kind of error that ended it; None where none did.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    began: float
    ended: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None


def issue_of(experiment_id: str, lane: Lane, group_id: int) -> Place:
    """Return the trace of a group, and the span of its issue."""
    named = f"{experiment_id}/{lane.value}/{group_id}".encode()
    digest = hashlib.blake2b(named, digest_size=TRACE_BYTES + SPAN_BYTES).hexdigest()
    return Place(digest[: 2 * TRACE_BYTES], digest[2 * TRACE_BYTES :])
