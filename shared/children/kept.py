"""A program that is not ours and starts others: nothing of it outlives us, whoever is killed and when.

Between it and us is a keeper (``keeper.py``), which ends when nothing of the program is left, ends everything when we
die, and ends as the program did.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

from flotilla.shared.children import keeper
from flotilla.shared.children.processes import READ_BYTES, LastWords, reap

LAST_WORDS_SECONDS = 1.0
"""Its children may hold its output open: no more is waited for than this."""
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Kept:
    """Such a program. Made by :meth:`start`.

    Args:
        process: the keeper, of which the program is the first child and whose number is their process group's.
        lifeline: while we have this descriptor open they live.
        reading: of what they write.
    """

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, reading: "asyncio.Task[None]") -> None:
        self._process, self._lifeline, self._reading = process, lifeline, reading
        self._ended_at: float | None = None
        self._ending = asyncio.create_task(self._note_end(), name="end")

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        directory: Path,
        on_line: Callable[[str], None],
        seconds: float,
    ) -> "Kept":
        """Start it; it is not up yet when this returns.

        Args:
            command: program and arguments.
            environment: all of its variables.
            directory: that it works in.
            on_line: gets each line that it and its children write, of one without end its last part.
            seconds: what its children have to tidy up when it has ended by itself.

        Raises:
            OSError: no process can be started. Of a program that cannot, the exit code is ``keeper.CANNOT_START``.
        """
        # A pipe of our own: asyncio would call the program ended only once its last child has closed one of asyncio's.
        reading, writing = os.pipe()
        lifeline, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                keeper.__file__,
                str(seconds),
                *command,
                stdin=lifeline,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            os.close(ours)
            raise
        finally:
            os.close(lifeline)
            os.close(writing)
        output = os.fdopen(reading, "rb", buffering=0)
        return cls(process, ours, asyncio.create_task(_read(output, LastWords(on_line)), name="output"))

    @property
    def pid(self) -> int:
        """Of its keeper, and of their process group."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether there is no process of it any more."""
        return self._process.returncode is not None

    async def ended(self) -> int:
        """Wait until it has ended by itself and its last lines are heard; return its exit code."""
        code = await self._process.wait()
        await asyncio.wait([self._reading], timeout=LAST_WORDS_SECONDS)
        return code

    async def close(self, seconds: float) -> None:
        """End it and its children, by force after some seconds."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        # Now the keeper kills whatever is left.
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        await reap(self._process)
        await asyncio.wait([self._ending], timeout=LAST_WORDS_SECONDS)
        # Somebody may have killed the keeper: a child that stays would keep its memory and its device.
        if self._ended_at is not None and _is_group_of(self.pid, self._ended_at):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._ending.cancel()
        self._reading.cancel()
        await asyncio.wait([self._ending, self._reading])

    async def _note_end(self) -> None:
        await self._process.wait()
        self._ended_at = time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_group_of(leader: int, ended_at: float) -> bool:
    """Tell whether a process group is the one of a leader that has ended: its number may have been given again.

    The number stays taken while a member lives, so of that group one was born before the leader's end; of a later one
    none was, and its own leader may live.

    Args:
        leader: its process id, which is the group's.
        ended_at: when it had ended; seconds since the boot.
    """
    births = dict(_births_in(leader))
    return leader not in births and any(birth <= ended_at for birth in births.values())


def _births_in(group: int) -> Iterator[tuple[int, float]]:
    """Find the members of a process group that have not ended, and when they were born, in seconds since the boot."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                # The program's name is in brackets, and may hold any.
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[2]) == group and fields[0] not in {b"Z", b"X"}:
                    yield int(process.name), int(fields[19]) / TICKS_A_SECOND


async def _read(output: FileIO, words: LastWords) -> None:
    reader = asyncio.StreamReader()
    with output:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        try:
            # By chunks, since a reader of lines gives up on a long one, and then a full pipe would block the program.
            while data := await reader.read(READ_BYTES):
                words.hear(data)
        finally:
            transport.close()
