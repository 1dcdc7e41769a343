"""The newest lines that this process and its children logged, kept in memory to be read over the network.

Bounded in lines and characters. What looks like a credential is taken out before a line is shown, whichever process
wrote it: Flotilla's records have none, but children and libraries may. Most lines are never read.
"""

import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from flotilla.shared.clock import rfc3339
from flotilla.shared.config.redaction import redacted_line
from flotilla.shared.schemas.logs import LEVELS, MOST_LINES, LogEntry, LogLines
from flotilla.shared.telemetry.logging import experiment_id, facts_of, plain_facts, traceback_of

MOST_CHARACTERS: Final = 1_000_000
"""Of all lines that are kept."""
LONGEST: Final = 2000
"""Characters of a message, and of its facts."""
OURS: Final = frozenset({"at", "level", "service", "logger", "message", "exception", "experiment_id"})
_PLAIN: Final = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(\S+) +(.*)", re.DOTALL)
_OWNER: Final = re.compile(r'[^"=]* experiment_id=([\w.-]+)(?: |$)')
"""The first of a line's facts: behind it are values that may hold the same words."""


class _Kept:
    """A line, from which secrets are removed when it is first read."""

    __slots__ = ("_entry", "_is_redacted", "size")

    def __init__(self, entry: LogEntry) -> None:
        cut = {"message": entry.message[:LONGEST], "facts": entry.facts[:LONGEST]}
        self._entry = entry.model_copy(update=cut)
        self._is_redacted = False
        self.size = sum(map(len, cut.values()))

    @property
    def level(self) -> str:
        """What has no secrets needs no look."""
        return self._entry.level

    @property
    def experiment_id(self) -> str | None:
        """Likewise."""
        return self._entry.experiment_id

    def shown(self) -> LogEntry:
        """Return it without secrets."""
        if not self._is_redacted:
            entry = self._entry
            shown = {"message": redacted_line(entry.message), "facts": redacted_line(entry.facts)}
            self._entry, self._is_redacted = entry.model_copy(update=shown), True
        return self._entry


class RecentLines:
    """Keeps lines; any thread may add to it and look."""

    def __init__(self, most: int = MOST_LINES, characters: int = MOST_CHARACTERS) -> None:
        self._most, self._characters = most, characters
        self._kept: deque[_Kept] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, entry: LogEntry) -> None:
        """Keep a line, cut; the oldest go where there are too many."""
        kept = _Kept(entry)
        with self._lock:
            self._kept.append(kept)
            self._size += kept.size
            while len(self._kept) > self._most or self._size > self._characters:
                self._size -= self._kept.popleft().size

    def hear(self, line: str) -> None:
        """Keep a line that a child wrote: a Flotilla record, or anything."""
        if line.strip():
            self.add(_entry_of(line))

    def newest(self, count: int, *, of: str | None = None, least: str = "debug", containing: str = "") -> LogLines:
        """Return the newest lines that are wanted, oldest first.

        Args:
            count: how many, at most.
            of: the experiment that they belong to; None: any, and lines that belong to none.
            least: level that they have at least; a line that names no level is wanted at each.
            containing: what process, message or facts have in them, in capitals or not.
        """
        wanted, words = LEVELS.index(least), containing.casefold()
        with self._lock:
            kept = list(self._kept)
        found: list[LogEntry] = []
        for each in reversed(kept):
            if len(found) == count:
                break
            is_severe = each.level not in LEVELS or LEVELS.index(each.level) >= wanted
            if not is_severe or (of is not None and each.experiment_id != of):
                continue
            entry = each.shown()
            if words in f"{entry.process} {entry.message} {entry.facts}".casefold():
                found.append(entry)
        return LogLines(items=tuple(reversed(found)))


RECENT: Final = RecentLines()
"""Of this process."""


class KeepRecent(logging.Handler):
    """Keeps each record of this process.

    Args:
        process: what it is called.
        lines: where they are kept.
    """

    def __init__(self, process: str, lines: RecentLines = RECENT) -> None:
        super().__init__()
        self._process = process
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        try:
            facts = facts_of(record)
            owner = facts.pop("experiment_id", None)
            trace = traceback_of(record)
            entry = LogEntry(
                at=rfc3339(record.created),
                level=record.levelname.lower(),
                process=self._process,
                message=record.getMessage(),
                facts=plain_facts(facts.items()) + ("" if trace is None else f"\n{trace.rstrip()}"),
                experiment_id=None if owner is None else str(owner),
            )
            self._lines.add(entry)
        except Exception:
            self.handleError(record)


def _entry_of(line: str) -> LogEntry:
    """Read a line of a child; the experiment is what it says, else what the child works for, which may be none."""
    record = dict(_record_of(line))
    at, owner = rfc3339(time.time()), experiment_id.get()
    if not record:
        if (found := _PLAIN.fullmatch(line)) is None:
            return LogEntry(at=at, message=line, experiment_id=owner)
        if owner is None and (named := _OWNER.match(found[3])) is not None:
            owner = named[1]
        return LogEntry(at=at, level=found[1].lower(), process=found[2], message=found[3], experiment_id=owner)
    trace = str(record.get("exception", "")).rstrip()
    facts = {key: value for key, value in record.items() if key not in OURS}
    return LogEntry(
        at=str(record.get("at", at)),
        level=str(record.get("level", "")),
        process=str(record.get("service", "")),
        message=str(record["message"]),
        facts=plain_facts(facts.items()) + (f"\n{trace}" if trace else ""),
        experiment_id=str(record["experiment_id"]) if record.get("experiment_id") else owner,
    )


def _record_of(line: str) -> Iterable[tuple[str, object]]:
    """Read the fields of a Flotilla record; none where the line is something else."""
    if not line.startswith("{"):
        return ()
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ()
    return found.items() if isinstance(found, dict) and "message" in found else ()
