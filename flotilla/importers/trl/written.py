"""Values of a script as they are read without running it: known, a call of a name that matters, or code."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flotilla.importers.values import shown

PLAIN: Final = (str, int, float, bool, type(None))
MAX_ITEMS: Final = 10_000
MAX_WRITTEN: Final = 1_000_000
"""Characters and items of a value that is written out, each place of a list that has several counted."""
MAX_NESTED: Final = 64
ENDLESS: Final = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """An expression whose value only a run knows.

    Attributes:
        node: the expression.
        why: what keeps it from being known, where that is not the expression itself.
    """

    node: ast.expr
    why: str = ""

    @property
    def line(self) -> int:
        """Its line in the script."""
        return self.node.lineno

    def __repr__(self) -> str:
        return shown(ast.unparse(self.node))


@dataclass(slots=True, eq=False)
class Called:
    """A call of a class or function that the importer reads by its arguments.

    Attributes:
        name: the last part of the function's name.
        node: the call.
        positional: its arguments.
        keywords: its keyword arguments, and attributes that were set afterwards.
        unread: why further arguments are not known: ``**`` of something that only a run knows.
    """

    name: str
    node: ast.expr
    positional: Sequence[Any] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    unread: Code | None = None

    def __repr__(self) -> str:
        return shown(ast.unparse(self.node))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.positional[position] if len(self.positional) > position else self.keywords.get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of the script, or of a module that it imports.

    Attributes:
        name: as the script calls it.
        code: Python source that defines it, with all of the script that it needs; empty where ``why`` says why not.
        why: it cannot be taken out of the script.
    """

    name: str
    code: str
    why: str = ""

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that a script's own code makes.

    Attributes:
        shown: the expression.
        code: Python source that ends with ``ROWS = expression``; empty where ``why`` says why not.
        why: it cannot be taken out of the script.
    """

    shown: str
    code: str
    why: str = ""

    def __repr__(self) -> str:
        return self.shown


def is_known(value: Any) -> bool:
    """Whether a value is plain data throughout, and small enough to be written out."""
    return _written(value, PLAIN, {}, 0) <= MAX_WRITTEN


def described(value: Any) -> str:
    """Write a value for a message, in which there may be code."""
    is_small = _written(value, (*PLAIN, object), {}, 0) <= MAX_WRITTEN
    return shown(value) if is_small else f"a {type(value).__name__} that is too large to be shown"


def _written(value: Any, plain: tuple[type, ...], sizes: dict[int, float], depth: int) -> float:
    """Count what a value takes when it is written out; what contains itself or is no plain data has no end.

    Args:
        plain: what a value without others in it may be.
        sizes: of what was counted, by identity: a list in many places would be counted as often, twice as many for
            each further one that holds it twice.
    """
    if not isinstance(value, list | tuple | set | Mapping):
        return (len(value) + 1 if isinstance(value, str) else 1) if isinstance(value, plain) else ENDLESS
    if (known := sizes.get(id(value))) is not None:
        return known
    sizes[id(value)] = ENDLESS
    if depth < MAX_NESTED and len(value) <= MAX_ITEMS:
        parts = [each for pair in value.items() for each in pair] if isinstance(value, Mapping) else value
        sizes[id(value)] = 1 + sum(_written(each, plain, sizes, depth + 1) for each in parts)
    return sizes[id(value)]
