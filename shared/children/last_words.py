"""How a child process ended, for the person who has to mend it: its last lines, and what its exit code means."""

import contextlib
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

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
            if self._on_line is not None:
                self._on_line(text)

    def shown(self) -> str:
        """Return ``; its last lines: ...``, or nothing where there are none."""
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
