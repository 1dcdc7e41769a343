"""Operators over known values, bounded: a script's arithmetic is somebody else's."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from flotilla.importers.trl.written import Code, is_known

ARITHMETIC: Final[Mapping[type[ast.AST], Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
COMPARISONS: Final[Mapping[type[ast.AST], Callable[..., Any]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip
LARGEST: Final = 2**63
LONGEST: Final = 100_000


def apply(node: ast.expr, function: Callable[..., Any] | None, *values: Any) -> Any:
    """Compute an operator; code where a value is not known, or the result is too large."""
    if function is None or not all(is_known(each) for each in values):
        return Code(node)
    if _is_too_much(function, values):
        return Code(node)
    try:
        made = function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return Code(node)
    return made if is_known(made) else Code(node)


def _size(value: Any) -> float:
    if isinstance(value, int | float):
        return abs(value)
    return len(value) if isinstance(value, str | list) else 0


def _is_too_much(function: Callable[..., Any], values: tuple[Any, ...]) -> bool:
    sizes = [_size(each) for each in values]
    is_large = any(size > LARGEST for size in sizes)
    has_sequence = any(isinstance(each, str | list) for each in values)
    is_long = has_sequence and (sum(sizes) > LONGEST or (function is operator.mul and sizes[0] * sizes[1] > LONGEST))
    if function is operator.pow and (len(sizes) < 2 or sizes[1] > 64 or sizes[0] > 1e6):
        return True
    is_format = function is operator.mod and isinstance(values[0], str)
    return is_large or is_long or is_format
