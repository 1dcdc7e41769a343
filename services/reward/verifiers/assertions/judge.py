"""The judge of a label's statements in the sandbox, where nothing of the answer is but the data it replied.

Each name that the label does not define is a stand-in, and what is done with a stand-in is a *request* to the answer's
program. The statements run from the start each time, with the replies so far. At the first request without a reply
the run becomes a *rehearsal*: it continues as if each assertion held, only to collect the requests that come next.

``stdin`` is ``{"statements": text, "replies": [[request, line of the answer's program], ...]}``.
"""

import ast
import base64
import builtins
import collections
import copy
import decimal
import fractions
import importlib
import json
import marshal
import math
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from flotilla.services.reward.verifiers.assertions.plain_data import Wire, pack, unpack, write_line

JUDGES_FUNCTIONS = {"abs", "all", "any", "getattr", "hasattr", "isinstance", "len", "print", "repr", "round", "sorted"}
"""Built-in functions that a label compares with. Of a label that names built-in names alone, another one is tested."""
KNOWN = {
    "isclose": math.isclose,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
    "deepcopy": copy.deepcopy,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
}
"""What labels use without an import, for the program under test has it."""
CONTAINERS = (list, bytearray, dict, set, collections.deque, collections.OrderedDict, collections.Counter)
MODULES = {"np": "numpy", "pd": "pandas"}
MOST_REQUESTS = 10_000


class CannotJudge(Exception):
    """The label does what a judge in another process cannot follow."""


class Malformed(BaseException):
    """The answer's program wrote what is no reply."""


class Rehearsed(BaseException):
    """A rehearsal needs a value that is not known yet."""


class StandIn:
    """Something of the answer's that is not here. What is done with it is asked of the answer."""

    __slots__ = ("_judge", "_wire")

    def __init__(self, judge: "Judge", wire: Wire) -> None:
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_wire", wire)

    def __getattr__(self, name: str) -> Any:
        if name in UNANSWERED and not self._judge.is_rehearsing:
            raise AttributeError(name)
        return self._judge.ask(["name", "builtins", "getattr"], (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._judge.ask(["name", "builtins", "setattr"], (self, name, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._judge.ask(self._wire, args, kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return self._judge.ask(["name", "builtins", "isinstance"], (value, self), {}) is True

    def __iter__(self) -> Any:
        return self._judge.ask(["name", "builtins", "iter"], (self,), {})

    # The answer's classes are not asked what is equal: they would be their own judge.
    def __eq__(self, other: object) -> bool:
        return self._judge.is_rehearsing or (isinstance(other, StandIn) and other._wire == self._wire)

    def __ne__(self, other: object) -> bool:
        return self._judge.is_rehearsing or not self == other

    def __bool__(self) -> bool:
        if self._judge.is_rehearsing:
            return True
        return self._judge.ask(["name", "builtins", "bool"], (self,), {}) is True

    def __hash__(self) -> int:
        return hash(json.dumps(self._wire))


UNANSWERED = {"__index__", "__length_hint__", "__array__", "__array_interface__", "__array_struct__"} | {
    name for kind in (str, set, int, float) for name in dir(kind) if name.startswith(("is", "startswith", "endswith"))
}
"""Methods that are not called on an object where plain data was expected: it could claim to equal the label."""
BETWEEN = ("add", "and_", "floordiv", "matmul", "mod", "mul", "or_", "pow", "sub", "truediv", "xor")
"""Operators between two objects of the answer's. With plain data on a side the answer would learn what is expected."""
OPERATORS = ("delitem", "getitem", "invert", "neg", "pos", "setitem")
TYPED = {"len": int, "str": str, "repr": str, "int": int, "float": float}
"""Built-in functions that ask a method of their argument, and the type that Python wants of what it returns."""
UNTYPED = ("abs", "next", "reversed", "round")


def method(reference: Wire, kind: "type | None" = None, *, is_between: bool = False) -> Callable[..., Any]:
    """Make the method of a stand-in that asks a function of the answer."""

    def ask(self: StandIn, *args: Any) -> Any:
        if is_between and type(args[0]) is not StandIn:
            return NotImplemented
        found = self._judge.ask(reference, (self, *args), {})
        if kind is not None and type(found) is not kind:
            raise self._judge.unknown(f"{reference[2]} of it is no {kind.__name__}")
        return found

    return ask


for _name in OPERATORS:
    setattr(StandIn, f"__{_name}__", method(["name", "operator", _name]))
for _name in BETWEEN:
    setattr(StandIn, f"__{_name.rstrip('_')}__", method(["name", "operator", _name], is_between=True))
for _name in (*TYPED, *UNTYPED):
    setattr(StandIn, f"__{_name}__", method(["name", "builtins", _name], TYPED.get(_name)))


class AnswerError(Exception):
    """An exception of a class that the answer has defined."""


class Judge:
    """Runs a label's statements against replies.

    Args:
        replies: request and line of the answer's program each, as far as they are known.
    """

    def __init__(self, replies: list[list[Wire]]) -> None:
        self._replies = replies
        self.requests: list[Wire] = []
        self.is_rehearsing = False
        self.problem: str | None = None

    def ask(self, function: Wire, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the answer replied; a stand-in for it if it has not yet."""
        try:
            request = [
                function,
                [pack(each, self.refer) for each in args],
                {name: pack(each, self.refer) for name, each in kwargs.items()},
            ]
        except CannotJudge as error:
            # What the label gives to a name of its own choice is its affair; elsewhere it may be the answer's doing.
            if function[0] == "global":
                self.problem = self.problem or str(error)
                raise
            raise self.unknown(str(error)) from error
        number = len(self.requests)
        if number >= MOST_REQUESTS:
            raise self.unknown(f"more than {MOST_REQUESTS} requests")
        self.requests.append(request)
        if self.is_rehearsing or number >= len(self._replies) or self._replies[number][0] != request:
            self.is_rehearsing = True
            if function[0] == "name" and function[2] not in ("getattr", "setattr"):
                raise Rehearsed
            return StandIn(self, ["ref", number, 0])
        reply = self._read(self._replies[number][1])
        if isinstance(reply, Exception):
            raise reply
        value, after = reply
        for old, new in zip(args, after):  # noqa: B905  strict is newer than a sandbox's Python may be
            restore(old, new)
        return value

    def _read(self, line: str) -> Any:
        """Read a line of the answer's program: an exception, or a value and the arguments."""
        try:
            reply = json.loads(line)
            if len(reply) == 3 and reply[0] == "raises":
                return exception_named(reply[1], reply[2])
            value, after = reply
            return unpack(value, self._resolve), [unpack(each, self._resolve) for each in after]
        except Exception as error:  # the answer may write anything
            raise Malformed from error

    def unknown(self, reason: str) -> BaseException:
        """Make the exception for a value that has the wrong type, or is not there yet."""
        return Rehearsed() if self.is_rehearsing else TypeError(reason)

    def _resolve(self, wire: list[Any]) -> Any:
        kind, number, part = wire
        if kind != "ref" or type(number) is not int or type(part) is not int:
            raise ValueError(kind)
        return StandIn(self, ["ref", number, part])

    def refer(self, value: Any) -> Wire:
        """Name an argument that is no plain data."""
        if type(value) is StandIn:
            return value._wire
        if type(value) is types.FunctionType and type(value.__globals__) is Names:
            if value.__closure__ or value.__kwdefaults__:
                raise CannotJudge(f"it gives the program a function that refers to variables around it: {value!r}")
            defaults = [pack(each, self.refer) for each in value.__defaults__ or ()]
            return ["code", base64.b64encode(marshal.dumps(value.__code__)).decode(), defaults]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str) and "<" not in name and module in sys.modules:
            found: Any = sys.modules[module]
            if all((found := getattr(found, part, None)) is not None for part in name.split(".")) and found is value:
                return ["name", module, name]
        if type(value) is types.ModuleType:
            raise CannotJudge("it gives the program a module")
        raise CannotJudge(f"it gives the program an object of its own, a {type(value).__name__}; use plain data")


def exception_named(name: object, message: object) -> Exception:
    """Make a built-in exception, or one for a class that only the answer knows."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(message))
        except TypeError:  # UnicodeDecodeError and such take more
            pass
    return AnswerError(f"{name}: {message}")


def restore(old: Any, new: Any) -> None:
    """Change an argument in place as the answer has changed it."""
    if type(old) is not type(new):
        return
    if type(old) in (list, bytearray):
        if len(old) == len(new):
            for index, (each, changed) in enumerate(zip(old, new)):  # noqa: B905
                restore(each, changed)
                if type(each) not in CONTAINERS or type(each) is not type(changed):
                    old[index] = changed
        else:
            old[:] = new
    elif type(old) in CONTAINERS:
        old.clear()
        (old.extend if type(old) is collections.deque else old.update)(new)


class Names(dict[str, Any]):
    """Global names of the label's statements. One that they do not define is the answer's, but for the judge's own."""

    def __init__(self, judge: Judge, tree: ast.Module) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self.update(__rehearsing__=lambda: judge.is_rehearsing, __any__=BaseException)
        self._judge = judge
        self._own = own_names(tree)
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._called = {node.id for node in calls if isinstance(node, ast.Name)}

    def __missing__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        found = StandIn(self._judge, ["global", name])
        return found if name in self._called else self._judge.ask(["value"], (found,), {})


def own_names(tree: ast.Module) -> dict[str, Any]:
    """Find what the names mean that a label uses without defining them, as far as they are not the answer's.

    A name that is built in is Python's own, whatever the answer calls so, unless the label has no other name.
    """
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    with_a_dot = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in names if id(node) not in with_a_dot}
    loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound_names(nodes)
    own: dict[str, Any] = {}
    for name in sorted(loaded):
        own |= meaning_of(name, may_be_module=name not in bare)
    if loaded and own.keys() >= loaded:
        compares = {name for name in own if name in JUDGES_FUNCTIONS or isinstance(own[name], (type, types.ModuleType))}
        for name in loaded - compares or loaded:
            del own[name]
    return own


def meaning_of(name: str, *, may_be_module: bool) -> dict[str, Any]:
    """Find what a name means by itself; empty if it means nothing."""
    if hasattr(builtins, name):
        return {name: getattr(builtins, name)}
    if name in KNOWN:
        return {name: KNOWN[name]}
    if may_be_module and (name in MODULES or name in getattr(sys, "stdlib_module_names", ())):
        return {name: importlib.import_module(MODULES.get(name, name))}
    return {}


def bound_names(nodes: list[ast.AST]) -> set[str]:
    """List the names that statements define, anywhere in them."""
    bound: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


class Rehearsing(ast.NodeTransformer):
    """Has an assertion pass in a rehearsal, whatever comes of it: the requests behind it are wanted too."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        handler = ast.parse("try:\n pass\nexcept __any__:\n if not __rehearsing__(): raise").body[0]
        assert isinstance(handler, ast.Try)
        handler.body = [node]
        return ast.fix_missing_locations(ast.copy_location(handler, node))


def judge(statements: str, replies: list[list[Wire]]) -> dict[str, Any]:
    """Run a label's statements.

    Returns:
        ``passed``: whether all assertions hold; or ``requests``: all requests up to here, of which the last have no
        reply yet; or ``cannot``: why the label cannot be judged.
    """
    try:
        tree = ast.parse(statements)
        judging = Judge(replies)
        names = Names(judging, tree)
        code = compile(Rehearsing().visit(tree), "label.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ImportError) as error:
        return {"cannot": f"{type(error).__name__}: {error}"[:400]}
    passed = False
    try:
        exec(code, names)  # noqa: S102  to run it is the point
        passed = True
    except ModuleNotFoundError as error:
        if error.name is not None:  # the answer's has none
            judging.problem = f"ModuleNotFoundError: {error}"
    except BaseException:  # noqa: S110  of whatever kind, SystemExit too: the assertions were not passed
        pass
    if judging.problem is not None:
        return {"cannot": judging.problem[:400]}
    return {"requests": judging.requests} if judging.is_rehearsing else {"passed": passed}


def main() -> None:
    """Judge what ``stdin`` says."""
    given = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    write_line(out, judge(given["statements"], given["replies"]))
    os._exit(0)


if __name__ == "__main__":
    main()
