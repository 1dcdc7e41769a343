"""JSON of others: parsing holds the event loop for as long as it makes objects, so their number is bounded before."""

import json
import re
from typing import Final

MAX_VALUES: Final = 20_000
"""Most brackets, braces and commas outside of strings."""
MAX_STRINGS: Final = 40_000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_json(content: bytes, *, keeps_integers: bool = False) -> object:
    """Parse some bounded bytes; whole numbers become floats unless they are to stay, which limits their digits.

    Raises:
        ValueError: it is not JSON, or has too many values or levels; says so as the end of a sentence.
    """
    if _num_values(content) > MAX_VALUES:
        strings = content.count(b'"') // 2
        if strings > MAX_STRINGS or _num_values(_STRING.sub(b"", content)) > MAX_VALUES:
            raise ValueError(f"has more than {MAX_VALUES} values")
    try:
        answer: object = json.loads(content, parse_int=None if keeps_integers else float)
    except RecursionError:
        raise ValueError("has too many levels") from None
    except ValueError:
        raise ValueError("is not JSON") from None
    return answer


def _num_values(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{") + content.count(b",")
