"""Ranges of images over plain connections: from file to socket to file, off the event loop.

HTTP authorises: a route that has accepted a caller gives it a ticket, good for one range of one image, once
and soon. The caller shows it on a connection of its own, and gets the bytes. So neither a token nor an image's name is
ever seen here, and the loop that keeps a service's lease does not touch a byte of what may be gigabytes.
"""

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flotilla.shared.net.server.ports import listening_socket
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.loopback import RECEIVE_BUFFER_BYTES, is_loopback, on_half_of_the_cores
from flotilla.shared.weights.image.prefix_checksum import PrefixChecksum
from flotilla.shared.weights.pull.sender import RangeSender

log = logging.getLogger(__name__)

TICKET_BYTES = 32
CLAIM_SECONDS = 10.0
"""How long a ticket is good for: its caller connects at once, or not at all."""
SILENCE_SECONDS = 60.0
"""A client that reads nothing for so long is disconnected, so that its lock on the image ends; it can resume."""
MAX_CONNECTIONS = 64
"""Of callers who have shown a ticket."""
MAX_UNCLAIMED = 64
MAX_UNCLAIMED_OF_ADDRESS = 32
"""Connections without one yet: of further ones, the oldest is closed. A client shows its ticket as it connects."""
HANDSHAKE_SECONDS = 3.0
"""How long a whole ticket may take: a caller without one is disconnected then, however slowly it writes."""
WAKE_BYTES = 256 << 10
"""The receiver is woken for so many bytes: for each packet of 64 KiB it costs twice the time of a core."""
CHUNK_BYTES = 1 << 20
"""Small enough to be in a core's cache when it is written to the file and summed."""
PAUSE_SECONDS = 0.005
"""On loopback a connection keeps its core for such pauses: in turns by chunks two get in each other's way."""
STOPPED_SECONDS = 0.1
"""How soon a receiver that waits for a core finds that it was stopped."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A range of an image, which is locked against writers until the ticket is used up."""

    image: WeightImage
    span: range
    ends_at: float


class DirectServer:
    """Listens on a port of its own; a thread waits for each connection, the sender moves its bytes.

    Args:
        host: to bind.
        sender: is closed with it.
    """

    def __init__(self, host: str, sender: RangeSender) -> None:
        self._sender = sender
        self._listening = listening_socket(host)
        self._lock = threading.Lock()
        self._tickets: dict[bytes, Ticket] = {}
        self._connections: set[socket.socket] = set()
        self._unclaimed: dict[socket.socket, str] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="direct weights", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listening.getsockname()[1])

    def issue(self, image: WeightImage, span: range) -> bytes:
        """Make a ticket; the image is closed once its bytes are sent or the ticket has expired."""
        key = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._tickets[key] = Ticket(image, span, time.monotonic() + CLAIM_SECONDS)
        expiry = threading.Timer(CLAIM_SECONDS, self._expire, (key,))
        expiry.daemon = True
        expiry.start()
        return key

    def close(self) -> None:
        """Stop listening, abort what is being sent, and release all images."""
        with self._lock:
            self._is_closed = True
            tickets, self._tickets = list(self._tickets.values()), {}
            connections = [*self._connections, *self._unclaimed]
        # A thread in accept() is woken by this, not by close() alone.
        for each in (self._listening, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._sender.close()
        for ticket in tickets:
            ticket.image.close()

    def _expire(self, key: bytes) -> None:
        with self._lock:
            ticket = self._tickets.pop(key, None)
        if ticket is not None:
            ticket.image.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                # Too many open files, or a caller that left again: the next one may be served.
                time.sleep(0.1)
                continue
            with self._lock:
                is_closed = self._is_closed
                if not is_closed:
                    self._make_room(address)
                    self._unclaimed[connection] = address
            if is_closed:
                connection.close()
            else:
                threading.Thread(target=self._serve, args=(connection,), name="weights range", daemon=True).start()

    def _make_room(self, address: str) -> None:
        """Close the oldest connection without a ticket where there are as many as may be, or of this address."""
        of_address = [each for each, its in self._unclaimed.items() if its == address]
        if len(of_address) >= MAX_UNCLAIMED_OF_ADDRESS:
            oldest = of_address[0]
        elif len(self._unclaimed) >= MAX_UNCLAIMED:
            oldest = next(iter(self._unclaimed))
        else:
            return
        del self._unclaimed[oldest]
        # Its thread is woken by this, and closes it.
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _claim(self, connection: socket.socket) -> Ticket | None:
        """Read a ticket; returns what it is good for, and gives the connection a place then."""
        key = _read_exactly(connection, TICKET_BYTES, HANDSHAKE_SECONDS)
        with self._lock:
            is_there = self._unclaimed.pop(connection, None) is not None
            if self._is_closed or not is_there or len(self._connections) >= MAX_CONNECTIONS:
                return None
            ticket = self._tickets.pop(key, None)
            if ticket is not None:
                self._connections.add(connection)
        return ticket

    def _serve(self, connection: socket.socket) -> None:
        ticket = None
        try:
            ticket = self._claim(connection)
            if ticket is not None:
                self._sender.send(connection, ticket.image, ticket.span, SILENCE_SECONDS)
        except OSError as error:
            log.info("a range of weights was not taken to its end", extra={"cause": repr(error)})
        finally:
            if ticket is not None:
                ticket.image.close()
            with self._lock:
                self._unclaimed.pop(connection, None)
                self._connections.discard(connection)
            connection.close()


def _read_exactly(connection: socket.socket, num_bytes: int, seconds: float) -> bytes:
    """Read so many bytes, or fewer where the caller ends before.

    Raises:
        TimeoutError: they did not come in time, all together.
    """
    parts, ends_at = b"", time.monotonic() + seconds
    while len(parts) < num_bytes:
        left = ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError("no ticket came in time")
        connection.settimeout(left)
        part = connection.recv(num_bytes - len(parts))
        if not part:
            break
        parts += part
    return parts


class DirectReceiver:
    """Takes a range from a ``DirectServer``, on a thread; ``stop`` ends it from another one.

    Args:
        host, port: of the server.
        connect_seconds: for the connection.
        silence_seconds: the longest that nothing may come.
        cores: one is held while bytes are moved.
        checksum: of the image; updated with received bytes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_seconds: float,
        silence_seconds: float,
        cores: threading.Semaphore,
        checksum: PrefixChecksum,
    ) -> None:
        self._address = host, port
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._cores = cores
        self._checksum = checksum
        self._pause_seconds = 0.0
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_stopped = False
        self.is_connected = False
        self.num_received = 0
        """How many bytes are there; any thread may look."""

    def receive(self, ticket: bytes, image: WeightImage, span: range) -> None:
        """Show the ticket and write what comes to a range of an image; blocks.

        Raises:
            OSError: the server cannot be reached, broke off, or ``stop`` was called.
            WeightTransferFailed: there is no room for it.
        """
        with socket.create_connection(self._address, self._connect_seconds) as connection, self._owned(connection):
            self.is_connected = True
            connection.settimeout(self._silence_seconds)
            with contextlib.ExitStack() as stack:
                if is_loopback(connection):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                    self._pause_seconds = PAUSE_SECONDS
                    stack.enter_context(on_half_of_the_cores(sends=False))
                connection.sendall(ticket)
                connection.setblocking(False)
                self._take_all(connection, image, span)

    def _take_all(self, connection: socket.socket, image: WeightImage, span: range) -> None:
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        while self.num_received < len(span):
            if not self._has_come(connection, readable, span, self._silence_seconds):
                raise TimeoutError(f"nothing came for {self._silence_seconds} s")
            with self._core():
                self._take(connection, readable, image, span)

    def _take(self, connection: socket.socket, readable: "select.poll", image: WeightImage, span: range) -> None:
        """Write what comes, until it pauses."""
        while self._has_come(connection, readable, span, self._pause_seconds):
            position = span.start + self.num_received
            num_wanted = min(CHUNK_BYTES, span.stop - position)
            present = image.present_at(position, num_wanted)
            target = self._buffer[:num_wanted] if present is None else present
            try:
                num = connection.recv_into(target)
            except BlockingIOError:
                continue
            if num == 0:
                raise ConnectionResetError(f"the connection ended after {self.num_received} bytes")
            if present is None:
                image.write_at(position, target[:num])
            self.num_received += num
            self._checksum.follow(image, range(span.start, position + num), target[:num])

    def _has_come(self, connection: socket.socket, readable: "select.poll", span: range, seconds: float) -> bool:
        """Wait until so much has come that it is worth being woken for, or the connection has ended."""
        num_missing = len(span) - self.num_received
        if num_missing == 0:
            return False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(WAKE_BYTES, num_missing))
        return bool(readable.poll(seconds * 1000))

    @contextlib.contextmanager
    def _core(self) -> Iterator[None]:
        while not self._cores.acquire(timeout=STOPPED_SECONDS):
            if self._is_stopped:
                raise ConnectionAbortedError("stopped before there was a core for it")
        try:
            yield
        finally:
            self._cores.release()

    def stop(self) -> None:
        """Make ``receive`` fail now."""
        with self._lock:
            self._is_stopped = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _owned(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._is_stopped:
                raise ConnectionAbortedError("stopped before it began")
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None
