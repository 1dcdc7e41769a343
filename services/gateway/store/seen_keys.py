"""Which idempotency keys may have an answer: a new one, as nearly all are, is not looked for in the database."""

import hashlib
from collections.abc import Iterator
from typing import Final

BITS: Final = 1 << 23
"""A megabyte. With as many keys as steps of a day report, one new key in a thousand is searched for."""
PLACES: Final = 4


class SeenKeys:
    """A Bloom filter: knows of every key that was added, and of few others that they were not.

    Source: Bloom, Space/Time Trade-offs in Hash Coding with Allowable Errors, 1970.
    """

    def __init__(self) -> None:
        self._bits = bytearray(BITS // 8)

    def add(self, key: str) -> None:
        """Note a key."""
        for place in _places(key):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, key: str) -> bool:
        return all(self._bits[place >> 3] & 1 << (place & 7) for place in _places(key))


def _places(key: str) -> Iterator[int]:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=4 * PLACES).digest()
    return (int.from_bytes(digest[start : start + 4]) % BITS for start in range(0, 4 * PLACES, 4))
