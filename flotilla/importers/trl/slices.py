"""The part of a script that a function or an expression needs, as source of its own. Nothing is run."""

import ast
import builtins
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flotilla.importers.trl.calls import OF_COMMAND_LINE
from flotilla.importers.trl.written import Called, is_known

NOT_NEEDED: Final = frozenset({"push_to_hub", "save_to_disk", "to_json", "to_csv", "to_parquet", "train", "save_model"})
"""Methods that change nothing of what they are called on."""
UNKNOWN: Final = "_unknown_"
"""Begins the name that stands in a slice for an argument of the command line that is not known."""
BUILT_IN: Final = frozenset(dir(builtins)) | {"__name__", "__file__"}


class CannotSlice(Exception):
    """Why what is needed cannot be taken out of a script."""


def slice_for(
    wanted: Iterable[str | ast.expr],
    statements: Sequence[ast.stmt],
    known: Mapping[str, Any],
    forbidden: frozenset[str],
) -> str:
    """Write the statements that names or expressions need, in the script's order.

    Args:
        wanted: names and expressions.
        statements: that the script runs, without those whose place they took.
        known: values of names; attributes of what is called are replaced by them.
        forbidden: names of trainers and their configurations, which no part of a slice may mention.

    Raises:
        CannotSlice: it needs what is forbidden, or a name that nothing sets.
    """
    statements = [_Attributes(known).visit(each) for each in map(_copy, statements)]
    needed: set[str] = set()
    for each in wanted:
        needed |= {each} if isinstance(each, str) else free_names(_Attributes(known).visit(_copy(each)))
    chosen: set[int] = set()
    found: set[str] = set()
    grows = True
    while grows:
        grows = False
        for number, statement in enumerate(statements):
            if number not in chosen and bound_names(statement) & needed:
                chosen.add(number)
                found |= bound_names(statement)
                needed |= free_names(statement)
                grows = True
    parts = [ast.unparse(statements[number]) for number in sorted(chosen)]
    made = "\n\n".join(parts)
    asked = sorted(each.removeprefix(UNKNOWN) for each in needed if each.startswith(UNKNOWN))
    if asked:
        raise CannotSlice(f"it needs an argument of the command line: give {asked[0]}=VALUE")
    used = {node.id for number in chosen for node in ast.walk(statements[number]) if isinstance(node, ast.Name)}
    if used & forbidden:
        raise CannotSlice(f"it needs {sorted(used & forbidden)[0]}, which belongs to the trainer")
    missing = sorted(needed - found - BUILT_IN)
    if missing:
        raise CannotSlice(f"it needs {missing[0]}, which only a run of the script knows")
    return made


def _copy(node: Any) -> Any:
    return (
        ast.parse(ast.unparse(node), mode="eval").body
        if isinstance(node, ast.expr)
        else ast.parse(ast.unparse(node)).body[0]
    )


def bound_names(statement: ast.stmt) -> set[str]:
    """List the names that a statement sets or changes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).partition(".")[0] for each in statement.names}
    if isinstance(statement, ast.Expr):
        method = statement.value.func if isinstance(statement.value, ast.Call) else None
        is_change = isinstance(method, ast.Attribute) and method.attr not in NOT_NEEDED
        return {root} if method is not None and is_change and (root := _root(method)) else set()
    return _bound_within(statement)


def _bound_within(statement: ast.stmt) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if (
            isinstance(node, ast.Attribute | ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and (root := _root(node))
        ):
            found.add(root)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= bound_names(node)
    return found


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def free_names(node: ast.AST) -> set[str]:
    """List the names that a statement or expression reads and does not set itself."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = node.args
        own = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        own |= {each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None}
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        inside = set().union(*(free_names(each) for each in body)) - own - _stored(body)
        outside = [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        return inside.union(*(free_names(each) for each in (*outside, *decorators)))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        inner = set().union(*(free_names(each) for each in ast.iter_child_nodes(node)))
        return inner - _stored([node])
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    found = set().union(*(free_names(each) for each in ast.iter_child_nodes(node)))
    return found - _stored(node.body) if isinstance(node, ast.ClassDef) else found


def _stored(nodes: Sequence[ast.AST]) -> set[str]:
    found: set[str] = set()
    for each in nodes:
        for node in ast.walk(each):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= bound_names(node)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
    return found


class _Attributes(ast.NodeTransformer):
    """Replaces attributes of configurations, and of parsed arguments, by their values."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace one of a known call."""
        owner = self._known.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(owner, Called) and isinstance(node.ctx, ast.Load):
            value = owner.keywords.get(node.attr, OF_COMMAND_LINE.get(owner.name, {}).get(node.attr, owner))
            if is_known(value):
                return ast.parse(repr(value), mode="eval").body
            if owner.name in OF_COMMAND_LINE:
                return ast.Name(f"{UNKNOWN}{node.attr}", ast.Load())
        return self.generic_visit(node)
