"""The recorder of one process: spans wait in memory, and a thread writes or sends them in OpenTelemetry's JSON.

It blocks no caller. Spans that come faster than they are sent are dropped and counted, as are undelivered ones.

Every process computes the same ids. A group's trace has an id made of experiment, lane and group: nothing is carried
along, and a group that is claimed again after a crash continues with its trace. So has the span of its issue, below
which all others are.
"""

import hashlib
import json
import logging
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import httpx

from flotilla.shared.schemas.task import Lane

log = logging.getLogger(__name__)


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


Json = Attribute | dict[str, "Json"] | list["Json"]

MOST_WAITING: Final = 20_000
MOST_SENT: Final = 2_000
"""Spans of one message."""
PERIOD_SECONDS: Final = 1.0
SEND_SECONDS: Final = 5.0
FILE_BYTES: Final = 64 * 1024**2
"""A file of spans that has grown so long is set aside as ``.1``, in place of the one before."""


class Sink(Protocol):
    """Takes messages, in order, on one thread. One that it raises an error for is left out."""

    def put(self, message: bytes) -> None:
        """Write or send one."""

    def close(self) -> None:
        """Drop what it holds."""


class FileSink:
    """A file of JSON lines, each a message as a collector takes them; two of them at most.

    Raises:
        OSError: the folder cannot be made, or nothing can be written there.
    """

    def __init__(self, folder: Path, process: str, most_bytes: int = FILE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Containers share the folder, and count their processes alike.
        self.path = folder / f"spans-{process}-{socket.gethostname()}-{os.getpid()}.jsonl"
        self._most_bytes = most_bytes
        self._file = self.path.open("ab")

    def put(self, message: bytes) -> None:
        """Append a line."""
        if self._file.tell() and self._file.tell() + len(message) > self._most_bytes:
            self._file.close()
            try:
                self.path.replace(self.path.with_suffix(".jsonl.1"))
            finally:
                self._file = self.path.open("ab")
        self._file.write(message + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CollectorSink:
    """A collector that takes OTLP over HTTP, in JSON."""

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/v1/traces"
        self._client = httpx.Client(timeout=SEND_SECONDS, follow_redirects=False)

    def put(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the collector does not take it.
            httpx.HTTPError: it does not answer.
        """
        answer = self._client.post(self._url, content=message, headers={"Content-Type": "application/json"})
        if not answer.is_success:
            # httpx' own error has the whole address, with a password.
            raise OSError(f"the collector answers {answer.status_code}")

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class Tracer:
    """Takes spans from any thread.

    Args:
        process: of the fleet, the spans' ``service.name`` behind ``flotilla-``.
        sink: where they go.
        share: of all traces, from 0 to 1; every process of a fleet takes the same.
    """

    def __init__(self, process: str, sink: Sink, share: float = 1.0) -> None:
        self._resource: dict[str, Attribute] = {"service.name": f"flotilla-{process}", "process.pid": os.getpid()}
        self._sink = sink
        self._limit = round(share * (1 << 32))
        self._random = random.Random()  # Names that differ, no secrets.
        self._waiting: deque[Span] = deque()
        self._wake = threading.Event()
        self._is_closed = False
        self.lost = 0
        """Spans that were left out."""
        self._is_well = True
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def takes(self, trace_id: str) -> bool:
        """Whether a trace is one of the share."""
        return int(trace_id[:8], 16) < self._limit

    def new_id(self) -> str:
        """Make the id of a span."""
        return f"{self._random.getrandbits(64) or 1:016x}"

    def record(self, span: Span) -> None:
        """Take a span; it is left out if too many wait, or it is not of the share."""
        if not self.takes(span.trace_id):
            return
        if self._is_closed or len(self._waiting) >= MOST_WAITING:
            self.lost += 1
            return
        self._waiting.append(span)

    def close(self) -> None:
        """Write what waits, within the time that sending one message may take, and end."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(SEND_SECONDS + PERIOD_SECONDS)

    def _run(self) -> None:
        while not self._wake.wait(PERIOD_SECONDS):
            self._put_all()
        self._put_all()
        if self.lost:
            log.warning("spans were left out", extra={"spans": self.lost})
        self._sink.close()

    def _put_all(self) -> None:
        while self._waiting:
            spans = [self._waiting.popleft() for _ in range(min(MOST_SENT, len(self._waiting)))]
            try:
                self._sink.put(message_of(self._resource, spans))
            except Exception as error:  # Whatever it is, the next message is tried.
                self.lost += len(spans)
                if self._is_well:
                    log.warning("spans cannot be written, and are left out", extra={"error": repr(error)})
                self._is_well = False
                return
            self._is_well = True


def message_of(resource: Mapping[str, Attribute], spans: Sequence[Span]) -> bytes:
    """Write spans as an ``ExportTraceServiceRequest`` in OTLP's JSON.

    Source: OpenTelemetry Protocol 1.10, JSON Protobuf Encoding: ids in hexadecimal, 64-bit integers as strings.
    """
    scope: Json = {"scope": {"name": "flotilla"}, "spans": [_span(each) for each in spans]}
    document: Json = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
    return json.dumps(document, separators=(",", ":")).encode()


def _span(span: Span) -> dict[str, Json]:
    made: dict[str, Json] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(round(span.began * 1e9)),
        "endTimeUnixNano": str(round(max(span.began, span.ended) * 1e9)),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id is not None:
        made["parentSpanId"] = span.parent_id
    if span.error is not None:
        made["status"] = {"code": 2, "message": span.error}
    return made


def _attributes(values: Mapping[str, Attribute]) -> list[Json]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Attribute) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}
