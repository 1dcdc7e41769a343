"""Values of a script as they are read without running it: known, a call of a name that matters, or code."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flotilla.importers.values import shown

PLAIN: Final = (str, int, float, bool, type(None))
MAX_ITEMS: Final = 10_000


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
    """Whether a value is plain data throughout."""
    if isinstance(value, list | tuple | set):
        return len(value) <= MAX_ITEMS and all(is_known(each) for each in value)
    if isinstance(value, Mapping):
        return len(value) <= MAX_ITEMS and all(is_known(each) for pair in value.items() for each in pair)
    return isinstance(value, PLAIN)
