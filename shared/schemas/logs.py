"""Lines that a process logged, as it keeps the newest of them to be examined."""

from collections.abc import Mapping

from pydantic import Field

from flotilla.shared.schemas.wire import TolerantWire

LEVELS = ("debug", "info", "warning", "error", "critical")
MOST_LINES = 1000
"""Most lines of one answer, and about as many as a process keeps."""


class LogEntry(TolerantWire):
    """One line."""

    at: str = ""
    """RFC 3339; when it was read if the line has no time of its own, such as a library's."""
    level: str = ""
    """One of debug, info, warning, error, critical; empty where the line names none."""
    process: str = ""
    """What wrote it, such as rollout or trainer-worker."""
    message: str
    facts: str = ""
    """What belongs to it, as ``name=value``, and its traceback."""
    experiment_id: str | None = None
    """The experiment that the process worked for; None if unknown."""


class LogLines(TolerantWire):
    """The newest lines that one process and its children logged, oldest first."""

    items: tuple[LogEntry, ...] = Field((), max_length=MOST_LINES)


class ServiceLogEntry(LogEntry):
    """One line of one service."""

    service_id: str
    """Of the service, or ``gateway``."""


class ServiceLogLines(TolerantWire):
    """The newest lines of several services by time, oldest first."""

    items: tuple[ServiceLogEntry, ...]
    unread: Mapping[str, str] = {}
    """Services whose log could not be read, and why not."""
