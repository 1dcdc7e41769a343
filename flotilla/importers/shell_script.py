"""What is known of a shell script while it is read: values, lists, and why the value of a name is not known."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from flotilla.importers.hydra import NOT_READ, problem
from flotilla.shared.errors import InvalidSpec

ARGUMENTS = "@"
"""Stands for the script's own arguments among what is not known."""
HERE: Mapping[str, str] = MappingProxyType({"HOME": "~", "PWD": "."})
"""Folders of the machine that trains, as a spec writes them."""
OF_THE_SHELL = frozenset(
    {"RANDOM", "HOSTNAME", "SECONDS", "BASHPID", "PPID", "UID", "EUID", "LINENO", "EPOCHSECONDS", "OSTYPE", "MACHTYPE"}
)
"""Variables that a shell sets by itself, to what is not known here."""
FIRST_NODE = frozenset(
    {"NODE_RANK", "RANK", "MACHINE_RANK", "GROUP_RANK", "PET_NODE_RANK", "SLURM_NODEID", "SLURM_PROCID", "ARNOLD_ID",
     "MLP_ROLE_INDEX", "VC_TASK_INDEX"}
)  # fmt: skip
"""Variables by which schedulers number machines: where nothing gives them a script is read as the first reads it."""
LOST = re.compile(rb"[A-Za-z_]\w*")
ARITHMETIC = rb"\$\(\((?:[^(){}]|\$\{\w+\}|\((?:[^(){}]|\$\{\w+\})*\))*\)\)"
REPAIRS: Sequence[tuple[re.Pattern[bytes], bytes]] = (
    (re.compile(rb"(\s)\\\s*\Z"), rb"\1\n"),
    (re.compile(rb"(\$\{\w+:?[-=+])\["), rb'\1"["'),
    (re.compile(rb"(\$\{\w+:?[-=+])(" + ARITHMETIC + rb")(?=\})"), rb'\1"\2"'),
)
"""What bash reads and the grammar does not, and how the same is written for it: a last line that would go on, and
defaults that begin with a bracket or are arithmetic with brackets."""
MAX_REPAIRS = 50
NO_FOLDER = "\0"
"""Stands for the folder of a script whose path says none."""
Element = tuple[str, InvalidSpec | None]
"""A word, and why it is not known."""


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Return the syntax tree of a script.

    The grammar loses the name of a variable in words such as ``$A/b-$C/d``: there braces are put around it.
    """
    source = text.encode("utf-8", "replace")
    if _parser().parse(source).root_node.has_error:
        for pattern, instead in REPAIRS:
            source = pattern.sub(instead, source)
    for _ in range(MAX_REPAIRS):
        root = _parser().parse(source).root_node
        lost = [match for at in sorted(_lone_signs(root), reverse=True) if (match := LOST.match(source, at))]
        if not lost:
            break
        for match in lost:
            source = b"%b{%b}%b" % (source[: match.start()], match[0], source[match.end() :])
    return root


def _lone_signs(node: Node) -> Iterator[int]:
    """Return where signs of variables end that belong to no name."""
    if node.type == "$" and node.parent is not None and node.parent.type != "simple_expansion":
        yield node.end_byte
    for child in node.children:
        yield from _lone_signs(child)


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
        source: its name, for messages.
        fixed: variables given from outside, which its own assignments do not change.
        environment: values of names that it does not assign, from where it is started.
        variables: final values of what it assigns.
        arrays: of what it assigns lists to; an element that is not known is kept as it is written, with the reason.
        unknown: why the value of a name is not known; said when something uses it.
        functions: what runs when a word is a command.
        arguments: ``$1`` and those after it.
        commands: those that run, or may.
        empty: variables without a value, by what stands before them in a command: ``name=``, or a word ``--name``.
        ends: where it ended last, by a command that ends it.
        needs_values: whether a name without a value ends it (``set -u``), where else it is empty.
    """

    source: str
    fixed: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Element]] = field(default_factory=dict)
    unknown: dict[str, InvalidSpec] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    commands: list[Command] = field(default_factory=list)
    empty: dict[str, str] = field(default_factory=dict)
    ends: str | None = None
    needs_values: bool = False

    def inner(self) -> "Script":
        """Return a copy, as a subshell has it: what it sets stays there, what it runs is run."""
        return Script(
            self.source, self.fixed, self.environment, dict(self.variables), dict(self.arrays), dict(self.unknown),
            dict(self.functions), self.arguments, self.commands, self.empty, self.ends, self.needs_values,
        )  # fmt: skip

    def where(self, node: Node) -> str:
        """Return the line of a node, for messages."""
        return f"{self.source}:{node.start_point.row + 1}"

    def known(self, name: str) -> str | None:
        """Return the value of a name; None where it has none.

        Raises:
            InvalidSpec: it is not known.
        """
        if name in self.unknown:
            raise self.unknown[name]
        for values in (self.variables, HERE, self.environment):
            if name in values:
                return values[name]
        if name.isdigit():
            return self._argument(int(name))
        if name in self.arrays:
            return self._first(self.arrays[name])
        if name in FIRST_NODE:
            return "0"
        return self.path if name == "BASH_SOURCE" else None

    @property
    def path(self) -> str:
        """The script's own path, from the folder where it is started."""
        folder, _, name = self.source.rpartition("/")
        return self.source if folder and not folder.startswith(("/", "~")) else f"{NO_FOLDER}/{name}"

    def _argument(self, number: int) -> str | None:
        if number == 0:
            return self.path
        if ARGUMENTS in self.unknown:
            raise self.unknown[ARGUMENTS]
        return self.arguments[number - 1] if number <= len(self.arguments) else None

    def _first(self, elements: Sequence[Element]) -> str | None:
        for word, error in elements[:1]:
            if error is not None:
                raise error
            return word
        return None

    def check(self, name: str, node: Node) -> None:
        """Refuse what a shell sets by itself, or may be a secret, unless the script sets it.

        Raises:
            InvalidSpec: it is such a name.
        """
        if name not in self.variables and name not in HERE and self.environment.get(name) == NOT_READ:
            why = f"{name} is not set in the script, and may be a secret, which is not read: give {name}=VALUE"
            raise problem(self.where(node), f"${name}", why)
        if name in OF_THE_SHELL and self.known(name) is None:
            raise problem(self.where(node), f"${name}", "a shell sets this by itself: write the value")

    def value(self, name: str, node: Node) -> str:
        """Return the value of a name; nothing where it has none, as a shell does unless it is told not to.

        Raises:
            InvalidSpec: it is not known, or there must be one.
        """
        self.check(name, node)
        found = self.known(name)
        if found is None and self.needs_values and not name.isdigit():
            raise problem(self.where(node), f"${name}", f"{name} is not set in the script: give {name}=VALUE")
        return found or ""

    def set(self, name: str, value: str) -> None:
        """Assign to a name that is not given from outside."""
        if name not in self.fixed:
            self.variables[name] = value
            self.arrays.pop(name, None)
            self.unknown.pop(name, None)

    def lacking(self, name: str) -> str | None:
        """Return which variable leaves a parameter without a value."""
        return self.empty.get(f"{name}=") or self.empty.get(name)

    def forget(self, name: str, why: InvalidSpec) -> None:
        """Take note that a name may have another value."""
        if name not in self.fixed:
            self.unknown[name] = why
