"""Running one program: have the slot's fork server run it, read the guard's result, leave nothing behind.

The service trusts the guard's result only as far as the program cannot gain by forging it. Whatever happens, when a
slot is renewed no process and no file of its program is left; the answer does not wait for that.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

from flotilla.services.sandbox.conversation import (
    GUARD_KILLED,
    Conversation,
    ShellConversation,
    Talk,
    answer_bytes,
    blame_memory,
)
from flotilla.services.sandbox.fork_servers import ForkServer, Groups, SandboxFailed
from flotilla.services.sandbox.guard.job import OVER_LIMIT, Job, JobResult, Phase, PhaseResult
from flotilla.services.sandbox.isolation import Isolation, Slot
from flotilla.services.sandbox.limits import Limits, longest_seconds
from flotilla.services.sandbox.slots import sweep
from flotilla.services.sandbox.trees import remove_if_small, remove_tree
from flotilla.shared.children.restarts import Restarts
from flotilla.shared.concurrency.cancelling import to_the_end, until_done
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.sandbox import IsolationLevel, SessionRequest

log = logging.getLogger(__name__)

LOCAL: Final = "local"
"""The provider that this machine is."""
END_SECONDS = 35.0
"""Beyond the time of the phases: for the guard to make the place, to end the program and to answer."""


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 8.0
"""A server that a program has ended is started again after the first; each pause is twice as long as the one before."""
WINDOW_SECONDS = 60.0
"""For how long an end counts."""
MOST_ENDS = 64


class ServerRestarts:
    """Knows which fork servers were ended by what they ran, and for whom.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._restarts: dict[int, Restarts] = {}
        self._due: dict[int, float] = {}
        self._owed: dict[int, str] = {}
        self._closing = asyncio.Event()
        self.num_ended = 0
        """How often what a server ran has ended it."""

    def ended(self, slot: int, caller: str) -> None:
        """Record that the server of a slot was ended by a caller's program, or abandoned."""
        self.num_ended += 1
        restarts = self._restarts.get(slot)
        if restarts is None:
            restarts = self._restarts[slot] = Restarts(
                MOST_ENDS,
                window_seconds=WINDOW_SECONDS,
                first_pause_seconds=FIRST_PAUSE_SECONDS,
                longest_pause_seconds=LONGEST_PAUSE_SECONDS,
                now=self._now,
            )
        pause = restarts.died()
        self._due[slot] = self._now() + (LONGEST_PAUSE_SECONDS if pause is None else pause)
        self._owed[slot] = caller

    async def due(self, slot: int) -> None:
        """Wait until the server of a slot may be started; at once when the service stops."""
        if (left := self._due.get(slot, 0.0) - self._now()) > 0.0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._closing.wait()

    def charged(self, slot: int) -> str | None:
        """Return the caller to charge for the last start, once; None: none."""
        self._due.pop(slot, None)
        return self._owed.pop(slot, None)

    def num_backing_off(self, slots: Iterable[int]) -> int:
        """Count those of some slots whose server may not be started yet."""
        now = self._now()
        return sum(self._due.get(slot, 0.0) > now for slot in slots)

    def close(self) -> None:
        """End all waits."""
        self._closing.set()


@dataclass(frozen=True)
class Program:
    """What is to be run: files by relative path (base64), commands, files to return; and for whom."""

    files: dict[str, str]
    phases: tuple[Phase, ...]
    fetch: tuple[str, ...]
    limits: Limits
    caller: str = ""
    image: str | None = None
    """What a provider's box is made of; None: what the service has set."""
    session: SessionRequest | None = None
    """Of a program that is the interpreter of a session."""


class Executor:
    """Runs programs under one isolation, each in a fork of its slot's warm interpreter.

    Args:
        isolation: the level and the machine.
        groups: where control groups are made.
    """

    def __init__(self, isolation: Isolation, groups: Groups) -> None:
        self.isolation = isolation
        self._groups = groups
        self._servers: dict[int, ForkServer] = {}
        self._restarts = ServerRestarts()
        self._spoiled: dict[int, str] = {}
        self._attempts: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False
        self.num_spoiled = 0
        """How often something was left behind in a slot."""
        self.num_servers_lost = 0
        """How often a fork server ended by itself."""

    @property
    def level(self) -> IsolationLevel | None:
        """How well programs are shut in."""
        return self.isolation.level

    @property
    def provider(self) -> str:
        """Where programs run: on this machine."""
        return LOCAL

    def directory(self, slot: Slot) -> str:
        """Where programs of a slot work, as they see it."""
        return self.isolation.work_directory(slot)

    def families(self) -> Iterable[Metric]:
        """Make further metrics: the service counts all that there is to count here."""
        return ()

    async def run(self, slot: Slot, program: Program) -> JobResult:
        """Run a program in an exclusive slot. Its remains are removed before the slot is renewed.

        Raises:
            SandboxFailed: the program could not be run; nothing is known about it.
        """
        await self.settled(slot)
        answered: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
        attempt = asyncio.create_task(self._attempt(slot, program, answered))
        self._attempts[slot.number] = attempt
        attempt.add_done_callback(partial(_tell_failure, answered))
        try:
            return await answered
        except asyncio.CancelledError:
            attempt.cancel()
            await asyncio.wait([attempt])
            raise

    async def _attempt(self, slot: Slot, program: Program, answered: "asyncio.Future[JobResult]") -> None:
        """Run a program, once more if its server is lost, until nothing of it is left; answers as soon as it can.

        Raises:
            SandboxFailed: the program could not be run.
        """
        try:
            for is_last in (False, True):
                async with self._directory(slot):
                    try:
                        await self._run_once(slot, program, answered)
                        return
                    except ConnectionError:
                        self.num_servers_lost += 1
                        log.warning("a fork server was lost and is replaced", extra={"slot": slot.number})
                        if answered.done():
                            return
                        if is_last:
                            raise
        except (OSError, TimeoutError, Unavailable) as error:
            if answered.done():
                log.warning("a fork server was replaced", extra={"slot": slot.number, "error": repr(error)})
                return
            raise SandboxFailed(f"{type(error).__name__}: {error}") from error

    async def settled(self, slot: Slot) -> None:
        """Wait until nothing of the program that a slot has run is left; how it went is in its answer."""
        if (attempt := self._attempts.pop(slot.number, None)) is not None:
            await asyncio.wait([attempt])

    @asynccontextmanager
    async def session(self, slot: Slot, program: Program) -> AsyncIterator[Talk]:
        """Start an interpreter in an exclusive slot, and end it and all that it started at the end.

        Args:
            slot: for as long as the session lives.
            program: the interpreter's files and its one phase.

        Raises:
            SandboxFailed: it could not be started.
        """
        try:
            async with self._directory(slot), self._interpreter(slot, program) as conversation:
                is_shell = program.session is not None and program.session.language == "shell"
                yield ShellConversation(conversation) if is_shell else conversation
        except (OSError, TimeoutError) as error:
            raise SandboxFailed(f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _interpreter(self, slot: Slot, program: Program) -> AsyncIterator[Conversation]:
        is_clean = False
        server = await self._server(slot, program.limits)
        try:
            job = _job(server, program, is_session=True)
            async with server.asked(job) as streams:
                conversation = Conversation(server, *streams, limits=program.limits, caller=program.caller)
                await conversation.begun()
                yield conversation
            async with asyncio.timeout(END_SECONDS):
                await server.done()
                is_clean = await server.is_empty()
        finally:
            if not is_clean:
                await self._give_up_server(slot, program)

    def servers(self) -> list[ForkServer]:
        """List the present fork servers."""
        return list(self._servers.values())

    @property
    def num_servers_ended(self) -> int:
        """Count the fork servers that were replaced because of what they ran, or ended by themselves meanwhile."""
        return self._restarts.num_ended

    def num_backing_off(self, slots: Iterable[Slot]) -> int:
        """Count those of some slots whose fork server may not be started again yet."""
        return self._restarts.num_backing_off(slot.number for slot in slots)

    def wind_down(self) -> None:
        """Start no further server before there is a program for it, and end all waits for a start."""
        self._is_closed = True
        self._restarts.close()

    async def close(self) -> None:
        """End all fork servers."""
        self.wind_down()
        if attempts := list(self._attempts.values()):
            await asyncio.wait(attempts)
        servers, self._servers = self._servers, {}
        for server in servers.values():
            await server.end()

    async def renewed(self, slot: Slot) -> Slot | None:
        """Return a slot that can be used next: the same, or another in place of one where something was left behind.

        Returns:
            None as long as processes of the slot live: another program would share their uid.
        """
        await self.settled(slot)
        if slot.number not in self._spoiled:
            await self._warm(slot)
            return slot
        try:
            await self._end_server(slot)
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
        await self._warm(fresh)
        return fresh

    async def _warm(self, slot: Slot) -> None:
        """Replace a server that has ended or has run enough: this caller waits for that, not the next one."""
        server = self._servers.get(slot.number)
        if self._is_closed or (server is not None and server.is_usable):
            return
        with suppress(SandboxFailed, OSError, TimeoutError, Unavailable):
            async with self._directory(slot):
                await self._server(slot, self.isolation.limits)

    async def _cleaned(self, slot: Slot, work: Coroutine[None, None, None]) -> None:
        """Clean a slot to the end, however often that is cancelled: a new user of it would be swept away, too.

        Of a slot in which something is left behind a note is taken; what is known of the program stays true.
        """
        cleaning = asyncio.ensure_future(work)
        try:
            await until_done(cleaning)
        finally:
            self._take_note(slot, None if cleaning.cancelled() else cleaning.exception())

    def _take_note(self, slot: Slot, error: BaseException | None) -> None:
        if error is not None:
            self._spoiled[slot.number] = f"{type(error).__name__}: {error}"
            self.num_spoiled += 1
            log.error("a slot could not be cleaned and is replaced", extra={"slot": slot.number}, exc_info=error)

    async def _run_once(self, slot: Slot, program: Program, answered: "asyncio.Future[JobResult]") -> None:
        """Run a program on the slot's server, which is ended unless all of the run is surely gone.

        Raises:
            ConnectionError: the server was lost.
        """
        is_clean = False
        server = await self._server(slot, program.limits)
        try:
            async with server.run(
                _job(server, program),
                caller=program.caller,
                phases=len(program.phases),
                max_bytes=answer_bytes(program.limits),
                seconds=sum(longest_seconds(phase.timeout_seconds) for phase in program.phases) + END_SECONDS,
            ) as answer:
                result, is_told = _read_result(answer, program), bool(answer)
                if server.has_used_up_memory():  # guard and server may have gone for it, too
                    result, is_told = blame_memory(result, program.limits), True
                if is_told and not answered.done():  # done: no waiter
                    answered.set_result(result)
            if not answered.done():  # the guard was killed: by its program, or else the server's loss would have shown
                answered.set_result(result)
            is_clean = bool(answer) and await server.is_empty()
        finally:
            if not is_clean:
                await self._give_up_server(slot, program)

    async def _give_up_server(self, slot: Slot, program: Program) -> None:
        """End a server in which something of what it ran may be left; the next one is not started at once."""
        self._restarts.ended(slot.number, program.caller)
        await self._cleaned(slot, self._end_server(slot))

    async def _server(self, slot: Slot, limits: Limits) -> ForkServer:
        """Find the slot's server, or start one when it is due."""
        server = self._servers.get(slot.number)
        if server is not None and server.slot == slot and server.is_usable:
            server.bound(limits)
            return server
        await to_the_end(asyncio.ensure_future(self._end_server(slot)))
        await self._restarts.due(slot.number)
        server = await ForkServer.start(self.isolation, slot, self._groups, limits)
        self._servers[slot.number] = server
        if (caller := self._restarts.charged(slot.number)) is not None:
            await server.charge_start(caller)
        return server

    async def _end_server(self, slot: Slot) -> None:
        server = self._servers.pop(slot.number, None)
        if server is None:
            return
        await server.end()
        if slot.uid is not None:
            await sweep(slot.uid, self.isolation.place.python)

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
            if not remove_if_small(work):
                await self._cleaned(slot, asyncio.to_thread(remove_tree, work))


def _tell_failure(answered: "asyncio.Future[JobResult]", attempt: asyncio.Task[None]) -> None:
    """Let the waiter for an answer learn that there is none."""
    if answered.done():
        return
    if attempt.cancelled():
        answered.cancel()
    else:
        answered.set_exception(attempt.exception() or AssertionError("an attempt ends with an answer or fails"))


def _job(server: ForkServer, program: Program, *, is_session: bool = False) -> bytes:
    job = Job(server.orders, program.files, program.phases, program.fetch, program.limits, is_session)
    return json.dumps(job.to_wire()).encode()


def _sibling(directory: Path) -> Path:
    return directory.with_name(f"slot-{secrets.token_hex(8)}")


def _read_result(answer: bytes, program: Program) -> JobResult:
    """Read the guard's answer.

    No answer at all means that the guard was killed after the program began. It does not die by itself, so the
    program did it, or used up the memory: it failed, or breaking the guard would be a way to avoid a bad grade.

    Raises:
        SandboxFailed: the guard reports it, or the answer is malformed.
    """
    if not answer:
        detail = f"{GUARD_KILLED} while the program ran"
        name = program.phases[-1].name
        return JobResult(phases=(PhaseResult(name, OVER_LIMIT, -int(signal.SIGKILL), 0.0, detail=detail),))
    try:
        result = JobResult.from_wire(json.loads(answer))
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxFailed(f"the guard's answer cannot be read: {error!r}") from error
    if result.error:
        raise SandboxFailed(f"the guard failed: {result.error}")
    return result
