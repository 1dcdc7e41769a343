"""Read the values that other systems' launch files hold: typed by YAML, or text from a command line.

Each converter takes the parameter's name, for the message, and what was written. Null stays null.
"""

import math
from collections.abc import Callable
from typing import Any

import yaml

from flotilla.shared.config.load.yaml_text import read_value, too_large
from flotilla.shared.errors import InvalidSpec

Convert = Callable[[str, Any], Any]

NULLS = frozenset({"null", "none", "~", ""})
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}
MAX_SHOWN = 80


def shown(value: Any) -> str:
    """Write a value for a message, shortened."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def is_null(value: Any) -> bool:
    """Return whether nothing was written, or null in one of its spellings."""
    return value is None or (isinstance(value, str) and value.strip().lower() in NULLS)


def unchanged(name: str, value: Any) -> Any:
    """Take the value as it is."""
    return value


def wrong(name: str, value: Any, allowed: str) -> InvalidSpec:
    """Describe a value that cannot be read."""
    entry = {"path": name, "value": shown(value), "allowed": allowed}
    return InvalidSpec(f"{name}: must be {allowed}, got {shown(value)!r}", errors=[entry])


def number(name: str, value: Any) -> float | None:
    """Read a finite number; YAML reads ``1e-6`` as text, so text is read, too."""
    if is_null(value):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong(name, value, "a number")
    try:
        read = float(value)
    except (ValueError, OverflowError):
        raise wrong(name, value, "a number") from None
    if not math.isfinite(read):
        raise wrong(name, value, "a finite number")
    return read


def integer(name: str, value: Any) -> int | None:
    """Read a whole number."""
    read = number(name, value)
    if read is None:
        return None
    if not read.is_integer() or abs(read) > 2**53:
        raise wrong(name, value, "a whole number")
    return int(read)


def frequency(name: str, value: Any) -> int | None:
    """Read how often something is done; false is never."""
    return -1 if value is False or str(value).strip().lower() == "false" else integer(name, value)


def count(name: str, value: Any) -> int | None:
    """Read a whole number of at least 1."""
    read = integer(name, value)
    if read is not None and read < 1:
        raise wrong(name, value, "a whole number of at least 1")
    return read


def share(name: str, value: Any) -> float | None:
    """Read a number from 0 to 1."""
    read = number(name, value)
    if read is not None and not 0 <= read <= 1:
        raise wrong(name, value, "a number from 0 to 1")
    return read


def flag(name: str, value: Any) -> bool | None:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    if is_null(value):
        return None
    read = TRUTHS.get(str(value).strip().lower())
    if read is None:
        raise wrong(name, value, "true or false")
    return read


def text(name: str, value: Any) -> str | None:
    """Read text; a number is written as text. A truth is none: a flag that has lost its value."""
    if is_null(value):
        return None
    if isinstance(value, list | dict | bool):
        raise wrong(name, value, "text")
    return str(value)


def texts(name: str, value: Any) -> list[str] | None:
    """Read a list of texts; one alone makes a list of one, and a list that was quoted once more is one."""
    if is_null(value):
        return None
    items = value if isinstance(value, list) else _quoted_list(value) or [value]
    return [str(text(name, item) or "") for item in items]


def _quoted_list(value: Any) -> list[Any] | None:
    written = str(value).strip()
    if not (written.startswith("[") and written.endswith("]")):
        return None
    try:
        found = read_value(written)
    except (yaml.YAMLError, RecursionError):
        return None
    is_list = isinstance(found, list) and too_large(found) is None
    return found if is_list and all(isinstance(each, str | int | float) for each in found) else None


def pieces(name: str, value: Any) -> list[str] | None:
    """Read a list of texts that may also be written as one, with commas between them."""
    found = texts(name, value)
    return found and [part.strip() for item in found for part in item.split(",") if part.strip()]


def numbers(name: str, value: Any) -> list[float] | None:
    """Read a list of numbers: a list, or text with spaces or commas between them, perhaps in brackets."""
    if is_null(value):
        return None
    items = value
    if isinstance(value, str):
        written = value.strip()
        is_bracketed = (written[:1], written[-1:]) in {("[", "]"), ("(", ")")}
        items = (written[1:-1] if is_bracketed else written).replace(",", " ").split()
    if not isinstance(items, list):
        items = [items]
    try:
        read = [number(name, item) for item in items]
    except InvalidSpec:
        read = [None]
    if any(item is None for item in read):
        raise wrong(name, value, "a list of numbers")
    return [item for item in read if item is not None]


def same(left: Any, right: Any) -> bool:
    """Return whether two written values mean the same, as ``True`` and ``"true"``, ``1`` and ``"1.0"`` do."""
    return bool(_plain(left) == _plain(right))


def _plain(value: Any) -> Any:
    if is_null(value):
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value) if abs(value) < 2**53 else value
    if isinstance(value, str):
        stripped = value.strip()
        if stripped.lower() in {"true", "false"}:
            return stripped.lower() == "true"
        try:
            return float(stripped)
        except ValueError:
            return stripped
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
