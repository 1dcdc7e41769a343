"""Feeding, draining and watching one command, and ending everything that it started.

A command is over only when every process below the first one of its run has ended.
"""

import binascii
import math
import os
import select
import time
from contextlib import suppress

from flotilla.services.sandbox.guard.job import (
    EXITED,
    NOT_STARTED,
    OVER_LIMIT,
    PHASE_OVER,
    STARVED,
    Job,
    Phase,
    PhaseResult,
)
from flotilla.services.sandbox.guard.place import Place
from flotilla.services.sandbox.guard.watch import (
    POLL_SECONDS,
    Baseline,
    Blockage,
    find_excess,
    next_look,
    time_verdict,
)
from flotilla.services.sandbox.limits import longest_seconds

CHUNK_BYTES = 65536
PIPE_BYTES = 1 << 20
QUIET_SECONDS = 0.02
"""For so long the outputs of a command are not read: most end before, and to wake up for each output takes time."""


class Drain:
    """Keeps the first bytes of a stream and reads the rest to throw it away."""

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self.descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._kept = bytearray()
        self._is_cut = False
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Read what there is; False at the end of the stream."""
        try:
            piece = os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return True
        room = self._limit_bytes - len(self._kept)
        self._kept += piece[:room]
        self._is_cut = self._is_cut or len(piece) > room
        return bool(piece)

    def read_rest(self) -> None:
        """Read the rest once there is no writer."""
        while self.read():
            pass

    def read_present(self) -> None:
        """Read what a pipe can hold, not waiting for its end: its writers live, and are stopped."""
        for _ in range(PIPE_BYTES // CHUNK_BYTES):
            self.read()

    def text(self) -> str:
        """Return what was kept as base64; a cut stream ends with a note, so that it equals no expected output."""
        note = f"\n[output cut after {self._limit_bytes} bytes]\n".encode() if self._is_cut else b""
        return binascii.b2a_base64(bytes(self._kept) + note, newline=False).decode()


def run_phase(phase: Phase, job: Job, place: Place, caller: int, *, is_last: bool) -> PhaseResult:
    """Run one command until it ends, exceeds a limit, or its time is over.

    Args:
        phase: the command.
        job: within which limits.
        place: where.
        caller: stream of the service; it becomes readable once the answer is not awaited any more.
        is_last: all that the job has left behind is ended with this command; otherwise only if it fails.
    """
    started = time.monotonic()
    command = place.start(phase, job, is_last=is_last)
    drains = [Drain(descriptor, job.limits.output_bytes) for descriptor in command.outputs]
    if command.reason:
        os.close(command.stdin)
        outcome, detail = _not_started(phase, job), command.reason
    else:
        given = binascii.a2b_base64(phase.stdin)
        outcome, detail = _Attendance(phase, job, place, caller).run(command.stdin, given, drains)
    if place.reason:
        outcome, detail = _not_started(phase, job), place.reason
    if outcome != EXITED or time.monotonic() > started + POLL_SECONDS:
        with suppress(OSError):  # the caller has gone
            os.write(caller, PHASE_OVER)
    status = place.end() if is_last or outcome != EXITED else place.status
    for drain in drains:
        drain.read_rest()
        os.close(drain.descriptor)
    code = None if status is None or outcome == NOT_STARTED else os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    return PhaseResult(phase.name, outcome, code, seconds, drains[0].text(), drains[1].text(), detail)


def _not_started(phase: Phase, job: Job) -> str:
    """Decide whose fault it is: what lies in the working directory was made by the program, and has to exist."""
    return OVER_LIMIT if phase.argv[0].startswith(f"{job.directory}/") else NOT_STARTED


class _Attendance:
    """Feeds, drains and watches a command until it ends by itself or has to be ended."""

    def __init__(self, phase: Phase, job: Job, place: Place, caller: int) -> None:
        self._phase = phase
        self._job = job
        self._place = place
        self._caller = caller
        self._started = time.monotonic()
        self._before, self._blockage = Baseline.of({}), Blockage()
        self._deadline = self._started + phase.timeout_seconds
        self._due = self._started + POLL_SECONDS

    def run(self, stdin: int, given: bytes, drains: "list[Drain]") -> "tuple[str, str]":
        """Return the outcome and its detail; closes ``stdin``, to which ``given`` is written."""
        ending = self._place.ending.fileno()
        unsent, open_drains = memoryview(given), {drain.descriptor: drain for drain in drains}
        listens_from = self._started + QUIET_SECONDS
        poll = select.poll()
        poll.register(self._caller, select.POLLIN)
        poll.register(ending, select.POLLIN)
        try:
            if given:
                os.set_blocking(stdin, False)
                unsent = feed(stdin, unsent)
            if unsent:
                poll.register(stdin, select.POLLOUT)
            else:
                os.close(stdin)
                stdin = -1
            while True:
                until = min(self._due, self._deadline, listens_from)
                for descriptor, _ in poll.poll(1000 * max(0.0, until - time.monotonic())):
                    if descriptor == ending and self._place.has_ended():
                        return EXITED, ""
                    if descriptor == self._caller:
                        return OVER_LIMIT, "nobody waits for the answer any more"
                    if descriptor in open_drains and not open_drains[descriptor].read():
                        poll.unregister(descriptor)
                        del open_drains[descriptor]
                    elif descriptor == stdin:
                        unsent = feed(stdin, unsent)
                        if not unsent:
                            poll.unregister(stdin)
                            os.close(stdin)
                            stdin = -1
                if time.monotonic() >= listens_from:
                    listens_from = math.inf
                    for descriptor in open_drains:
                        poll.register(descriptor, select.POLLIN)
                if (ended := self._look()) is not None:
                    return ended
        finally:
            if stdin >= 0:
                os.close(stdin)

    def _look(self) -> "tuple[str, str] | None":
        """Look, if it is time to, at what the command has used; None if it may continue."""
        now = time.monotonic()
        if now >= self._deadline:
            limit = self._phase.timeout_seconds
            tree = self._place.tree()
            verdict = time_verdict(tree, now - self._started, limit, self._before, self._blockage.seconds)
            if verdict is not None:
                return verdict, why_ended(verdict, limit)
            self._deadline = now + POLL_SECONDS
        if now >= self._due:
            work = time.process_time()
            tree = self._place.tree()
            self._before.look(tree)
            self._blockage.look(tree, now)
            counts_held = self._job.confinement.counts_held
            excess = find_excess(tree, self._place.directory, self._job.limits, counts_held=counts_held)
            if excess is not None:
                return OVER_LIMIT, excess
            self._due = next_look(work)
        return None


def why_ended(verdict: str, limit_seconds: float) -> str:
    """Return why the time of a command was over."""
    if verdict == STARVED:
        return f"the machine was too busy to give it {limit_seconds:g} s within {longest_seconds(limit_seconds):g} s"
    return f"time limit exceeded: {limit_seconds:g} s"


def feed(descriptor: int, unsent: memoryview) -> memoryview:
    """Write some of it; an empty view means that there is no more to write, or no reader."""
    try:
        return unsent[os.write(descriptor, unsent[:CHUNK_BYTES]) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return memoryview(b"")
