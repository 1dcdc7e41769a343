"""JSON of others: parsing holds the event loop for as long as it makes objects, so their number is bounded before."""

import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Final


class ReplyTooLong(Exception):
    """A reply is longer than its reader wants to hold."""


def is_packed(headers: Mapping[str, str]) -> bool:
    """Return whether a reply is compressed: what a few bytes unpack to is the sender's choice."""
    return headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}


async def at_most(pieces: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Pass on the pieces of a reply.

    Raises:
        ReplyTooLong: with the piece that goes beyond ``max_bytes``, which is not passed on.
    """
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise ReplyTooLong(f"more than {max_bytes} bytes")
        yield piece


MAX_VALUES: Final = 20_000
"""Most brackets, braces and commas outside of strings."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_json(content: bytes, *, keeps_integers: bool = False, max_values: int = MAX_VALUES) -> object:
    """Parse some bounded bytes; whole numbers become floats unless they are to stay, which limits their digits.

    Args:
        content: the bytes.
        keeps_integers: whether they are to stay.
        max_values: most brackets, braces and commas outside of strings; of strings there may be twice as many.

    Raises:
        ValueError: it is not JSON, or has too many values or levels; the message ends a sentence.
    """
    if has_more_values(content, max_values):
        raise ValueError(f"has more than {max_values} values")
    try:
        answer: object = json.loads(content, parse_int=None if keeps_integers else float)
    except RecursionError:
        raise ValueError("has too many levels") from None
    except ValueError:
        raise ValueError("is not JSON") from None
    return answer


def has_more_values(content: bytes, max_values: int) -> bool:
    """Return whether JSON has more brackets, braces and commas outside strings, or more than twice as many strings."""
    if _num_values(content) <= max_values:
        return False
    strings = content.count(b'"') // 2
    return strings > 2 * max_values or _num_values(_STRING.sub(b"", content)) > max_values


def _num_values(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{") + content.count(b",")
