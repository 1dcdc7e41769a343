"""JSON lines on standard error, each with the experiment, service, task and policy version it belongs to."""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from typing import Any

from shared.clock import rfc3339

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
STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


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
        line |= {name: value for name, variable in CONTEXT.items() if (value := variable.get()) is not None}
        line |= {key: value for key, value in record.__dict__.items() if key not in STANDARD}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


def configure_logging(service: str, level: str = "INFO") -> None:
    """Send every record of this process to standard error as JSON lines; called by ``__main__`` only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
