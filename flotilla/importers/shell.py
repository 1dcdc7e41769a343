"""Read a launch script: assignments, and the words of its commands after expansion. Nothing is run.

A condition on values that are known is followed. What would need running the script (other conditions, loops,
``$(...)``) makes a value unknown, which is refused, with its line, where a parameter uses it.
"""

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from flotilla.importers.hydra import problem
from flotilla.importers.shell_flow import Chain, Flow
from flotilla.importers.shell_words import ASSIGNMENT, atom, commands, matching
from flotilla.shared.errors import InvalidSpec

NAME = re.compile(r"[A-Za-z_]\w*")
ARGUMENTS = "@"
"""Stands for the script's own arguments among what is not known."""
HARMLESS = re.compile(r"(?:activate|bashrc|profile|conda\.sh|set_env\.sh|setvars\.sh)$")
"""Files that set up a machine's own environment, and no variable of a launch script."""
QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|\$\{[^{}]*\}", re.DOTALL)
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
CONTROL = frozenset({"function", "[", "[[", "test", "eval"})
UNCERTAIN = "whether this runs is not known, the condition is no comparison of known values: give the final value"
DEPENDS = "whether this runs depends on `{}`, which is not known here: give NAME=VALUE for it, or the final value"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
             ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv}  # fmt: skip
MAX_EXPANSION = 100_000
NOTHING: Mapping[str, str] = MappingProxyType({})
HERE: Mapping[str, str] = MappingProxyType({"HOME": "~", "PWD": "."})
"""Folders of the machine that trains, as a spec writes them."""
PRINTS_HERE = re.compile(r"\$\(\s*pwd\s*\)|`\s*pwd\s*`")


Element = tuple[str, InvalidSpec | None]
"""A word, and why it is not known."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script.

    Attributes:
        words: after expansion; as written where that is not known.
        problem: why some of them, or whether it runs at all, is not known.
        unknown: why each word that is not known is not, by its number; empty where that is all of them.
    """

    words: list[str]
    problem: InvalidSpec | None = None
    unknown: Mapping[int, InvalidSpec] = field(default_factory=dict)


@dataclass(slots=True)
class Script:
    """What a script says.

    Attributes:
        variables: final values of what it assigns.
        environment: values of names that it does not assign, from where it is started.
        arrays: of what it assigns lists to; an element that is not known is kept as it is written, with the reason.
        unknown: why the value of a name is not known; said when something uses it.
        commands: those that run, or may.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Element]] = field(default_factory=dict)
    unknown: dict[str, InvalidSpec] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)


def read_script(
    text: str, fixed: Mapping[str, str], *, source: str, environment: Mapping[str, str] = NOTHING
) -> Script:
    """Read a script.

    Args:
        text: the script.
        fixed: variables given from outside, which its own assignments do not change.
        source: its name, for messages.
        environment: variables that it finds where it is started; HOME and PWD are those of the machine that trains,
            and stay ``~`` and ``.``.

    Raises:
        InvalidSpec: it holds what cannot be followed; ``errors`` has the line.
    """
    script, flow, chain = Script(dict(fixed), environment=environment), Flow(), Chain()
    for number, words in commands(text, source):
        where = f"{source}:{number}"
        rest = flow.step(words, lambda word, where=where: _unquoted(word, script, where), where)  # type: ignore[misc]
        is_certain = chain.step(words, rest) and bool(flow.runs)
        if rest and flow.runs is not False:
            if rest[0] == "exit" and is_certain:
                return script
            doubt = None if is_certain else UNCERTAIN if flow.doubt is None else DEPENDS.format(flow.doubt)
            _run(rest, script, fixed, where, doubt)
    if flow.frames:
        raise problem(source, flow.frames[-1].opening, "a condition or loop needs its end")
    return script


def given_variables(pairs: Sequence[str], text: str, *, source: str) -> dict[str, str]:
    """Find the variables of a script among ``KEY=VALUE`` of our command line: those without a dot.

    Raises:
        InvalidSpec: the script has no variable of that name.
    """
    split = (pair.partition("=") for pair in pairs)
    fixed = {name: value for name, equals, value in split if equals and NAME.fullmatch(name)}
    for name, value in fixed.items():
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise problem(name, value, f"{source} uses no variable of this name")
    return fixed


def _run(words: list[str], script: Script, fixed: Mapping[str, str], where: str, doubt: str | None) -> None:
    if words[0] in {"export", "declare", "local", "readonly"}:
        words = [word for word in words[1:] if not word.startswith("-")]
        if not all(ASSIGNMENT.match(word) for word in words):
            words = [word for word in words if ASSIGNMENT.match(word)]
    words, assigned = _split(words)
    for match, word in [] if words else assigned:  # before a command they are that command's alone
        name = match[1]
        if name in fixed:
            continue
        try:
            if doubt and not _may_append(match, word, script, where, doubt):
                raise problem(where, word, doubt)
            if not doubt:
                _assign(match, word, script, where)
                script.unknown.pop(name, None)
        except InvalidSpec as error:
            script.unknown[name] = error
    if not words:
        return
    if words[0] in CONTROL:
        raise problem(where, words[0], "this part of a script is not followed: give the final values")
    if words[0] == "read" and len(words) >= 3 and words[-2] == "<<":
        name, body = words[-3], words[-1]
        try:
            script.variables[name] = _expand(body, script, where, is_quoted=True)
        except InvalidSpec as error:
            script.unknown[name] = error
        return
    _change(words, script, fixed, where, doubt)
    if words[0] in {"cd", "pushd"} and not words[-1].startswith("$("):
        script.unknown["PWD"] = problem(where, " ".join(words), "where this leads is not followed: write the path")
    if doubt:
        script.commands.append(Command(words, problem(where, words[0], doubt)))
        return
    script.commands.append(_expanded(words, script, where))


def _split(words: Sequence[str]) -> tuple[list[str], list[tuple["re.Match[str]", str]]]:
    """Split off the assignments in front of a command."""
    assigned: list[tuple[re.Match[str], str]] = []
    for number, word in enumerate(words):
        if (match := ASSIGNMENT.match(word)) is None:
            return list(words[number:]), assigned
        assigned.append((match, word))
    return [], assigned


def _change(words: Sequence[str], script: Script, fixed: Mapping[str, str], where: str, doubt: str | None) -> None:
    """Do what a command does to variables: unset, set --, shift, and what a file that is sourced may do."""
    head, rest = words[0], [word for word in words[1:] if not word.startswith("-")]
    if head == "unset":
        for name in set(rest) - set(fixed):
            if doubt:
                script.unknown[name] = problem(where, name, doubt)
                continue
            script.variables.pop(name, None)
            script.arrays.pop(name, None)
            script.unknown.pop(name, None)
            script.environment = {key: value for key, value in script.environment.items() if key != name}
    elif head == "shift" or (head == "set" and "--" in words):
        script.unknown[ARGUMENTS] = problem(
            where, " ".join(words), "the script's arguments change here: write the value"
        )
    elif head in {"source", "."} and rest and not HARMLESS.search(rest[0]):
        why = problem(where, " ".join(words), f"{rest[0]} may have set it to another value: write the value")
        script.unknown |= dict.fromkeys({*script.variables, *script.arrays} - set(fixed), why)


def _expanded(words: Sequence[str], script: Script, where: str) -> Command:
    found: list[str] = []
    unknown: dict[int, InvalidSpec] = {}
    for each, error in (element for word in words for element in _elements_of(word, script, where)):
        if error is not None:
            unknown[len(found)] = error
        found.append(each)
    return Command(found, next(iter(unknown.values()), None), unknown)


def _elements_of(word: str, script: Script, where: str) -> list[Element]:
    """Return the words that one becomes; one that is not known as it is written."""
    try:
        array = ARRAY.fullmatch(word.strip('"'))
        if array is None:
            return [(each, None) for each in _words_of(word, script, where)]
        if array[1] in script.unknown:
            raise script.unknown[array[1]]
        return list(script.arrays.get(array[1], []))
    except InvalidSpec as error:
        return [(word, error)]


def _may_append(match: "re.Match[str]", word: str, script: Script, where: str, doubt: str) -> bool:
    """Append to a list what perhaps is appended: only that is not known then. Says whether it was such."""
    name, right = match[1], word[match.end() :]
    if not match[2] or not right.startswith("(") or name in script.unknown:
        return False
    items = [each for _, line in commands(right[1:-1], where) for each in line]
    perhaps = [(item, problem(where, item, doubt)) for item in items]
    script.arrays[name] = [*script.arrays.get(name, []), *perhaps]
    return True


def _assign(match: "re.Match[str]", word: str, script: Script, where: str) -> None:
    name, right = match[1], word[match.end() :]
    if match[2] and name in script.unknown:
        raise script.unknown[name]
    if right.startswith("(") and right.endswith(")"):
        items = [each for _, line in commands(right[1:-1], where) for each in line]
        values = [each for item in items for each in _elements_of(item, script, where)]
        script.arrays[name] = [*script.arrays.get(name, []), *values] if match[2] else values
        return
    value = _unquoted(right, script, where)
    script.variables[name] = script.variables.get(name, "") + value if match[2] else value


def _words_of(word: str, script: Script, where: str) -> list[str]:
    bare = word.strip('"')
    if bare in {"$@", "$*", "${@}"}:
        if ARGUMENTS in script.unknown:
            raise script.unknown[ARGUMENTS]
        return []
    if BRACES.search(QUOTED.sub("", word)):
        raise problem(where, word, "braces become several words here: write them, or put quotes around them")
    value = _unquoted(word, script, where)
    is_plain_variable = word.startswith("$") and not word.startswith("$((")
    return value.split() if is_plain_variable else [value]


def _unquoted(word: str, script: Script, where: str) -> str:
    """Take the quotes off, expanding what is not within single ones."""
    parts: list[str] = []
    plain: list[str] = []
    position, quote = 0, ""

    def flush() -> None:
        if plain:
            parts.append(_expand("".join(plain), script, where, is_quoted=quote == '"'))
            plain.clear()

    while position < len(word):
        letter = word[position]
        if letter == "\\" and quote != "'" and position + 1 < len(word):
            flush()
            parts.append(word[position + 1])
            position += 2
            continue
        if letter == "$" and quote != "'" and word[position + 1 : position + 2] in {"{", "("}:
            end = atom(word, position, where, in_assignment=False)  # quotes within belong to it
            plain.append(word[position:end])
            position = end
            continue
        if (not quote and letter in "'\"") or letter == quote:
            flush()
            quote = "" if quote else letter
        elif quote == "'":
            parts.append(letter)
        else:
            plain.append(letter)
        position += 1
    flush()
    value = "".join(parts)
    if len(value) > MAX_EXPANSION:
        raise problem(where, word, "the value grows too long")
    return value


def _expand(text: str, script: Script, where: str, *, is_quoted: bool) -> str:
    parts: list[str] = []
    position = 0
    text = PRINTS_HERE.sub("${PWD}", text)
    while position < len(text):
        if text[position] == "`":
            raise problem(
                where,
                text,
                "what a command prints is not known here: write the value, or give a variable as NAME=VALUE",
            )
        if text[position] != "$" or position + 1 == len(text):
            parts.append(text[position])
            position += 1
            continue
        value, position = _expansion(text, position, script, where)
        parts.append(value)
    return "".join(parts)


def _expansion(text: str, start: int, script: Script, where: str) -> tuple[str, int]:
    if text.startswith("$((", start):
        end = matching(text, start + 1, "(", ")", where)
        return str(_arithmetic(text[start + 3 : end - 1], script, where)), end + 1
    if text.startswith("$(", start):
        raise problem(
            where, text, "what a command prints is not known here: write the value, or give a variable as NAME=VALUE"
        )
    if text.startswith("${", start):
        end = matching(text, start + 1, "{", "}", where)
        return _braced(text[start + 2 : end], script, where), end + 1
    name = NAME.match(text, start + 1)
    if name is None:
        if ARGUMENTS in script.unknown and text[start + 1] in "0123456789@*#":
            raise script.unknown[ARGUMENTS]
        skipped = 2 if text[start + 1] in "0123456789@*#?" else 1
        return ("" if skipped == 2 else "$"), start + skipped
    return _variable(name[0], script, where), name.end()


def _braced(inner: str, script: Script, where: str) -> str:
    match = re.fullmatch(r"(\w+)(?:(:?[-=])(.*))?", inner, re.DOTALL)
    if match is None:
        raise problem(where, f"${{{inner}}}", "only ${NAME} and ${NAME:-default} are expanded here: write the value")
    name, sign, default = match.groups()
    unknown = script.unknown.get(ARGUMENTS if name.isdigit() else name)
    if unknown is not None:
        raise unknown
    if sign is None:
        return _variable(name, script, where)
    known = {**script.environment, **HERE, **script.variables}
    if known.get(name) or (name in known and ":" not in sign):
        return known[name]
    return _unquoted(default, script, where)


def _variable(name: str, script: Script, where: str) -> str:
    if name in script.unknown:
        raise script.unknown[name]
    if name in script.variables:
        return script.variables[name]
    if name in HERE:
        return HERE[name]
    if name in script.environment:
        return script.environment[name]
    if name.isdigit():
        if ARGUMENTS in script.unknown:
            raise script.unknown[ARGUMENTS]
        return ""
    raise problem(where, f"${name}", f"{name} is not set in the script: give {name}=VALUE")


def _arithmetic(text: str, script: Script, where: str) -> int:
    try:
        tree = ast.parse(text.replace("$", "").strip(), mode="eval").body
        return _number(tree, script, where)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        raise problem(where, text, "this arithmetic cannot be followed: write the value") from None


def _number(node: ast.expr, script: Script, where: str) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(_variable(node.id, script, where))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_number(node.left, script, where), _number(node.right, script, where)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, script, where)
    raise ValueError("unknown arithmetic")
