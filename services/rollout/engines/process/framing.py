"""Length-prefixed msgpack over a stream: four bytes little-endian, then the message."""

import asyncio
import socket
import struct
from typing import Any

import msgpack

PREFIX = struct.Struct("<I")


def encode(message: dict[str, Any]) -> bytes:
    """Frame a message."""
    body = msgpack.packb(message)
    return PREFIX.pack(len(body)) + bytes(body)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read one message.

    Raises:
        EOFError: the other side has gone (``asyncio.IncompleteReadError`` is one), or reset the connection.
    """
    try:
        (length,) = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        message: dict[str, Any] = msgpack.unpackb(await reader.readexactly(length))
    except ConnectionError as error:
        raise EOFError(str(error)) from error
    return message


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Read one message, blocking.

    Raises:
        EOFError: the other side has gone.
    """
    (length,) = PREFIX.unpack(_receive(connection, PREFIX.size))
    message: dict[str, Any] = msgpack.unpackb(_receive(connection, length))
    return message


def _receive(connection: socket.socket, length: int) -> bytearray:
    body = bytearray(length)
    view = memoryview(body)
    while view:
        try:
            received = connection.recv_into(view)
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not received:
            raise EOFError("the connection was closed")
        view = view[received:]
    return body
