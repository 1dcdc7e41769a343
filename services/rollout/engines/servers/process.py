"""A server that is ours, a program of another environment: started, watched, ended with all its processes."""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from flotilla.services.rollout.engines.servers import leftovers
from flotilla.services.rollout.engines.servers.dialect import Launch
from flotilla.shared.children.keeper import CANNOT_START
from flotilla.shared.children.kept import Kept
from flotilla.shared.errors import InvalidSpec, WorkerDied

log = logging.getLogger(__name__)

LAST_LINES = 20
ERROR_LINES = 200
"""Of the last lines, in how many the error is looked for that ended a server: tracebacks are long."""
MAX_LINE = 400
USAGE_EXIT_CODE = 2
"""Of a program that refuses its arguments."""
ERROR = re.compile(r"\b(?:\w+(?:Error|Exception): |Value error, )(?!.*(?:root cause above|for the root cause\.)).+")
"""In a line; vLLM's front ends with some that only refer to another, pydantic's is told a line after its name."""
MISSING = re.compile(r"No module named '?([\w.]+)")
CHILDREN_SECONDS = 3.0
"""What its children have to tidy up when its first process has ended by itself."""


class ServerProcess:
    """One server process with its children.

    Args:
        python: interpreter that has the server.
        launch: how it is started.
        place: directory for its files, which is the caller's to delete.
        name: of this kind of server, for messages.
        variable: that names the interpreter.

    Attributes:
        was_up: whether it has answered: its end is no refusal of its arguments or of its environment then.
    """

    def __init__(self, python: Path, launch: Launch, place: Path, *, name: str, variable: str) -> None:
        self._python = python
        self._launch = launch
        self._place = place
        self._name = name
        self._variable = variable
        self.was_up = False
        self._kept: Kept | None = None
        self._lines: deque[str] = deque(maxlen=ERROR_LINES)

    @property
    def process_id(self) -> int | None:
        """Of its keeper, while that runs: the server is its first child."""
        return self._kept.pid if self._kept is not None and not self._kept.has_ended else None

    @property
    def last_lines(self) -> str:
        """What it wrote last."""
        return " | ".join(list(self._lines)[-LAST_LINES:]) or "no output"

    async def start(self) -> None:
        """Start it; it is not up yet when this returns."""
        launch = self._launch
        await asyncio.to_thread(write_private, self._place, launch.files)
        self._kept = await Kept.start(
            (str(self._python), *launch.arguments),
            environment=launch.environment,
            directory=self._place,
            on_line=self._hear,
            seconds=CHILDREN_SECONDS,
        )

    async def ended(self) -> WorkerDied | InvalidSpec:
        """Wait until it has ended by itself, and return the cause."""
        assert self._kept is not None
        code = await self._kept.ended()
        last = self.last_lines
        if code == CANNOT_START:
            return WorkerDied(f"{self._variable} {self._python} cannot be started: {last}")
        if not self.was_up and self._lines and (missing := MISSING.search(self._lines[-1])):
            return InvalidSpec(
                f"{self._variable} {self._python} cannot run {self._name}, it has no module {missing[1]}: set it to "
                f"the interpreter of an environment in which {self._name} is installed (docs/engines.md), or set "
                "rollout.engine.url to the address of a server"
            )
        if not self.was_up and code == USAGE_EXIT_CODE:
            why = next((line for line in reversed(self._lines) if "error" in line.lower()), last)
            return InvalidSpec(f"the {self._name} server refuses rollout.engine.options: {why}")
        errors = [found[0] for line in self._lines if " WARNING " not in line and (found := ERROR.search(line))]
        if code >= 0 and errors:
            cause = f"the {self._name} server ended by exit code {code}: {errors[-1]} (more is in the rollout's log)"
            return WorkerDied(cause, exit_code=code)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return WorkerDied(f"the {self._name} server ended by {how}; last lines: {last}", exit_code=code)

    async def note_leftovers(self) -> None:
        """Note what it would leave behind if it were killed, or we; see ``servers.leftovers``."""
        if self._kept is not None:
            # Where the disk is full nothing is noted; the server is watched and ended all the same.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(leftovers.note, self._place, self._kept.pid, self._launch.shared_memory)

    async def close(self, seconds: float) -> None:
        """End it and its children, by force after some seconds, and remove what they left behind."""
        if self._kept is not None:
            await self.note_leftovers()
            await self._kept.close(seconds)
            await asyncio.to_thread(leftovers.remove, self._place)

    def _hear(self, line: str) -> None:
        self._lines.append(line[:MAX_LINE])
        log.info("engine output", extra={"line": line[:MAX_LINE]})


def write_private(place: Path, files: Mapping[str, str]) -> None:
    """Write files that hold a server's secrets, and that nobody else may read."""
    for name, text in files.items():
        descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write(text)
