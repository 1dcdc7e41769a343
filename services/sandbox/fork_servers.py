"""The service's side of a slot's fork server: start it, let it run one job at a time, end it with all below it."""

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from services.sandbox.cgroups import OWN_BYTES, ControlGroups, Group
from services.sandbox.guard.job import DONE, PHASE_OVER, READY, Orders
from services.sandbox.guard.messages import framed
from services.sandbox.guard.watch import descendants
from services.sandbox.isolation import Isolation, Slot
from services.sandbox.limits import Limits
from services.sandbox.processors import ProcessorGroup, ProcessorGroups
from shared.errors import FlotillaError
from shared.processes import reap

START_SECONDS = 20.0
EMPTY_SECONDS = 1.0
MAX_COMPLAINT_BYTES = 4096
MAX_RUNS = 256
"""After so many runs a server is replaced: layout of memory and hash seed are the same for all of one server."""


class SandboxFailed(FlotillaError):
    """The sandbox itself failed; this says nothing about the program."""

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
        share: how it shares the processors.
        num_runs: how many it has begun.
    """

    slot: Slot
    process: asyncio.subprocess.Process
    control: socket.socket
    limits: Limits
    group: Group | None = None
    share: ProcessorGroup | None = None
    num_runs: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it may run one more program."""
        return self.process.returncode is None and self.num_runs < MAX_RUNS

    async def run(self, job: bytes, *, caller: str, phases: int, max_bytes: int, seconds: float) -> bytes:
        """Run one job in a sandbox of its own, until all of it is gone.

        Args:
            job: see ``Job``.
            caller: whose it is.
            phases: how many it has, at most.
            max_bytes: longest answer.
            seconds: latest end.

        Returns:
            The guard's answer; empty if the guard was killed.

        Raises:
            SandboxFailed: the answer is longer than any right one.
            OSError: the server is gone.
            TimeoutError: it took longer than ``seconds``.
        """
        with self.used_by(caller) as over:
            async with asyncio.timeout(seconds), self.asked(job) as (reader, _):
                for _ in range(phases):
                    if (first := await reader.read(1)) != PHASE_OVER:
                        break
                over()
                answer = first.strip() + await read_at_most(reader, max_bytes + 1)
                if len(answer) > max_bytes:
                    raise SandboxFailed("the guard's answer is too long")
                await self.done()
        return answer

    def used_by(self, caller: str) -> AbstractContextManager[Callable[[], None]]:
        """Weigh a program of a caller against what else wants the processors; see ``ProcessorGroup.used_by``."""
        return nullcontext(lambda: None) if self.share is None else self.share.used_by(caller)

    @asynccontextmanager
    async def asked(self, job: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Give a job to the guard of the next run; gives the stream of it, which is closed at the end.

        Raises:
            OSError: the server is gone.
        """
        self.num_runs += 1
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self.control, [b"r"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        try:
            with suppress(ConnectionError):  # it ended early: its answer, or the lack of one, says more
                writer.write(framed(job))
                await writer.drain()
            yield reader, writer
        finally:
            writer.close()

    async def done(self) -> None:
        """Wait until all of a run is gone.

        Raises:
            ConnectionError: the server is gone.
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

    def num_memory_kills(self) -> int:
        """Count the processes that the kernel ended because the group's memory was used up."""
        return 0 if self.group is None else self.group.num_memory_kills()

    async def is_empty(self) -> bool:
        """Tell whether the last program's memory, too, is free again for the next one; waits for that a little."""
        if self.group is None:
            return True
        end = time.monotonic() + EMPTY_SECONDS
        while self.group.held_bytes() > OWN_BYTES // 2:
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
            ConnectionError: the server is gone.
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
        server = cls(slot, process, control, limits)
        try:
            await server._greet()
            with nullcontext() if groups.processors is None else groups.processors.raised():
                joining = asyncio.ensure_future(asyncio.to_thread(server._join, groups, limits))
                try:
                    await asyncio.shield(joining)
                finally:
                    await asyncio.wait([joining])  # what it makes is removed with the server, also if nobody waits
            orders = Orders(isolation.confinement(slot), isolation.limits)
            await asyncio.get_running_loop().sock_sendall(control, json.dumps(orders.to_wire()).encode())
        except BaseException:
            await asyncio.shield(server.end())
            raise
        return server

    def _join(self, groups: Groups, limits: Limits) -> None:
        """Put the server into groups of its own. It has forked nothing yet: all its runs are born in them."""
        name = f"flotilla-sandbox-{os.getpid()}-{self.slot.number}-{secrets.token_hex(4)}"
        if groups.bounds is not None:
            self.group = groups.bounds.create(name, limits)
        if groups.processors is not None:
            self.share = groups.processors.create(name)
        for group in (self.group, self.share):
            if group is not None:
                group.add(self._pid())

    def _pid(self) -> int:
        """Find the interpreter: bwrap has processes of its own above it, which need no bounds."""
        below = descendants(self.process.pid)
        return next(iter(below.keys() - {status.parent for status in below.values()}), self.process.pid)

    async def _greet(self) -> None:
        assert self.process.stderr is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                try:
                    await self._expect(READY)
                except ConnectionError:
                    said = (await read_at_most(self.process.stderr, MAX_COMPLAINT_BYTES)).decode(errors="replace")
                    raise SandboxFailed(f"the guard did not start: {said.strip() or 'it said nothing'}") from None
        except TimeoutError:
            raise SandboxFailed(f"the guard did not start within {START_SECONDS:g} s") from None


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


async def read_at_most(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read until the end of a stream, or so many bytes."""
    content = bytearray()
    while len(content) < max_bytes and (piece := await stream.read(max_bytes - len(content))):
        content += piece
    return bytes(content)
