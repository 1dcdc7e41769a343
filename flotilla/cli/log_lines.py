"""The log files of a local fleet as lines for a person; pure, but for reading files."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.cli.log_rotation import older_log

LEVELS = ("debug", "info", "warning", "error", "critical")
USUAL = {"at", "level", "service", "logger", "message", "exception", "service_id", "experiment_id"}
BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one process.

    Attributes:
        process: name of the process, such as ``rollout-0``.
        text: as it was written, without the end of line.
        record: what it says, where it is a record; else None, as of a traceback that ended the process.
    """

    process: str
    text: str
    record: Mapping[str, Any] | None

    @property
    def at(self) -> str:
        """When, RFC 3339; empty where it is not said."""
        return str(self.record.get("at", "")) if self.record else ""

    @property
    def severity(self) -> int:
        """Place of its level in ``LEVELS``; a line without a level counts as an error."""
        level = str(self.record.get("level", "info")) if self.record else "error"
        return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")


def parse(process: str, text: str) -> LogLine:
    """Read one line."""
    record = None
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        record = found if isinstance(found, dict) and "message" in found else None
    return LogLine(process, text, record)


def plain(line: LogLine) -> str:
    """Write a line for a person: time (UTC), process, level, message, facts; a traceback follows, indented."""
    if line.record is None:
        return f"{'':8} {line.process:<10} {'':7} {_printable(line.text)}"
    record = line.record
    facts = "".join(f" {key}={_value(value)}" for key, value in record.items() if key not in USUAL)
    level = str(record.get("level", ""))
    text = f"{line.at[11:19]:8} {line.process:<10} {level:<7} {_printable(str(record['message']))}{facts}"
    trace = str(record.get("exception", "")).rstrip()
    return text + "".join(f"\n    {_printable(row)}" for row in trace.splitlines())


def _value(value: Any) -> str:
    return _printable(value if isinstance(value, str) else json.dumps(value))


def _printable(text: str) -> str:
    """Escape what could steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def choose_files(directory: Path, service: str | None) -> list[Path]:
    """Find the log files of a process (``rollout-0``), of a kind (``rollout``), or all; empty where there is none."""
    files = sorted(path for path in directory.glob("*.log"))
    if service is None:
        return files
    exact = [path for path in files if path.stem == service]
    return exact or [path for path in files if path.stem.rpartition("-")[0] == service]


def last_lines(path: Path, count: int, is_wanted: Callable[[str], bool] = lambda _: True) -> tuple[list[str], int]:
    """Read the last whole lines of a file that are wanted, and where it ends.

    Args:
        path: of the file, of which no more is read than that takes.
        count: how many, at most.
        is_wanted: whether to show a line.

    Returns:
        The lines, and the offset behind the last whole one of the file.
    """
    found: list[str] = []
    with path.open("rb") as file:
        start = offset = file.seek(0, os.SEEK_END)
        data, is_cut = b"", False
        while start > 0 and (not is_cut or len(found) < count):
            begin = max(0, start - BLOCK)
            file.seek(begin)
            data, start = file.read(start - begin) + data, begin
            if not is_cut:
                whole = data.rfind(b"\n") + 1
                if not whole and start > 0:
                    continue
                offset, data, is_cut = offset - (len(data) - whole), data[:whole], True
            # A line that begins before this block is read with the next one.
            first = data.find(b"\n") + 1 if start > 0 else 0
            wanted = [line for line in data[first:].decode("utf-8", "replace").splitlines() if is_wanted(line)]
            found = wanted[max(0, len(wanted) + len(found) - count) :] + found
            data = data[:first]
    return found, offset


@dataclass
class Tail:
    """One log that is read on, also where it is rotated; ``offset`` is behind the last whole line that was read."""

    path: Path
    offset: int = 0
    _put_aside: tuple[int, int] | None = field(init=False)
    """Which file is the newest of the older ones."""

    def __post_init__(self) -> None:
        self._put_aside = self._newest_older()[0]

    def _newest_older(self) -> tuple[tuple[int, int] | None, int]:
        try:
            facts = older_log(self.path, 1).stat()
        except FileNotFoundError:
            return None, 0
        return (facts.st_dev, facts.st_ino), facts.st_size

    def more(self) -> Iterator[LogLine]:
        """Read the whole lines that were added; a file that was made again is read from its start."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        put_aside, size_aside = self._newest_older()
        if put_aside != self._put_aside:
            if size >= size_aside:
                return  # not emptied yet
            yield from self._read(older_log(self.path, 1), size_aside)
            self._put_aside, self.offset = put_aside, 0
        if size < self.offset:
            self.offset = 0
        yield from self._read(self.path, size)

    def _read(self, path: Path, size: int) -> Iterator[LogLine]:
        with path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(max(0, size - self.offset))
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for text in whole.decode("utf-8", "replace").splitlines():
            yield parse(self.path.stem, text)


def merge(lines: Sequence[LogLine]) -> list[LogLine]:
    """Put the lines of several files in the order of time; a line without a time stays behind the one before it."""
    keyed: list[tuple[str, LogLine]] = []
    last: dict[str, str] = {}
    for line in lines:
        last[line.process] = line.at or last.get(line.process, "")
        keyed.append((last[line.process], line))
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]
