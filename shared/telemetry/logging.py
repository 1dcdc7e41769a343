"""Records on standard error, each with the experiment, service, task and policy version it belongs to.

One JSON object a line for programs, one readable line for a person at a terminal.
"""

import json
import logging
import sys
import textwrap
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Literal, cast

from flotilla.shared.clock import rfc3339

experiment_id: ContextVar[str | None] = ContextVar("experiment_id", default=None)
service_id: ContextVar[str | None] = ContextVar("service_id", default=None)
task_id: ContextVar[int | None] = ContextVar("task_id", default=None)
policy_version: ContextVar[int | None] = ContextVar("policy_version", default=None)

CONTEXT: dict[str, ContextVar[Any]] = {
    "experiment_id": experiment_id,
    "service_id": service_id,
    "task_id": task_id,
    "policy_version": policy_version,
}
STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}

LogFormat = Literal["json", "plain"]
FORMATS = ("auto", "json", "plain")


def format_for(wanted: str, *, is_terminal: bool) -> LogFormat:
    """Choose how records are written.

    Args:
        wanted: one of ``FORMATS``; ``auto`` is plain on a terminal and JSON elsewhere.
        is_terminal: whether a person may be looking.
    """
    if wanted == "auto":
        return "plain" if is_terminal else "json"
    return cast(LogFormat, wanted)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """Collect the context variables and what was given as ``extra``."""
    facts = {name: value for name, variable in CONTEXT.items() if (value := variable.get()) is not None}
    return facts | {key: value for key, value in record.__dict__.items() if key not in STANDARD}


def traceback_of(record: logging.LogRecord) -> str | None:
    """Write the traceback of a record that has one."""
    if record.exc_info and record.exc_info[0] is not None:
        return "".join(traceback.format_exception(*record.exc_info))
    return None


class JsonLines(logging.Formatter):
    """One JSON object per record: the fixed phrase, the facts of ``extra`` and the context variables."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        line: dict[str, Any] = {
            "at": rfc3339(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= facts_of(record)
        if (trace := traceback_of(record)) is not None:
            line["exception"] = trace
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """Time (UTC), level, service, the fixed phrase, then the facts as ``name=value``; a traceback follows, indented."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        time = rfc3339(record.created)[11:19]
        facts = plain_facts(facts_of(record).items())
        line = (
            f"{time} {record.levelname:<8} {self._service:<8} {_printable(record.getMessage())}{facts and ' '}{facts}"
        )
        trace = traceback_of(record)
        return line if trace is None else f"{line}\n{textwrap.indent(trace.rstrip(), '    ')}"


def plain_facts(facts: Iterable[tuple[str, Any]]) -> str:
    """Write facts as ``name=value``, with a space between two."""
    return " ".join(f"{name}={_plain(value)}" for name, value in facts)


def _plain(value: Any) -> str:
    """Write a value with a recognisable end; terminal control characters are escaped."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    if not isinstance(value, str):
        return _printable(text)
    is_one_word = bool(text) and text.isprintable() and not any(character in text for character in ' ="')
    return text if is_one_word else json.dumps(text)


def _printable(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def configure_logging(
    service: str, level: str = "INFO", log_format: str = "auto", *, also: logging.Handler | None = None
) -> None:
    """Send every record of this process to standard error; called by ``__main__`` only.

    Args:
        service: named in each record.
        level: least severe level that is written.
        log_format: one of ``FORMATS``.
        also: gets each of these records, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_plain = format_for(log_format, is_terminal=sys.stderr.isatty()) == "plain"
    handler.setFormatter(PlainLines(service) if is_plain else JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler] if also is None else [handler, also]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
