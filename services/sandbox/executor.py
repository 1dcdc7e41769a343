"""Running one program: start a guard in its isolation, give it the job, read its result, leave nothing behind.

The service trusts the guard's result only as far as the program cannot gain by forging it. Whatever happens, when
``run`` returns no process and no file of the program is left.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.sandbox.cgroups import ControlGroups, Group
from services.sandbox.guard.job import OVER_LIMIT, READY, Job, JobResult, Phase, PhaseResult
from services.sandbox.guard.watch import descendants
from services.sandbox.isolation import Isolation, Slot
from services.sandbox.languages import TOOL_PATH
from services.sandbox.limits import Limits, longest_seconds
from services.sandbox.slots import sweep
from services.sandbox.trees import remove_tree
from shared.errors import FlotillaError, Unavailable
from shared.processes import reap

log = logging.getLogger(__name__)

START_SECONDS = 20.0
END_SECONDS = 15.0
"""Beyond the time of the phases: for the guard to end the program and to answer."""
MAX_COMPLAINT_BYTES = 4096


class SandboxFailed(FlotillaError):
    """The sandbox itself failed; this says nothing about the program."""

    code, title, status, retryable = "sandbox_failed", "The sandbox failed", 500, True


@dataclass(frozen=True)
class Program:
    """What is to be run: files by relative path (base64), commands, files to return."""

    files: dict[str, str]
    phases: tuple[Phase, ...]
    fetch: tuple[str, ...]
    limits: Limits


class Executor:
    """Runs programs under one isolation.

    Args:
        isolation: the level and the machine.
        groups: where control groups are made; None leaves them out. Level A needs them.
    """

    def __init__(self, isolation: Isolation, groups: ControlGroups | None) -> None:
        self.isolation = isolation
        self._groups = groups
        self._spoiled: dict[int, str] = {}
        self.num_spoiled = 0
        """How often something was left behind in a slot."""

    async def run(self, slot: Slot, program: Program) -> JobResult:
        """Run a program in a slot that nobody else uses.

        Raises:
            SandboxFailed: the program could not be run; nothing is known about it.
        """
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._directory(slot))
                group = await stack.enter_async_context(self._group(slot, program.limits))
                process = await stack.enter_async_context(self._guard(slot, program.limits))
                return await self._attend(process, group, slot, program)
        except (OSError, TimeoutError, Unavailable) as error:
            raise SandboxFailed(f"{type(error).__name__}: {error}") from error

    async def renewed(self, slot: Slot) -> Slot | None:
        """Return a slot that can be used next: the same, or another in place of one where something was left behind.

        Returns:
            None as long as processes of the slot live: another program would share their uid.
        """
        if slot.number not in self._spoiled:
            return slot
        try:
            if slot.uid is not None:
                await sweep(slot.uid, self.isolation.place.python)
            fresh = Slot(slot.number, slot.uid, _sibling(slot.directory))
            fresh.directory.mkdir()
            fresh.directory.chmod(0o711)
        except (OSError, TimeoutError) as error:
            self._spoiled[slot.number] = f"{type(error).__name__}: {error}"
            return None
        del self._spoiled[slot.number]
        with suppress(OSError):
            await asyncio.to_thread(remove_tree, slot.directory)
        return fresh

    @contextmanager
    def _cleaning(self, slot: Slot) -> Iterator[None]:
        """Take note of a slot in which something is left behind; what is known of the program stays true."""
        try:
            yield
        except Exception as error:
            self._spoiled[slot.number] = f"{type(error).__name__}: {error}"
            self.num_spoiled += 1
            log.exception("a slot could not be cleaned and is replaced", extra={"slot": slot.number})

    async def _attend(
        self, process: asyncio.subprocess.Process, group: Group | None, slot: Slot, program: Program
    ) -> JobResult:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        complaint = asyncio.create_task(_read_at_most(process.stderr, MAX_COMPLAINT_BYTES))
        try:
            async with asyncio.timeout(START_SECONDS):
                greeting = await process.stdout.readline()
                if greeting != READY:
                    said = (await complaint).decode(errors="replace").strip()
                    raise SandboxFailed(f"the guard did not start: {said or 'it said nothing'}")
            if group is not None:
                _add_tree(group, process.pid)
            job = json.dumps(self._job(slot, program).to_wire()).encode()
            async with asyncio.timeout(
                sum(longest_seconds(phase.timeout_seconds) for phase in program.phases) + END_SECONDS
            ):
                answer = await _converse(process, job, _answer_bytes(program.limits))
        finally:
            complaint.cancel()
            with suppress(asyncio.CancelledError):
                await complaint
        result = _read_result(answer, program)
        if group is not None and group.num_memory_kills():
            return _blame_memory(result, program.limits)
        return result

    def _job(self, slot: Slot, program: Program) -> Job:
        directory = self.isolation.work_directory(slot)
        environment = {
            "PATH": TOOL_PATH,
            "HOME": directory,
            "TMPDIR": directory,
            "LANG": "C.UTF-8",
            "OPENSSL_CONF": "/dev/null",  # node does not start without a configuration that it can read
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        confinement = self.isolation.confinement(slot)
        return Job(directory, program.files, program.phases, program.fetch, environment, program.limits, confinement)

    @asynccontextmanager
    async def _directory(self, slot: Slot) -> AsyncIterator[None]:
        """Make the slot's working directory, and remove it."""
        if self.isolation.has_private_root:
            yield
            return
        work = slot.directory / "work"
        work.mkdir(mode=0o700)
        if slot.uid is not None:
            os.chown(work, slot.uid, slot.uid)
        try:
            yield
        finally:
            with self._cleaning(slot):
                await asyncio.shield(asyncio.to_thread(remove_tree, work))

    @asynccontextmanager
    async def _group(self, slot: Slot, limits: Limits) -> AsyncIterator[Group | None]:
        if self._groups is None:
            yield None
            return
        group = self._groups.create(f"flotilla-sandbox-{os.getpid()}-{slot.number}-{secrets.token_hex(4)}", limits)
        try:
            yield group
        finally:
            with self._cleaning(slot):
                await asyncio.shield(asyncio.to_thread(group.remove))

    @asynccontextmanager
    async def _guard(self, slot: Slot, limits: Limits) -> AsyncIterator[asyncio.subprocess.Process]:
        """Start the guard, and end it with all that it started."""
        identity: dict[str, Any] = {}
        if slot.uid is not None:
            identity = {"user": slot.uid, "group": slot.uid, "extra_groups": []}
        process = await asyncio.create_subprocess_exec(
            *self.isolation.command(slot, limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={},
            start_new_session=True,
            **identity,
        )
        try:
            yield process
        finally:
            with self._cleaning(slot):
                await asyncio.shield(self._end(process, slot))

    async def _end(self, process: asyncio.subprocess.Process, slot: Slot) -> None:
        # Without a namespace the tree is known only while the guard, its reaper, lives.
        for pid in () if process.returncode is not None else descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = await reap(process)
        # A process namespace that ended by itself took everything with it; in every other case look for survivors.
        is_surely_empty = self.isolation.has_private_root and code == 0
        if slot.uid is not None and not is_surely_empty:
            await sweep(slot.uid, self.isolation.place.python)


def _sibling(directory: Path) -> Path:
    return directory.with_name(f"slot-{secrets.token_hex(8)}")


def _add_tree(group: Group, pid: int) -> None:
    """Put the guard, and bwrap around it, into a group: they have started nothing yet."""
    for member in (pid, *descendants(pid)):
        group.add(member)


def _answer_bytes(limits: Limits) -> int:
    # Two phases with two streams each and the files, in base64; and some room for the rest.
    return (4 * limits.output_bytes + limits.fetch_bytes) * 3 // 2 + 65536


async def _converse(process: asyncio.subprocess.Process, job: bytes, max_bytes: int) -> bytes:
    """Give the job and read the answer until the guard has ended.

    Raises:
        SandboxFailed: the answer is longer than any right answer.
    """
    assert process.stdin is not None and process.stdout is not None
    with suppress(ConnectionError):  # it ended early: its answer, or the lack of one, says more
        process.stdin.write(job)
        await process.stdin.drain()
        process.stdin.close()
    answer = await _read_at_most(process.stdout, max_bytes + 1)
    if len(answer) > max_bytes:
        raise SandboxFailed("the guard's answer is too long")
    await process.wait()
    return answer


async def _read_at_most(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < max_bytes and (piece := await stream.read(max_bytes - len(content))):
        content += piece
    return bytes(content)


def _read_result(answer: bytes, program: Program) -> JobResult:
    """Read the guard's answer.

    No answer at all means that the guard was killed after the program began. It does not die by itself, so the
    program did it, or used up the memory: it failed, or breaking the guard would be a way to avoid a bad grade.

    Raises:
        SandboxFailed: the guard says so, or the answer is broken.
    """
    if not answer:
        detail = "the guard was killed while the program ran"
        name = program.phases[-1].name
        return JobResult(phases=(PhaseResult(name, OVER_LIMIT, -int(signal.SIGKILL), 0.0, detail=detail),))
    try:
        result = JobResult.from_wire(json.loads(answer))
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxFailed(f"the guard's answer cannot be read: {error!r}") from error
    if result.error:
        raise SandboxFailed(f"the guard failed: {result.error}")
    return result


def _blame_memory(result: JobResult, limits: Limits) -> JobResult:
    detail = f"memory limit exceeded: the kernel ended a process, allowed {limits.memory_bytes} bytes"
    if result.phases[-1].detail:
        return result
    last = result.phases[-1]
    blamed = PhaseResult(last.name, last.outcome, last.return_code, last.seconds, last.stdout, last.stderr, detail)
    return JobResult((*result.phases[:-1], blamed), result.files, result.notes)
