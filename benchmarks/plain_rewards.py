"""The rewards of ``benchmarks.end_to_end``, for both sides: plain functions, importable with nothing installed."""

import re
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any

ANSWER = re.compile(r"####\s*([-+]?\$?\s?[\d.,]*\d(?:[eE][-+]?\d+)?)")
"""The pattern of our ``numeric`` component."""


def numeric(response: str, label: str) -> float:
    """Return 1 if the number after the last ``####`` is the label, else 0, as our ``numeric`` component does."""
    found = ANSWER.findall(response)
    try:
        return float(bool(found) and Decimal(found[-1].rstrip(".").replace(",", "")) == Decimal(label))
    except InvalidOperation:
        return 0.0


def checksum(response: str, _: str) -> float:
    """Return a number from 0 to 1 that differs from answer to answer: random weights would never get one right."""
    return zlib.crc32(response.encode()) / 2**32


def score(sample: Any) -> float:
    """Return the checksum, as a component ``custom`` asks for it."""
    return checksum(sample.response, "")
