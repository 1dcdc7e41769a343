"""A Python script followed as far as it is known before it runs: nothing of it is executed.

Statements are taken in order: assignments, ``if`` over known values, bodies of ``with`` and ``try``, and the script's
own functions where they make a trainer or its configuration. What depends on more than that stays code. Operators over
known values are bounded: a script's arithmetic is somebody else's.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from flotilla.importers.hydra import problem
from flotilla.importers.trl.calls import Calls
from flotilla.importers.trl.written import Called, Code, is_known

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


TRAINERS: Final = frozenset({
    "GRPOTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "RLOOTrainer", "KTOTrainer", "PPOTrainer",
    "OnlineDPOTrainer", "GKDTrainer", "ORPOTrainer", "CPOTrainer", "BCOTrainer", "NashMDTrainer", "XPOTrainer",
    "PRMTrainer", "AsyncGRPOTrainer", "DistillationTrainer",
})  # fmt: skip
CONFIGS: Final = frozenset(name.removesuffix("Trainer") + "Config" for name in TRAINERS) | {"TrainingArguments"}
ENTERED: Final = TRAINERS | CONFIGS | {"ArgumentParser", "HfArgumentParser", "TrlParser", "parse_args"}
"""What a function of the script's mentions whose body is followed."""
MAX_DEPTH: Final = 12
MAX_STATEMENTS: Final = 20_000


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Script:
    """Follows one script.

    Args:
        text: of the script.
        fixed: values from the command line, by name.
        environment: what the script would find there.
        source: the file's name.

    Raises:
        InvalidSpec: it is no Python, or too much of it.
    """

    def __init__(self, text: str, fixed: Mapping[str, Any], environment: Mapping[str, str], *, source: str) -> None:
        try:
            self._tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise problem(source, source, f"it is no Python: {getattr(error, 'msg', error)}, line {line}") from None
        self._source = source
        self._scopes: list[dict[str, Any]] = [{"__name__": "__main__"}]
        self._functions: dict[str, ast.FunctionDef] = {}
        self._ended: dict[str, Any] = {}
        self._fixed = fixed
        self._depth = self._count = 0
        self.calls = Calls(self._value, fixed, environment)
        self.trainers: list[Called] = []
        self.statements: list[ast.stmt] = []
        try:
            self._follow(self._tree.body)
        except RecursionError:
            raise problem(source, source, "it is nested too deeply") from None

    @property
    def names(self) -> Mapping[str, Any]:
        """The values of names at the end."""
        return self._scopes[0] | self._ended

    def makes(self, node: ast.AST) -> bool:
        """Whether code makes a trainer or its configuration, by itself or through the script's functions."""
        return any(each in TRAINERS | CONFIGS for each in self._mentioned(node, set()))

    def _mentioned(self, node: ast.AST, seen: set[str]) -> Iterator[str]:
        for each in ast.walk(node):
            name = each.id if isinstance(each, ast.Name) else each.attr if isinstance(each, ast.Attribute) else None
            if name is None or name in seen:
                continue
            yield name
            if name in self._functions and name not in seen:
                seen.add(name)
                yield from self._mentioned(self._functions[name], seen)

    # statements

    def _follow(self, body: Sequence[ast.stmt]) -> None:
        for each in body:
            if isinstance(each, ast.FunctionDef):
                self._functions[each.name] = each
        for each in body:
            self._count += 1
            if self._count > MAX_STATEMENTS:
                raise problem(self._source, self._source, f"a script has {MAX_STATEMENTS} statements at most")
            self._step(each)

    def _step(self, node: ast.stmt) -> None:
        match node:
            case ast.If():
                self._branch(node)
                return
            case ast.With() | ast.AsyncWith():
                self._follow(node.body)
                return
            case ast.Try():
                self._follow([*node.body, *node.orelse, *node.finalbody])
                return
            case ast.Return():
                raise _Returned(None if node.value is None else self._value(node.value))
        self.statements.append(node)
        self._take(node)

    def _take(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                value = self._value(node.value)
                for target in node.targets:
                    self._assign(target, value, node.value)
            case ast.AnnAssign(value=ast.expr() as written):
                self._assign(node.target, self._value(written), written)
            case ast.AugAssign():
                both = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
                self._assign(node.target, self._value(ast.fix_missing_locations(both)), node.value)
            case ast.Expr():
                self._value(node.value)
            case ast.Import() | ast.ImportFrom():
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                for each in node.names:
                    self.calls.imported[each.asname or each.name] = f"{module}.{each.name}".lstrip(".")
            case ast.For() | ast.While():
                self._loop(node)
            case ast.ClassDef():
                self.calls.classes[node.name] = node

    def _branch(self, node: ast.If) -> None:
        test = self._value(node.test)
        if is_known(test):
            self._follow(node.body if test else node.orelse)
            return
        if self.makes(node) and not node.orelse:
            self._follow(node.body)
            return
        self.statements.append(node)
        self._forget(node, node.test)

    def _loop(self, node: ast.For | ast.While) -> None:
        if any(name in TRAINERS for name in self._mentioned(node, set())):
            raise problem(self._source, f"line {node.lineno}", "a loop makes trainers: give a script with one of them")
        self._forget(node, node.iter if isinstance(node, ast.For) else node.test)

    def _forget(self, node: ast.stmt, why: ast.expr) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self._scopes[-1][each.id] = Code(
                    ast.copy_location(ast.Name(each.id, ast.Load()), each), f"it depends on {ast.unparse(why)}"
                )
            if isinstance(each, ast.FunctionDef):
                self._functions[each.name] = each

    def _name(self, name: str, value: Any, node: ast.expr) -> None:
        if name in self._fixed and isinstance(value, Code):
            value = self._fixed[name]
            self.calls.asked.add(name)
        if isinstance(value, Code) and not value.why:
            value = Code(ast.copy_location(ast.Name(name, ast.Load()), node))
        self._scopes[-1][name] = value

    def _assign(self, target: ast.expr, value: Any, node: ast.expr) -> None:
        match target:
            case ast.Name():
                self._name(target.id, value, node)
            case ast.Tuple() | ast.List():
                if isinstance(value, Called) and value.name == "from_pretrained":  # unsloth's: model and tokenizer
                    value = [value] * len(target.elts)
                is_split = isinstance(value, list | tuple) and len(value) == len(target.elts)
                for number, each in enumerate(target.elts):
                    self._assign(each, value[number] if is_split else Code(node), node)
            case ast.Attribute():
                owner = self._value(target.value)
                if isinstance(owner, Called):
                    owner.keywords[target.attr] = value
            case ast.Subscript():
                owner, key = self._value(target.value), self._value(target.slice)
                if isinstance(owner, dict) and isinstance(key, str | int):
                    owner[key] = value

    # expressions

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._named(node)
            case ast.List() | ast.Tuple():
                return self._items(node)
            case ast.Dict():
                return self._mapping(node)
            case ast.JoinedStr():
                return self._joined(node)
            case ast.Call():
                return self._call(node)
            case ast.Attribute():
                return self.calls.attribute(node, self._value(node.value))
            case ast.Subscript():
                return self.calls.item(node, self._value(node.value), self._value(node.slice))
            case ast.Slice():
                parts = [None if each is None else self._value(each) for each in (node.lower, node.upper, node.step)]
                return (
                    slice(*parts)
                    if all(each is None or isinstance(each, int) for each in parts)
                    else Code(ast.Name("slice"))
                )
        return self._computed(node)

    def _computed(self, node: ast.expr) -> Any:
        match node:
            case ast.UnaryOp():
                return apply(node, ARITHMETIC.get(type(node.op)), self._value(node.operand))
            case ast.BinOp():
                return apply(node, ARITHMETIC.get(type(node.op)), self._value(node.left), self._value(node.right))
            case ast.Compare(ops=[op]):
                return apply(node, COMPARISONS.get(type(op)), self._value(node.left), self._value(node.comparators[0]))
            case ast.BoolOp():
                for each in node.values:
                    value = self._value(each)
                    if not is_known(value) or bool(value) == isinstance(node.op, ast.Or):
                        break
                return value if is_known(value) else Code(node)
            case ast.IfExp():
                test = self._value(node.test)
                return self._value(node.body if test else node.orelse) if is_known(test) else Code(node)
        return Code(node)

    def _named(self, node: ast.Name) -> Any:
        for scope in reversed(self._scopes):
            if node.id in scope:
                return scope[node.id]
        return Code(node)

    def _items(self, node: ast.List | ast.Tuple) -> Any:
        made: list[Any] = []
        for each in node.elts:
            value = self._value(each.value if isinstance(each, ast.Starred) else each)
            if isinstance(each, ast.Starred):
                if not isinstance(value, list | tuple):
                    return Code(node)
                made += value
            else:
                made.append(value)
        return made

    def _mapping(self, node: ast.Dict) -> Any:
        made: dict[Any, Any] = {}
        for key, each in zip(node.keys, node.values, strict=True):
            value = self._value(each)
            name = value if key is None else self._value(key)
            if key is None and isinstance(value, dict):
                made |= value
            elif key is not None and isinstance(name, str | int | float):
                made[name] = value
            else:
                return Code(node)
        return made

    def _joined(self, node: ast.JoinedStr) -> Any:
        parts: list[str] = []
        for each in node.values:
            value = self._value(each.value) if isinstance(each, ast.FormattedValue) else self._value(each)
            is_plain = not isinstance(each, ast.FormattedValue) or (each.format_spec is None and each.conversion == -1)
            if not is_plain or not isinstance(value, str | int | float):
                return Code(node)
            parts.append(str(value))
        made = "".join(parts)
        return made if len(made) <= LONGEST else Code(node)

    def _call(self, node: ast.Call) -> Any:
        own = self._functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if own is not None and any(name in ENTERED for name in self._mentioned(own, set())):
            return self._enter(own, node)
        positional = [self._value(each) for each in node.args]
        keywords: dict[str, Any] = {}
        unread: Code | None = None
        for each in node.keywords:
            value = self._value(each.value)
            if each.arg is not None:
                keywords[each.arg] = value
            elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
                keywords |= value
            else:
                unread = Code(each.value)
        called = Called(self.calls.name_of(node.func), node, positional, keywords, unread)
        if called.name in TRAINERS:
            self.trainers.append(called)
            return called
        return called if called.name in CONFIGS else self.calls.result(called, node)

    def _enter(self, function: ast.FunctionDef, node: ast.Call) -> Any:
        if self._depth >= MAX_DEPTH:
            return Code(node)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        scope = dict(zip(reversed(names), map(self._value, reversed(function.args.defaults)), strict=False))
        for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if default is not None:
                scope[each.arg] = self._value(default)
        scope |= dict(zip(names, map(self._value, node.args), strict=False))
        scope |= {each.arg: self._value(each.value) for each in node.keywords if each.arg is not None}
        self._scopes.append(scope)
        self._depth += 1
        try:
            self._follow(function.body)
        except _Returned as returned:
            return returned.value
        finally:
            self._depth -= 1
            self._ended = self._ended | self._scopes.pop()
        return None


def _loaded(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body
