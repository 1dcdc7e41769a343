"""Child processes: how they are started, and that they never outlive their owner.

Of a foreign program that starts others nothing outlives us, whichever process is killed, and when. Between it and us is
a keeper (``keeper.py``), which ends when nothing of the program is left, ends everything when we die, and ends as the
program did.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

import psutil

from flotilla.shared.children import keeper

TAIL_LINES: Final = 40
SHOWN_LINES: Final = 4
MAX_LINE_CHARACTERS: Final = 400
READ_BYTES: Final = 1 << 16


class LastWords:
    """Keeps the last lines of what a process writes, and passes all of it on.

    Args:
        on_line: gets each line, of one without end its last part; None: this process' standard error gets what comes.
    """

    def __init__(self, on_line: Callable[[str], None] | None = None) -> None:
        self._on_line = on_line
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._is_hidden = False

    def hear(self, data: bytes) -> None:
        """Take what was read from its standard error."""
        if self._on_line is None:
            # Ours may be closed or full: the child's must be read all the same, or it would wait for that.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
        *lines, rest = (self._rest + data).split(b"\n")
        # A line without end is not kept whole: only its end is shown.
        self._rest = rest[-READ_BYTES:]
        for line in lines:
            self.add(line)

    def add(self, line: bytes) -> None:
        """Keep one line."""
        if line.strip():
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text[-MAX_LINE_CHARACTERS:])
            if self._on_line is None:
                # With it comes pydantic, which a command that starts no process does without.
                from flotilla.shared.telemetry.recent import RECENT

                RECENT.hear(text)
            else:
                self._on_line(text)

    def hide(self) -> None:
        """Show none of them from now on: they may be of another owner than the one who is shown them."""
        self._is_hidden = True

    def shown(self) -> str:
        """Return ``; its last lines: ...``, or nothing where there are none."""
        if self._is_hidden:
            return "; its last lines are in the log of the service: they may be of several experiments"
        last = [*self._tail, *([self._rest.decode("utf-8", "replace")[-MAX_LINE_CHARACTERS:]] if self._rest else [])]
        return f"; its last lines: {' | '.join(last[-SHOWN_LINES:])}" if last else ""


def unheard(line: str) -> None:
    """Take a line that is kept for the last words alone."""


def signal_name(code: int) -> str:
    """Name the signal of a negative exit code."""
    return signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else str(-code)


def cause_of_death(code: int | None, *, is_out_of_memory: bool = False, is_killed_here: bool = False) -> str:
    """Describe how a process ended, as what follows its name in a sentence.

    Args:
        code: its exit code; negative for a signal; None where it has not ended although it was killed.
        is_out_of_memory: whether the kernel has killed a process of this control group for memory meanwhile.
        is_killed_here: whether its owner killed it.
    """
    if code is None:
        return "does not end although it was killed"
    if code >= 0:
        return f"ended with code {code}"
    words = signal_name(code)
    if -code == signal.SIGKILL and not is_killed_here:
        words += ", killed by the kernel because memory ran out" if is_out_of_memory else ", by hand or for memory"
    return f"ended with code {code} ({words})"


@contextmanager
def collecting_later() -> Iterator[None]:
    """Import what a process needs for good; called by ``__main__`` modules alone.

    The collector would look through all modules so far again and again while they are imported, and a last time when
    the interpreter ends: with torch and transformers that is two seconds of five. Nothing that exists at the end of
    the block is examined again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


PR_SET_PDEATHSIG = 1
REAP_SECONDS = 10.0
POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


def birth_of(pid: int) -> str | None:
    """Name the process that has an id now, by the boot and the moment that it began in: ids are given again.

    Returns:
        None where there is none, or only its exit code is left (a zombie).
    """
    try:
        # The program's name is in brackets, and may hold any; the 22nd field is when the process began.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else f"{boot}/{fields[19].decode()}"


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules with this interpreter.

    ``-P`` keeps the working directory, which is the user's, off the module path: a file ``random.py`` there would
    otherwise be imported in place of Python's own.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


async def reap(
    process: asyncio.subprocess.Process, *, seconds: float = REAP_SECONDS, exited: asyncio.Event | None = None
) -> int | None:
    """Wait for the end of a child that was killed; return its exit code, or None if it did not end in time.

    SIGKILL does not end a process in uninterruptible sleep (disk, device): such processes are not awaited.

    Args:
        process: the child.
        seconds: longest time.
        exited: is set when it has ended; None: its pipes must be closed too, which its own children may hold open.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (process.wait() if exited is None else exited.wait())
            return process.returncode
    log.error("a killed process does not end", extra={"pid": process.pid})
    return None


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a child; one that has just ended by itself keeps its exit code.

    ``Process.kill`` asks first whether the child lives, which takes the exit code away from the event loop: it then
    says 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def end_family() -> None:
    """Kill every process that descends from this one, and wait for their ends; blocks.

    All are found before any is killed: a process without its parent is not found any more. Nothing is reaped here: that
    is for whichever process started them.
    """
    family = psutil.Process().children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    end = time.monotonic() + REAP_SECONDS
    while left := [process.pid for process in family if _lives(process)]:
        if time.monotonic() > end:
            log.error("killed processes do not end", extra={"pids": left})
            return
        time.sleep(POLL_SECONDS)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def die_with_parent(parent_pid: int | None = None, *, with_signal: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends.

    Without the request (not Linux) nothing happens: the parent then ends its children itself.

    Args:
        parent_pid: the expected parent; if it has ended already, this process ends at once.
        with_signal: the signal to get.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, with_signal, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), with_signal)


def end_after(pid: int) -> None:
    """Have this process get SIGTERM when another one has ended, which need not be its parent; within a second."""
    birth = birth_of(pid)

    def wait() -> None:
        while birth is not None and birth_of(pid) == birth:
            time.sleep(LOOK_SECONDS)
        log.warning("the fleet has ended, and so does this process", extra={"pid": pid})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end after", daemon=True).start()


def tie_to_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that ties a program which is not ours to this process; None where there is no such call.

    The library is loaded before the fork: between fork and exec the child may make system calls only.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie


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
        # The keeper may have been killed: a child that stays would keep its memory and its device.
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
    """Return whether a process group is the one of a leader that has ended: its number may have been reused.

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
