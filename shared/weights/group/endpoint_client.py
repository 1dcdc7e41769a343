"""The service's side of its weight endpoint. It imports no torch, so a supervisor stays small.

Every call has a deadline, and a member that is stuck, stopped or dead never keeps one from returning: what a member
cannot be observed is settled by killing it.

An epoch is opened, joined by all its members, used for any number of images, and closed. After a failure in it an epoch
is of no use any more: close it and open the next. Success at one end does not imply success at the others: a version
becomes current only by the gateway's commit.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module, unheard
from flotilla.shared.children.spawning import child_environment
from flotilla.shared.errors import DeadlineExceeded, WeightTransferFailed, WorkerDied
from flotilla.shared.net.server.ports import WILDCARDS
from flotilla.shared.schemas.publication import Rendezvous
from flotilla.shared.weights.group.endpoint_protocol import Command, Direction, Opening

START_SECONDS = 60.0
"""Importing torch takes a second, and fifteen on a machine that is busy."""
MAX_STARTS_SECONDS = 16 * START_SECONDS
"""What the limit grows to: a start that timed out has lost its import, so the next one has more time."""
KILL_SECONDS = 5.0
"""A killed process is gone in milliseconds."""
ENDPOINT = "flotilla.shared.weights.group.endpoint"

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
        self._calls = CallProcess(
            python_module(ENDPOINT),
            None,
            "the weight endpoint",
            environment=child_environment(**_ENVIRONMENT, **({} if device else _NO_GPU)),
            start_seconds=START_SECONDS,
            on_line=unheard,
            blames_opening=False,
        )
        self._pids: dict[int, int] = {}

    async def start(self) -> None:
        """Start the endpoint process. Opening a group does so where it is not running, also after its death.

        It ends with the thread that called this: start it from the thread that runs the service's event loop.

        Raises:
            WeightTransferFailed: the process ended while it started.
            DeadlineExceeded: it did not start in time.
        """
        if not self._is_running:
            self._pids.clear()
        try:
            await self._calls.start()
        except WorkerDied as error:
            raise WeightTransferFailed(error.detail) from None
        except DeadlineExceeded:
            self._calls.start_seconds = min(2 * self._calls.start_seconds, MAX_STARTS_SECONDS)
            raise
        self._calls.start_seconds = START_SECONDS

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
        await self._open(opening)
        port = await self._call(["opened", epoch], timeout_seconds, f"hosting the store of epoch {epoch}")
        return Rendezvous(host=self._host, port=port, epoch=epoch, world_size=world_size)

    async def open_receiver(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        """Begin to join an epoch; :meth:`joined` returns when all members are there.

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
            DeadlineExceeded: a member is missing.
        """
        await self._call(["joined", epoch], deadline_seconds, f"joining the weight group of epoch {epoch}")

    async def send(
        self, epoch: int, image_path: Path, image_bytes: int, slice_bytes: int, deadline_seconds: float
    ) -> None:
        """Broadcast an image to all members. That they have all of it, only their own answers tell.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed or the image is not as announced; the epoch is of no use any more.
            DeadlineExceeded: a member stalled; likewise.
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
            on_arrived: called after each slice with the number of bytes received so far.

        Returns:
            xxh3-64 of the bytes received, to hold against the manifest.

        Raises:
            NotFound: the epoch is not open.
            WeightTransferFailed: a member failed or the file is not as announced; the epoch is of no use any more.
            DeadlineExceeded: a member stalled; likewise.
        """
        checksum = await self._transfer(
            Direction.RECEIVE, epoch, image_path, image_bytes, slice_bytes, deadline_seconds, on_arrived
        )
        assert checksum is not None
        return checksum

    def member_pid(self, epoch: int) -> int:
        """Return which process is this service's member of the epoch, for logs and diagnosis.

        Raises:
            KeyError: the epoch is not open.
        """
        return self._pids[epoch]

    async def close_epoch(self, epoch: int) -> None:
        """Kill this service's member of the epoch, whatever it is doing. Nothing happens where it is not open."""
        pid = self._pids.pop(epoch, None)
        try:
            await self._call(["close", epoch], KILL_SECONDS, f"killing the member of epoch {epoch}")
        except (WeightTransferFailed, DeadlineExceeded):
            # While the endpoint lives this pid is not reused: ended members are its zombies.
            if pid is not None and self._is_running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the endpoint and all its members. May be called twice."""
        self._pids.clear()
        await self._calls.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _is_running(self) -> bool:
        return self._calls.child is not None and not self._calls.child.has_ended

    async def _open(self, opening: Opening) -> None:
        await self.start()
        what = f"forking the member of epoch {opening.epoch}"
        try:
            pid = await self._call(["open", opening.model_dump(mode="json")], opening.timeout_seconds, what)
            self._pids[opening.epoch] = pid
        except (WeightTransferFailed, DeadlineExceeded, asyncio.CancelledError):
            await self.close_epoch(opening.epoch)
            raise

    async def _transfer(
        self,
        direction: Direction,
        epoch: int,
        image_path: Path,
        image_bytes: int,
        slice_bytes: int,
        deadline_seconds: float,
        on_arrived: Callable[[int], None] | None = None,
    ) -> str | None:
        command = Command(
            direction=direction,
            image_path=image_path,
            image_bytes=image_bytes,
            slice_bytes=slice_bytes,
            # A little less, so that the member can still report what it was waiting for.
            deadline_seconds=deadline_seconds - min(0.2, 0.1 * deadline_seconds),
            tells_progress=on_arrived is not None,
        )
        content = ["transfer", epoch, command.model_dump(mode="json")]
        checksum: str | None = await self._call(
            content, deadline_seconds, f"transferring the weights in epoch {epoch}", on_arrived
        )
        return checksum

    async def _call(
        self, content: object, seconds: float, what: str, on_progress: Callable[[int], None] | None = None
    ) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await self._calls.call(content, on_progress=on_progress)
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took more than {seconds} s") from None
        except WorkerDied as error:
            raise WeightTransferFailed(error.detail) from None
