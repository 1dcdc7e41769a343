"""The service's side of a slot's fork server: start it, let it run one job at a time, end it with all below it."""

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from flotilla.services.sandbox.cgroups import OWN_BYTES, ControlGroups, Group
from flotilla.services.sandbox.guard.job import ANSWER_END, DONE, JOINED, PHASE_OVER, READY, Orders
from flotilla.services.sandbox.guard.messages import framed
from flotilla.services.sandbox.guard.watch import descendants, running_seconds
from flotilla.services.sandbox.isolation import Isolation, Slot
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.processors import ProcessorGroup, ProcessorGroups
from flotilla.shared.children.processes import reap
from flotilla.shared.concurrency.cancelling import to_the_end, until_done
from flotilla.shared.errors import FlotillaError
from flotilla.shared.host.start_patience import patient

START_SECONDS = 20.0
EMPTY_SECONDS = 1.0
MAX_COMPLAINT_BYTES = 4096
CHUNK_BYTES = 262_144
SMALL_BYTES = 32_768
MAX_RUNS = 256
"""After so many runs a server is replaced: layout of memory and hash seed are the same for all of one server."""


class SandboxFailed(FlotillaError):
    """The sandbox itself failed; this is not the program's fault."""

    code, title, status, retryable = "sandbox_failed", "The sandbox failed", 500, True


@dataclass(frozen=True)
class Groups:
    """Where control groups are made; None leaves them out.

    Attributes:
        bounds: of memory and processes. Level A needs them.
        processors: shares of the processors, at any level.
    """

    bounds: ControlGroups | None = None
    processors: ProcessorGroups | None = None


@dataclass
class ForkServer:
    """One fork server, in the isolation of its slot and, at level A, in a control group with all its runs.

    Attributes:
        slot: where it was started; another slot's programs are not for it.
        control: its end of messages, one run each.
        limits: what bounds the group now.
        orders: what all its runs have in common.
        share: how it shares the processors.
        num_runs: how many it has begun.
    """

    slot: Slot
    process: asyncio.subprocess.Process
    control: socket.socket
    limits: Limits
    orders: Orders
    group: Group | None = None
    share: ProcessorGroup | None = None
    num_runs: int = 0
    _num_kills: int = field(default=0, init=False)

    @property
    def is_usable(self) -> bool:
        """Whether it may run one more program."""
        return self.process.returncode is None and self.num_runs < MAX_RUNS

    @asynccontextmanager
    async def run(
        self, job: bytes, *, caller: str, phases: int, max_bytes: int, seconds: float
    ) -> AsyncIterator[bytes]:
        """Run one job in a sandbox of its own; gives the answer as soon as there is one, and ends when all is gone.

        Args:
            job: see ``Job``.
            caller: whose it is.
            phases: how many it has, at most.
            max_bytes: longest answer.
            seconds: latest end.

        Gives the guard's answer; empty if the guard was killed.

        Raises:
            SandboxFailed: the answer is longer than any right one.
            OSError: the server has ended.
            TimeoutError: it took longer than ``seconds``.
        """
        with self.used_by(caller) as over:
            async with asyncio.timeout(seconds):
                unsent = memoryview(framed(job))
                with self._handed(unsent[:SMALL_BYTES]) as stream:
                    with suppress(ConnectionError):  # it ended early: its answer, or the lack of one, has the cause
                        if len(unsent) > SMALL_BYTES:
                            await asyncio.get_running_loop().sock_sendall(stream, unsent[SMALL_BYTES:])
                    answer = await _read_answer(stream, phases, max_bytes, over)
                yield answer
                await self.done()

    def used_by(self, caller: str) -> AbstractContextManager[Callable[[], None]]:
        """Weigh a program of a caller against what else wants the processors; see ``ProcessorGroup.used_by``."""
        return nullcontext(lambda: None) if self.share is None else self.share.used_by(caller)

    @asynccontextmanager
    async def asked(self, job: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Give a job to the guard of the next run; gives the stream of it, which is closed at the end.

        Raises:
            OSError: the server has ended.
        """
        stream = self._handed()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=stream)
        except BaseException:
            stream.close()
            raise
        try:
            with suppress(ConnectionError):  # it ended early: its answer, or the lack of one, has the cause
                writer.write(framed(job))
                await writer.drain()
            yield reader, writer
        finally:
            writer.close()

    def _handed(self, message: bytes | memoryview = b"") -> socket.socket:
        """Hand a stream to the guard of the next run; returns the other end of it.

        Args:
            message: what the guard finds in it: at most so much as a new stream takes at once.

        Raises:
            OSError: the server has ended.
        """
        self.num_runs += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                ours.sendall(message)
                socket.send_fds(self.control, [b"r"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    async def done(self) -> None:
        """Wait until all of a run is gone.

        Raises:
            ConnectionError: the server has ended.
        """
        await self._expect(DONE)

    def bound(self, limits: Limits) -> None:
        """Set what the next program may use.

        Raises:
            OSError: the kernel refused.
        """
        if self.group is not None and limits != self.limits:
            self.group.bound(limits)
            self.limits = limits

    def has_used_up_memory(self) -> bool:
        """Return whether the kernel has ended processes, since this was asked last, because the memory was used up."""
        if self.group is None:
            return False
        kills_before, self._num_kills = self._num_kills, self.group.num_memory_kills()
        return self._num_kills > kills_before

    async def charge_start(self, caller: str) -> None:
        """Count what its start took as a caller's use of the processors; it has run nothing yet."""
        if self.share is not None:
            self.share.charge(caller, await asyncio.to_thread(self._running_seconds))

    def _running_seconds(self) -> float:
        return sum(map(running_seconds, (self.process.pid, *descendants(self.process.pid))))

    async def is_empty(self) -> bool:
        """Return whether the last program's memory, too, is free again for the next one; waits for that a little."""
        if self.group is None:
            return True
        end = time.monotonic() + EMPTY_SECONDS
        while self.group.holds_more(OWN_BYTES // 2):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.005)
        return True

    async def end(self) -> None:
        """End the server and all that it started; nothing happens if it has ended."""
        self.control.close()
        if self.process.returncode is None:
            # Without a namespace the tree is known only while its processes live.
            for pid in descendants(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await reap(self.process)
        for group in (self.group, self.share):
            if group is not None:
                await asyncio.to_thread(group.remove)

    async def _expect(self, message: bytes) -> None:
        """Wait for a message.

        Raises:
            ConnectionError: the server has ended.
        """
        said = await asyncio.get_running_loop().sock_recv(self.control, len(message))
        if said != message:
            raise ConnectionError(f"the fork server ended: it said {said!r}")

    @classmethod
    async def start(cls, isolation: Isolation, slot: Slot, groups: Groups, limits: Limits) -> "ForkServer":
        """Start a server and wait until it is warm.

        Raises:
            SandboxFailed: it does not start; the detail has its complaint.
            OSError: likewise.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            with theirs:
                process = await _spawn(isolation, slot, theirs)
        except BaseException:
            control.close()
            raise
        server = cls(slot, process, control, limits, isolation.orders(slot))
        try:
            await server._greet(READY)
            making = asyncio.ensure_future(asyncio.to_thread(server._make_groups, groups, limits))
            await to_the_end(making)  # what it makes is removed with the server, also without a waiter
            server._order(json.dumps(server.orders.to_wire()).encode())
            await server._greet(JOINED)
        except BaseException:
            await until_done(asyncio.ensure_future(server.end()))
            raise
        return server

    def _make_groups(self, groups: Groups, limits: Limits) -> None:
        name = f"flotilla-sandbox-{os.getpid()}-{self.slot.number}-{secrets.token_hex(4)}"
        if groups.bounds is not None:
            self.group = groups.bounds.create(name, limits)
        if groups.processors is not None:
            self.share = groups.processors.create(name)

    def _order(self, orders: bytes) -> None:
        """Give the server its orders, and have it join its groups: alone, for bwrap's processes need no bounds."""
        with ExitStack() as files:
            entrances = [
                files.enter_context(entrance.open("wb", buffering=0)).fileno()
                for group in (self.group, self.share)
                if group is not None
                for entrance in group.entrances()
            ]
            socket.send_fds(self.control, [orders], entrances)

    async def _greet(self, message: bytes) -> None:
        assert self.process.stderr is not None
        seconds = patient(START_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                try:
                    await self._expect(message)
                except ConnectionError:
                    said = (await read_at_most(self.process.stderr, MAX_COMPLAINT_BYTES)).decode(errors="replace")
                    raise SandboxFailed(f"the guard did not start: {said.strip() or 'it said nothing'}") from None
        except TimeoutError:
            raise SandboxFailed(f"the guard did not start within {seconds:g} s") from None


async def _spawn(isolation: Isolation, slot: Slot, control: socket.socket) -> asyncio.subprocess.Process:
    identity: dict[str, Any] = {}
    if slot.uid is not None and isolation.has_private_root:
        identity = {"user": slot.uid, "group": slot.uid, "extra_groups": []}
    return await asyncio.create_subprocess_exec(
        *isolation.command(slot),
        stdin=control.fileno(),
        stdout=control.fileno(),  # like a program's streams it cannot be sought in, which Python looks at once
        stderr=asyncio.subprocess.PIPE,
        cwd=isolation.start_directory(slot),
        env=isolation.start_environment(slot),
        start_new_session=True,
        **identity,
    )


async def _read_answer(stream: socket.socket, phases: int, max_bytes: int, over: Callable[[], None]) -> bytes:
    """Read the answer of a guard; empty if it was killed.

    Args:
        stream: its other end.
        phases: how many the job has, at most.
        max_bytes: longest answer.
        over: is called once the last phase is over.

    Raises:
        SandboxFailed: the answer is longer than any right one.
    """
    content, is_over = bytearray(), False
    while not content.endswith(ANSWER_END):
        try:
            piece = await asyncio.get_running_loop().sock_recv(stream, CHUNK_BYTES)
        except ConnectionError:
            piece = b""
        content += piece
        if not is_over and (len(content) >= phases or content.strip(PHASE_OVER) or not piece):
            is_over = True
            over()
        if not piece:
            break
        if len(content) > phases + max_bytes:
            raise SandboxFailed("the guard's answer is too long")
    return bytes(content.strip())


async def read_at_most(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read until the end of a stream, or so many bytes."""
    content = bytearray()
    while len(content) < max_bytes and (piece := await stream.read(max_bytes - len(content))):
        content += piece
    return bytes(content)
