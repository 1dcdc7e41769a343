"""Lines over a unix socket, with file descriptors where they must go along."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Self

from flotilla.shared.errors import WeightTransferFailed


class Lines(asyncio.Protocol):
    """One end of a socket: hands over each line as it arrives, and tells when the other end is gone.

    Made by :meth:`open`. What is sent is short, so it is sent at once or not at all: a peer that does not read for so
    long that the socket is full is as good as dead.
    """

    def __init__(self, sending: socket.socket, on_line: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._sending = sending
        self._on_line = on_line
        self._on_lost = on_lost
        self._transport: asyncio.BaseTransport | None = None
        self._unread = b""
        self.is_closed = False

    @classmethod
    async def open(
        cls, connected: socket.socket, on_line: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> Self:
        """Take over a connected unix stream socket."""
        connected.setblocking(False)
        lines = cls(connected.dup(), on_line, on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: lines, sock=connected)
        return lines

    def send(self, line: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a line, and with it the descriptors.

        Raises:
            WeightTransferFailed: the other end is gone, or does not read.
        """
        try:
            socket.send_fds(self._sending, [line], list(descriptors))
        except OSError as error:
            raise WeightTransferFailed(f"the weight endpoint cannot be told anything: {error}") from error

    def close(self) -> None:
        """Close this end; ``on_lost`` is not called any more. May be called twice."""
        self.is_closed = True
        self._sending.close()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._on_line(line)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        if not self.is_closed:
            self.close()
            self._on_lost()
