"""Values on their way between an answer's program and its judge: JSON, and never code.

Only exact types are data: a subclass brings code of its own, such as ``__eq__``.

Runs in the sandbox, before the text of ``answer`` or ``judge``: only the standard library, also of older Pythons.
"""

import collections
import datetime
import decimal
import fractions
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

Wire = Any
"""JSON of one value: a scalar as it is, everything else as a list of its kind and content."""

SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)}
MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}
TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, str, fractions.Fraction),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
SCALARS = (bool, str, int, float, complex, bytes, bytearray)
MOST_SAFE_INT = 2**53


def pack(value: Any, refer: Callable[[Any], Wire]) -> Wire:
    """Make JSON of a value; what is not plain data is named by ``refer``.

    Only exact types are data: a subclass brings code of its own.
    """
    kind = type(value)
    if value is None or kind in SCALARS:
        return _pack_scalar(value, kind)
    if kind in (range, slice):
        return [kind.__name__, *(pack(each, refer) for each in (value.start, value.stop, value.step))]
    if SEQUENCES.get(kind.__name__) is kind:
        return [kind.__name__, [pack(each, refer) for each in value]]
    if MAPPINGS.get(kind.__name__) is kind or kind is collections.defaultdict:
        name = "dict" if kind is collections.defaultdict else kind.__name__
        return [name, [[pack(key, refer), pack(each, refer)] for key, each in value.items()]]
    if kind.__name__ in TEXTS and TEXTS[kind.__name__][0] is kind:
        return [kind.__name__, TEXTS[kind.__name__][1](value)]
    if issubclass(kind, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
        return ["namedtuple", list(fields), [pack(each, refer) for each in value]]
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        plain = pack(value.tolist(), refer)
        return ["array", value.dtype.str, plain] if kind.__name__ == "ndarray" else plain
    return refer(value)


def _pack_scalar(value: Any, kind: type) -> Wire:
    if kind is int:
        return value if abs(value) < MOST_SAFE_INT else ["int", hex(value)]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind in (float, bytes, bytearray):
        return [kind.__name__, value.hex()]
    return value


def unpack(wire: Wire, resolve: Callable[[list[Any]], Any]) -> Any:
    """Make the value again; what ``pack`` left to ``refer`` is found by ``resolve``.

    Raises:
        ValueError, TypeError, LookupError: it is not what ``pack`` makes.
    """
    if not isinstance(wire, list):
        return wire
    kind, *content = wire
    if kind == "int":
        return int(content[0], 16)
    if kind == "float":
        return float.fromhex(content[0])
    if kind == "complex":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content[0])
    if kind in ("range", "slice"):
        return (range if kind == "range" else slice)(*(unpack(each, resolve) for each in content))
    if kind in SEQUENCES:
        return SEQUENCES[kind]([unpack(each, resolve) for each in content[0]])
    if kind in MAPPINGS:
        return MAPPINGS[kind]({unpack(key, resolve): unpack(each, resolve) for key, each in content[0]})
    if kind in TEXTS:
        return TEXTS[kind][2](content[0])
    if kind == "namedtuple":
        return collections.namedtuple("Row", content[0])(*(unpack(each, resolve) for each in content[1]))  # type: ignore[misc]
    if kind == "array":
        plain = unpack(content[1], resolve)
        try:
            return importlib.import_module("numpy").array(plain, dtype=str(content[0]))
        except ImportError:
            return plain
    return resolve(wire)


def named(module: str, name: str) -> Any:
    """Find an object by its module and its name there."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def write_line(descriptor: int, value: Wire) -> None:
    """Write a value and the end of its line."""
    unsent = memoryview(json.dumps(value).encode() + b"\n")
    while unsent:
        unsent = unsent[os.write(descriptor, unsent) :]
