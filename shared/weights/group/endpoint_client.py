"""The service's side of its weight endpoint. It imports no torch, so a supervisor stays small.

Every call has a deadline, and a member that is stuck, stopped or dead never keeps one from returning: what a member
cannot be told, its killing settles.
"""

import asyncio
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

from flotilla.shared.children.processes import python_module, reap
from flotilla.shared.errors import Conflict, DeadlineExceeded, NotFound, WeightTransferFailed
from flotilla.shared.host.start_patience import start_timeout
from flotilla.shared.net.server.ports import WILDCARDS
from flotilla.shared.schemas.publication import Rendezvous
from flotilla.shared.weights.group.endpoint_protocol import (
    FROM_ENDPOINT,
    Command,
    Direction,
    Done,
    Exited,
    Fork,
    Forked,
    Kill,
    Opening,
    Started,
)
from flotilla.shared.weights.group.json_lines import Lines
from flotilla.shared.weights.group.member_link import MemberLink, last_words

START_SECONDS = 60.0
"""Importing torch takes a second, and fifteen on a machine that is busy."""
KILL_SECONDS = 5.0
"""A killed process is gone in milliseconds."""

T = TypeVar("T")

# The endpoint only moves bytes: no compute threads, neither while forking nor after.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class EndpointClient:
    """Opens weight groups, one member process per epoch, and sends and receives images through them.

    Args:
        bind_host: address that the store and the data connections of this service bind to, as a sender. As a receiver
            it connects from the address that routes to the sender.
        advertise_host: address of this machine at which receivers reach it, where ``bind_host`` is 0.0.0.0 or ``::``.
            Members connect to each other directly, so no address translation may lie between them.
        device: the GPU of this member, such as cuda:0, which makes the groups those of NCCL; None makes them gloo's.
        sends_to_engines: whether the members that are sent to are ranks of engines.

    Raises:
        ValueError: ``bind_host`` is a wildcard and ``advertise_host`` is missing.
    """

    def __init__(
        self,
        *,
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        device: str | None = None,
        sends_to_engines: bool = False,
    ) -> None:
        if bind_host in WILDCARDS and advertise_host is None:
            raise ValueError(f"bind_host {bind_host} needs an advertise_host: receivers cannot connect to a wildcard")
        self._bind_host = bind_host
        self._device = device
        self._sends_to_engines = sends_to_engines
        self._host = advertise_host or bind_host
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Lines | None = None
        self._errors: IO[bytes] | None = None
        self._started: asyncio.Future[None] | None = None
        self._starting = asyncio.Lock()
        self._forking: deque[MemberLink] = deque()
        self._running: dict[int, MemberLink] = {}
        self._members: dict[int, MemberLink] = {}

    async def start(self, deadline_seconds: float = START_SECONDS) -> None:
        """Start the endpoint process. Opening a group does so where it is not running, also after its death.

        It ends with the thread that called this: start it from the thread that runs the service's event loop.

        Raises:
            WeightTransferFailed: the process ended while it started.
            DeadlineExceeded: it did not start in time.
        """
        async with self._starting:
            if self._channel is None or self._channel.is_closed:
                await self.close()
                await self._spawn(deadline_seconds)

    async def open_sender(self, epoch: int, world_size: int, timeout_seconds: float) -> Rendezvous:
        """Host the store of a new epoch as rank 0; returns once it listens. The group forms in the background.

        Args:
            epoch: not open here.
            world_size: members, this one included.
            timeout_seconds: how long the others may take to join.

        Raises:
            Conflict: the epoch is open.
            WeightTransferFailed: the store cannot be hosted.
            DeadlineExceeded: nothing listened in time.
        """
        opening = Opening(
            epoch=epoch,
            rank=0,
            world_size=world_size,
            bind_host=self._bind_host,
            host=self._host,
            port=0,
            address=self._host if self._bind_host in WILDCARDS else self._bind_host,
            timeout_seconds=timeout_seconds,
            device=self._device,
            sends_to_engines=self._sends_to_engines,
        )
        member = await self._open(opening)
        port = await _within(timeout_seconds, member.opened, f"hosting the store of epoch {epoch}")
        return Rendezvous(host=self._host, port=port, epoch=epoch, world_size=world_size)

    async def open_receiver(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        """Begin to join an epoch; :meth:`joined` tells when all members are there.

        Raises:
            Conflict: the epoch is open.
            WeightTransferFailed: no member process can be made.
        """
        opening = Opening(
            **rendezvous.model_dump(),
            rank=rank,
            bind_host=self._bind_host,
            address=None,
            timeout_seconds=timeout_seconds,
            device=self._device,
        )
        await self._open(opening)

    async def joined(self, epoch: int, deadline_seconds: float) -> None:
        """Wait until all members of the epoch are connected.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed, or this one's process died.
            DeadlineExceeded: somebody is missing.
        """
        await _within(deadline_seconds, self._member(epoch).joined, f"joining the weight group of epoch {epoch}")

    async def send(
        self, epoch: int, image_path: Path, image_bytes: int, slice_bytes: int, deadline_seconds: float
    ) -> None:
        """Broadcast an image to all members. That they have all of it, only their own answers tell.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed or the image is not as told; the epoch is of no use any more.
            DeadlineExceeded: somebody stalled; likewise.
        """
        await self._transfer(Direction.SEND, epoch, image_path, image_bytes, slice_bytes, deadline_seconds)

    async def receive(
        self,
        epoch: int,
        image_path: Path,
        image_bytes: int,
        slice_bytes: int,
        deadline_seconds: float,
        on_arrived: Callable[[int], None] | None = None,
    ) -> str:
        """Receive an image into an existing file of its size, and compute its checksum on the way.

        Args:
            epoch, image_path, image_bytes, slice_bytes, deadline_seconds: as they are sent.
            on_arrived: called after each slice with the number of bytes, from the first on, that are there.

        Returns:
            xxh3-64 of the bytes received, to hold against the manifest.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed or the file is not as told; the epoch is of no use any more.
            DeadlineExceeded: somebody stalled; likewise.
        """
        done = await self._transfer(
            Direction.RECEIVE, epoch, image_path, image_bytes, slice_bytes, deadline_seconds, on_arrived
        )
        assert done.checksum is not None
        return done.checksum

    def member_pid(self, epoch: int) -> int:
        """Return which process is this service's member of the epoch, for logs and diagnosis.

        Raises:
            NotFound: the epoch is not open.
        """
        return self._member(epoch).forked.result()

    async def close_epoch(self, epoch: int) -> None:
        """Kill this service's member of the epoch, whatever it is doing. Nothing happens where it is not open."""
        member = self._members.pop(epoch, None)
        if member is None:
            return
        member.fail(WeightTransferFailed(f"epoch {epoch} was closed"))
        try:
            if member.has_process and self._channel is not None and not self._channel.is_closed:
                self._channel.send(Kill(pid=member.forked.result()).line())
                await _within(KILL_SECONDS, member.exited, f"killing the member of epoch {epoch}")
        except (WeightTransferFailed, DeadlineExceeded):
            member.kill_directly()
        finally:
            member.close()

    async def close(self) -> None:
        """End the endpoint and all its members. May be called twice."""
        channel, process, errors = self._channel, self._process, self._errors
        self._channel = self._process = self._errors = None
        if channel is not None:
            channel.close()
        if process is not None:
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await reap(process)
                for member in self._running.values():
                    member.kill_directly()
        for member in self._members.values():
            member.close()
        self._members.clear()
        self._running.clear()
        self._forking.clear()
        if errors is not None:
            errors.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _spawn(self, deadline_seconds: float) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the endpoint)
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = await Lines.open(ours, self._hear, self._lost)
            self._process = await asyncio.create_subprocess_exec(
                *python_module("flotilla.shared.weights.group.endpoint", str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                env=os.environ | _ENVIRONMENT | ({} if self._device else _NO_GPU),
            )
        try:
            async with start_timeout(deadline_seconds, self._process.pid):
                await asyncio.shield(self._started)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the weight endpoint did not start within {deadline_seconds:g} s") from None
            raise

    async def _open(self, opening: Opening) -> MemberLink:
        await self.start()
        member = await MemberLink.open(opening.epoch)
        if opening.epoch in self._members:
            member.close()
            raise Conflict(f"epoch {opening.epoch} is open already")
        self._members[opening.epoch] = member
        assert self._channel is not None
        try:
            self._channel.send(Fork(opening=opening).line(), [member.theirs.fileno(), member.errors.fileno()])
            self._forking.append(member)
            member.theirs.close()
            await _within(opening.timeout_seconds, member.forked, f"forking the member of epoch {opening.epoch}")
        except BaseException:
            await self.close_epoch(opening.epoch)
            raise
        return member

    async def _transfer(
        self,
        direction: Direction,
        epoch: int,
        image_path: Path,
        image_bytes: int,
        slice_bytes: int,
        deadline_seconds: float,
        on_arrived: Callable[[int], None] | None = None,
    ) -> Done:
        command = Command(
            direction=direction,
            image_path=image_path,
            image_bytes=image_bytes,
            slice_bytes=slice_bytes,
            # A little less, so that the member can still say what it was waiting for.
            deadline_seconds=deadline_seconds - min(0.2, 0.1 * deadline_seconds),
            tells_progress=on_arrived is not None,
        )
        reply = self._member(epoch).command(command, on_arrived)
        return await _within(deadline_seconds, reply, f"transferring the weights in epoch {epoch}")

    def _member(self, epoch: int) -> MemberLink:
        try:
            return self._members[epoch]
        except KeyError:
            raise NotFound(f"epoch {epoch} is not open") from None

    def _hear(self, line: bytes) -> None:
        message = FROM_ENDPOINT.validate_json(line)
        if isinstance(message, Started):
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
        elif isinstance(message, Forked):
            member = self._forking.popleft()
            self._running[message.pid] = member
            if not member.forked.done():
                member.forked.set_result(message.pid)
        elif isinstance(message, Exited):
            self._running.pop(message.pid).note_exit(message.code)

    def _lost(self) -> None:
        words = last_words(self._errors) if self._errors is not None else ""
        error = WeightTransferFailed(f"the weight endpoint ended{words}")
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
            self._started.exception()
        for member in self._members.values():
            member.fail(error)


async def _within(seconds: float, future: asyncio.Future[T], what: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(future)
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took more than {seconds} s") from None
