"""A session: one interpreter that is given cells one after the other and keeps what it knows between them.

While a cell runs, the guard watches it as it watches a program. Between two cells every process of the session is
stopped: it takes no processor time, allocates nothing, and need not be examined.
"""

import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from flotilla.services.sandbox.guard.files import fetch
from flotilla.services.sandbox.guard.job import (
    EXITED,
    OVER_LIMIT,
    TIMED_OUT,
    Cell,
    CellResult,
    Job,
    JobResult,
    PhaseResult,
)
from flotilla.services.sandbox.guard.messages import framed, read_message, write_all
from flotilla.services.sandbox.guard.place import Command, Place
from flotilla.services.sandbox.guard.process import Drain, feed, why_ended
from flotilla.services.sandbox.guard.session_main import FAILED, FINE
from flotilla.services.sandbox.guard.watch import (
    POLL_SECONDS,
    Baseline,
    cpu_seconds,
    find_excess,
    next_look,
    time_verdict,
)

INTERRUPT_SECONDS = 1.0
"""So long may a cell take to end after its time, having been interrupted, without costing the session."""
NAME = "run"


@dataclass
class Ended:
    """How a cell ended.

    Attributes:
        outcome: see ``PhaseResult``.
        return_code: 0, or 1 after an exception; the interpreter's own if that has ended; None if it was ended.
        is_alive: whether the interpreter is there, and waits for the next cell.
    """

    outcome: str
    return_code: "int | None"
    detail: str = ""
    is_alive: bool = False


@dataclass
class Interpreter:
    """The interpreter of a session, as the guard holds it.

    Attributes:
        cells, ends: where it receives cells, and reports that one has ended.
        closed: outputs without a writer.
    """

    job: Job
    caller: int
    place: Place
    command: Command
    cells: int
    ends: int
    closed: "set[int]" = field(default_factory=set)


def serve(job: Job, caller: int, place: Place) -> None:
    """Start the interpreter and give it the caller's cells until the caller goes away or the interpreter ends.

    Args:
        job: of the session.
        caller: stream of the service.
        place: where the interpreter runs.
    """
    child_cells, cells = os.pipe()
    ends, child_ends = os.pipe()
    command = place.start(job.phases[0], job, (child_cells, child_ends))
    os.close(command.stdin)  # its input is at an end
    for descriptor in (cells, ends):
        os.set_blocking(descriptor, False)
    interpreter = Interpreter(job, caller, place, command, cells, ends)
    try:
        with suppress(ConnectionError):
            tell(caller, CellResult(JobResult(error=command.reason), not command.reason))
            while not command.reason and (message := read_message(caller)):
                result = _run_cell(interpreter, Cell.from_wire(json.loads(message)))
                tell(caller, result)
                if not result.is_alive:
                    return
    finally:
        place.end()
        for descriptor in (cells, ends, *command.outputs):
            os.close(descriptor)


def tell(caller: int, result: CellResult) -> None:
    """Send a result to the service.

    Raises:
        ConnectionError: it went away.
    """
    write_all(caller, framed(json.dumps(result.to_wire()).encode()))


def _run_cell(interpreter: Interpreter, cell: Cell) -> CellResult:
    """Let the session run until a cell has ended; then stop all of it."""
    job, began = interpreter.job, time.monotonic()
    drains = [Drain(descriptor, job.limits.output_bytes) for descriptor in interpreter.command.outputs]
    before = Baseline.of(interpreter.place.tree())
    interpreter.place.signal(signal.SIGCONT)
    ended = _attend(interpreter, cell, drains, before)
    interpreter.place.signal(signal.SIGSTOP if ended.is_alive else signal.SIGKILL)
    for drain in drains:
        drain.read_present()
    phase = PhaseResult(
        NAME,
        ended.outcome,
        ended.return_code,
        time.monotonic() - began,
        drains[0].text(),
        drains[1].text(),
        ended.detail,
    )
    files, notes = fetch(interpreter.place.directory, cell.fetch, job.limits) if cell.fetch else ({}, [])
    return CellResult(JobResult((phase,), files, tuple(notes)), ended.is_alive)


def _attend(interpreter: Interpreter, cell: Cell, drains: "list[Drain]", before: Baseline) -> Ended:
    """Feed, drain and watch a cell until it has ended, or the session must."""
    watch = _Watch(interpreter, cell, before)
    unsent = memoryview(framed(cell.code.encode("utf-8", "surrogatepass")))
    open_drains = {drain.descriptor: drain for drain in drains if drain.descriptor not in interpreter.closed}
    poll = select.poll()
    for descriptor in (*open_drains, interpreter.caller, interpreter.ends):
        poll.register(descriptor, select.POLLIN)
    poll.register(interpreter.cells, select.POLLOUT)
    while True:
        for descriptor, _ in poll.poll(1000 * watch.seconds_left()):
            if descriptor == interpreter.caller:
                return Ended(OVER_LIMIT, None, "nobody waits for the answer any more")
            if descriptor == interpreter.ends:
                said = os.read(interpreter.ends, 1)
                if said not in (FINE, FAILED):
                    poll.unregister(interpreter.ends)  # it is closed: the interpreter is about to end, or never answers
                    continue
                return watch.ended(0 if said == FINE else 1)
            if descriptor == interpreter.cells:
                unsent = feed(interpreter.cells, unsent)
                if not unsent:
                    poll.unregister(interpreter.cells)
            elif descriptor in open_drains and not open_drains[descriptor].read():
                poll.unregister(descriptor)
                interpreter.closed.add(descriptor)
        if (ended := watch.look()) is not None:
            return ended


class _Watch:
    """Checks a running cell at intervals."""

    def __init__(self, interpreter: Interpreter, cell: Cell, before: Baseline) -> None:
        self._job = interpreter.job
        self._place = interpreter.place
        self._limit_seconds = cell.timeout_seconds
        self._before = before
        self._began = time.monotonic()
        self._next = self._began + POLL_SECONDS
        self._last: float | None = None
        self._verdict = TIMED_OUT

    def seconds_left(self) -> float:
        """Return how long until the next look."""
        return max(0.0, self._next - time.monotonic())

    def ended(self, return_code: int) -> Ended:
        """Return how a cell ended that the interpreter reports as ended."""
        if self._last is not None:
            return Ended(self._verdict, None, self._too_long(), is_alive=True)
        return Ended(EXITED, return_code, is_alive=True)

    def look(self) -> "Ended | None":
        """Look, if it is time to; None if the cell may continue."""
        if self._place.has_ended():
            return self._of_interpreter()
        now = time.monotonic()
        if self._last is not None and now >= self._last:
            return Ended(self._verdict, None, f"{self._too_long()}; it could not be interrupted")
        if now < self._next:
            return None
        work = time.process_time()
        job = self._job
        self._place.reap()
        tree = self._place.tree()
        verdict = time_verdict(tree, now - self._began, self._limit_seconds, self._before)
        if self._last is None and verdict is not None:
            self._verdict = verdict
            self._last = now + INTERRUPT_SECONDS
            self._place.interrupt()
        allowed = job.phases[0].timeout_seconds
        if cpu_seconds(tree) + self._place.reaped_seconds > allowed:
            return Ended(OVER_LIMIT, None, f"the session's processor time is used up: {allowed:g} s")
        excess = find_excess(tree, self._place.directory, job.limits, counts_held=job.confinement.counts_held)
        if excess is not None:
            return Ended(OVER_LIMIT, None, excess)
        self._next = next_look(work)
        return None

    def _too_long(self) -> str:
        return why_ended(self._verdict, self._limit_seconds)

    def _of_interpreter(self) -> Ended:
        assert self._place.status is not None
        code = os.waitstatus_to_exitcode(self._place.status)
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return Ended(EXITED, code, f"the interpreter ended {how}")
