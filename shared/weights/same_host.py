"""The connections of a shared-memory weight group: names of images one way, answers the other.

They carry no weights. Their other use is that the kernel closes them when a process dies, so that no deadline has to
pass before anybody notices.
"""

import asyncio
import contextlib
from pathlib import Path

from pydantic import Field, ValidationError

from shared.errors import WeightTransferFailed
from shared.schemas.publication import Rendezvous, Wire

HELLO_SECONDS = 5.0
"""Whoever connects says at once who it is."""


class Hello(Wire):
    """Receiver to sender: I am this member."""

    epoch: int
    rank: int = Field(ge=1)


class Offer(Wire):
    """Sender to receiver: take this image."""

    image_path: Path
    image_bytes: int


class Answer(Wire):
    """Receiver to sender: the image is copied, or why not."""

    failure: str | None = None


_ALL_HERE = b"joined\n"


class HostedGroup:
    """The sender's side of an epoch: one connection per receiver."""

    def __init__(self, epoch: int, world_size: int) -> None:
        self._epoch = epoch
        self._world_size = world_size
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._failure: WeightTransferFailed | None = None
        self._departed: int | None = None
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, host: str) -> int:
        """Listen on a free port of this address, and return it.

        Raises:
            WeightTransferFailed: the address is not one of this machine.
        """
        try:
            self._server = await asyncio.start_server(self._welcome, host, 0)
        except OSError as error:
            raise WeightTransferFailed(f"cannot listen on {host}: {error}") from error
        self._greet_when_complete()
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def offer(self, offer: Offer) -> None:
        """Offer an image to every receiver, and wait until each one has copied it.

        Raises:
            WeightTransferFailed: a receiver went away, or could not copy it.
        """
        if self._departed is not None:
            self.fail(f"the receiver of rank {self._departed} went away")
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        self._answers = {rank: loop.create_future() for rank in self._writers}
        for writer in self._writers.values():
            writer.write(_line(offer))
        await asyncio.gather(*self._answers.values())

    def fail(self, detail: str) -> None:
        """Let everything that waits for this epoch fail."""
        if self._failure is None:
            self._failure = WeightTransferFailed(f"weight group of epoch {self._epoch}: {detail}", epoch=self._epoch)
        for future in (self.joined, *self._answers.values()):
            if not future.done():
                future.set_exception(self._failure)
                future.exception()  # seen: nobody need wait for it

    def close(self) -> None:
        """Close all connections; the receivers notice."""
        self.fail("it was closed")
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            rank = await self._rank_of(reader)
            if rank is None:
                return
            self._writers[rank] = writer
            self._greet_when_complete()
            with contextlib.suppress(ConnectionError, ValidationError):
                while line := await reader.readline():
                    self._take_answer(rank, Answer.model_validate_json(line))
            self._note_departure(rank)

    async def _rank_of(self, reader: asyncio.StreamReader) -> int | None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = Hello.model_validate_json(await reader.readline())
        except (ConnectionError, TimeoutError, ValueError):
            return None
        is_welcome = hello.epoch == self._epoch and hello.rank < self._world_size and hello.rank not in self._writers
        return hello.rank if is_welcome and self._failure is None else None

    def _greet_when_complete(self) -> None:
        if len(self._writers) == self._world_size - 1 and not self.joined.done():
            for writer in self._writers.values():
                writer.write(_ALL_HERE)
            self.joined.set_result(None)

    def _note_departure(self, rank: int) -> None:
        """Fail where this receiver is waited for. One that has its image may leave while others still copy."""
        self._departed = rank
        answer = self._answers.get(rank)
        if answer is None or not answer.done():
            self.fail(f"the receiver of rank {rank} went away")

    def _take_answer(self, rank: int, answer: Answer) -> None:
        if answer.failure is not None:
            self.fail(f"the receiver of rank {rank} could not take the image: {answer.failure}")
        elif not self._answers[rank].done():
            self._answers[rank].set_result(None)


class JoinedGroup:
    """A receiver's side of an epoch: its connection to the sender."""

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.joining = asyncio.create_task(self._join(timeout_seconds), name=f"join epoch {rendezvous.epoch}")

    @property
    def is_connected(self) -> bool:
        """Whether the sender can be told anything."""
        return self._writer is not None and not self._writer.is_closing()

    async def next_offer(self) -> Offer:
        """Wait for the next image.

        Raises:
            WeightTransferFailed: the sender went away.
        """
        await asyncio.shield(self.joining)
        assert self._reader is not None
        return Offer.model_validate_json(await self._line(self._reader))

    def answer(self, answer: Answer) -> None:
        """Tell the sender how the last offer went."""
        assert self._writer is not None
        self._writer.write(_line(answer))

    async def close(self) -> None:
        """Close the connection; the sender notices."""
        self.joining.cancel()
        await asyncio.wait([self.joining])
        if not self.joining.cancelled():
            self.joining.exception()  # seen: nobody need wait for it
        if self._writer is not None:
            self._writer.close()

    async def _join(self, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                self._reader, self._writer = await asyncio.open_connection(self._rendezvous.host, self._rendezvous.port)
                self._writer.write(_line(Hello(epoch=self._rendezvous.epoch, rank=self._rank)))
                await self._line(self._reader)
        except TimeoutError:
            raise WeightTransferFailed(f"not all members of epoch {self._rendezvous.epoch} came") from None
        except OSError as error:
            raise WeightTransferFailed(f"cannot reach the sender of epoch {self._rendezvous.epoch}: {error}") from error

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            line = await reader.readline()
        except ConnectionError as error:
            raise WeightTransferFailed(f"the sender of epoch {self._rendezvous.epoch} went away: {error}") from error
        if not line:
            raise WeightTransferFailed(f"the sender of epoch {self._rendezvous.epoch} went away")
        return line


def _line(message: Wire) -> bytes:
    return message.model_dump_json().encode() + b"\n"
