"""From the words of a script, as its syntax tree has them, to what a shell makes of them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from tree_sitter import Node

from flotilla.importers.hydra import problem
from flotilla.importers.shell_script import ARGUMENTS, Element, Script, parse
from flotilla.shared.errors import InvalidSpec

NAME: Final = re.compile(r"[A-Za-z_]\w*")
QUOTED: Final = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|\$\{[^{}]*\}", re.DOTALL)
BRACES: Final = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
ESCAPED: Final = re.compile(r"\\(\n|.)", re.DOTALL)
IN_QUOTES: Final = re.compile(r"\\(\n|[$`\"\\])")
ANSI: Final = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?[\"']*$")
SLICE: Final = re.compile(r"\$\{(?:@(?=:)|(\w+)\[[@*]\])(?:: *(\d+)(?:: *(\d+))?)?\}")
MAX_EXPANSION: Final = 100_000
MAX_NUMBER: Final = 2**63
Piece = tuple[str, bool]
"""A part of a word, and whether a shell would cut it at white space."""


def text_of(node: Node) -> str:
    """Return what was written."""
    return (node.text or b"").decode("utf-8", "replace")


def _unescaped(text: str, pattern: re.Pattern[str] = ESCAPED) -> str:
    return pattern.sub(lambda match: "" if match[1] == "\n" else match[1], text)


@dataclass(frozen=True, slots=True)
class Words:
    """Expands words.

    Attributes:
        script: what is known.
        print: what a command in ``$( )`` prints; raises ``InvalidSpec`` where that is not known.
    """

    script: Script
    print: Callable[[Node], str]

    def of(self, node: Node) -> list[Element]:
        """Return the words that one becomes, each with why it is not known; then it is as it is written."""
        try:
            if (array := self._array(node)) is not None:
                return array
            if BRACES.search(QUOTED.sub("", text_of(node))):
                raise self._problem(node, "braces become several words here: write them, or put quotes around them")
            found = _fields(self._pieces(node))
            if found and found[-1].endswith("=") and (variable := VARIABLE.search(text_of(node))) is not None:
                self.script.empty.setdefault(found[-1].lstrip("+"), variable[1])
            return [(word, None) for word in found]
        except InvalidSpec as error:
            return [(text_of(node), error)]

    def text(self, node: Node | None) -> str:
        """Return the one value that a word has where a shell cuts none, as in an assignment.

        Raises:
            InvalidSpec: it is not known.
        """
        value = "" if node is None else "".join(piece for piece, _ in self._pieces(node))
        if len(value) > MAX_EXPANSION and node is not None:
            raise self._problem(node, "the value grows too long")
        return value

    def elements(self, array: Node) -> list[Element]:
        """Return the words of ``( ... )``."""
        return [each for child in array.named_children if child.type != "comment" for each in self.of(child)]

    def _problem(self, node: Node, why: str) -> InvalidSpec:
        return problem(self.script.where(node), text_of(node), why)

    def _pieces(self, node: Node) -> Iterator[Piece]:
        match node.type:
            case "word" | "number" | "extglob_pattern" | "regex" | "variable_name" | "$":
                yield _unescaped(text_of(node)), False
            case "raw_string":
                yield text_of(node)[1:-1], False
            case "ansi_c_string":
                yield ESCAPED.sub(lambda match: ANSI.get(match[1], match[0]), text_of(node)[2:-1]), False
            case "string" | "translated_string":
                yield self._string(node), False
            case "concatenation":
                yield from self._concatenated(node)
            case "simple_expansion":
                yield self._simple(node), True
            case "expansion":
                yield self._expansion(node), True
            case "command_substitution" if text_of(node).startswith("$((") and text_of(node).endswith("))"):
                yield str(self._arithmetic(node)), False
            case "command_substitution":
                yield self.print(node), True
            case "arithmetic_expansion":
                yield str(self.number(node)), False
            case _:
                raise self._problem(node, "this is not expanded here: write the value")

    def _concatenated(self, node: Node) -> Iterator[Piece]:
        for piece, gap in _with_gaps(node):
            yield from self._pieces(piece) if isinstance(piece, Node) else [(gap, False)]

    def _arithmetic(self, node: Node) -> int:
        """Evaluate arithmetic that the grammar takes for a command, as within ``${A:-$((1 + 1))}``."""
        tree = parse(f"x={text_of(node)}")
        value = tree.named_children[0].child_by_field_name("value") if tree.named_children else None
        if value is None or value.type != "arithmetic_expansion" or tree.has_error:
            raise self._problem(node, "this arithmetic cannot be followed: write the value")
        return self.number(value)

    def _string(self, node: Node) -> str:
        parts: list[str] = []
        for piece, gap in _with_gaps(node):
            if isinstance(piece, Node) and piece.type not in {"string_content", '"', '$"'}:
                parts += [gap[: len(gap) - len(gap.lstrip())], self.text(piece)]
            elif not isinstance(piece, Node) or piece.type == "string_content":
                parts.append(_unescaped(gap, IN_QUOTES))
        return "".join(parts)

    def _simple(self, node: Node) -> str:
        name = text_of(node).strip()[1:]
        if name in {"@", "*", "#"}:
            if ARGUMENTS in self.script.unknown:
                raise self.script.unknown[ARGUMENTS]
            return str(len(self.script.arguments)) if name == "#" else " ".join(self.script.arguments)
        if name in {"$", "?", "!", "-"}:
            raise self._problem(node, "what this is when the script runs is not known: write the value")
        return self.script.value(name, node)

    def _array(self, node: Node) -> list[Element] | None:
        """Return the elements of ``"${L[@]}"`` or ``"$@"``; None where a word is something else."""
        inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
        if inner is not node and text_of(node) != f'"{text_of(inner)}"':
            return None
        if text_of(inner) in {"$@", "${@}"} or (text_of(inner) == "$*" and inner is node):
            if ARGUMENTS in self.script.unknown:
                raise self.script.unknown[ARGUMENTS]
            return [(each, None) for each in self.script.arguments]
        match = SLICE.fullmatch(text_of(inner))
        if match is None:
            return None
        name = match[1] or ARGUMENTS
        if name in self.script.unknown:
            raise self.script.unknown[name]
        found = self._listed(name)
        if match[2] is not None:
            first = int(match[2])
            found = found[first:] if match[3] is None else found[first : first + int(match[3])]
        if inner is not node:
            return found
        return [
            (each, error)
            for word, error in found
            for each in ([word] if error is not None else _fields([(word, True)]))
        ]

    def _listed(self, name: str) -> list[Element]:
        """Return what a list has; the script's arguments begin with its own name."""
        if name != ARGUMENTS:
            return list(self.script.arrays.get(name, []))
        return [(self.script.path, None), *((each, None) for each in self.script.arguments)]

    def _expansion(self, node: Node) -> str:
        inner = text_of(node).strip()[2:-1]
        if (count := re.fullmatch(r"#(\w+)\[[@*]\]", inner)) is not None:
            return str(len(self.script.arrays.get(count[1], [])))
        match = re.match(r"(#?)(\w+|@)(?:\[(\d+)\])?", inner)
        if match is None or inner.startswith("!"):
            raise self._problem(node, "only a name, with what is done to it, is expanded here: write the value")
        rest = inner[match.end() :]
        index = match[3]
        self.script.check(match[2], node)
        value = self.script.known(match[2]) if index is None else self._element(match[2], int(index))
        if match[1]:
            return str(len(value or ""))
        if not rest:
            return value or "" if index is not None else self.script.value(match[2], node)
        return self._changed(node, match[2], value, rest)

    def _element(self, name: str, index: int) -> str | None:
        if name in self.script.unknown:
            raise self.script.unknown[name]
        if name not in self.script.arrays:
            return self.script.known(name) if index == 0 else None
        elements = self.script.arrays[name]
        if index < len(elements) and (error := elements[index][1]) is not None:
            raise error
        return elements[index][0] if index < len(elements) else None

    def _changed(self, node: Node, name: str, value: str | None, rest: str) -> str:
        """Do what stands behind the name in ``${NAME...}``."""
        operands = [child for child in node.named_children if child.type not in {"variable_name", "subscript"}]
        match = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", rest)
        operator = match[0] if match is not None else ""
        if operator.lstrip(":") in {"-", "=", "+", "?"}:
            return self._default(node, name, value, operator, operands)
        if operator in {"^^", ",,"} and rest == operator:
            return (value or "").upper() if operator == "^^" else (value or "").lower()
        found = self._cut(value or "", operator, operands)
        if found is None:
            raise self._problem(node, "this is not done to a value here: write it")
        return found

    def _default(self, node: Node, name: str, value: str | None, operator: str, operands: Sequence[Node]) -> str:
        is_there = value is not None and (bool(value) or not operator.startswith(":"))
        if operator.endswith("+"):
            return self._joined(operands, in_quotes=_is_in_quotes(node)) if is_there else ""
        if is_there:
            return value or ""
        if operator.endswith("?"):
            raise self._problem(node, f"{name} is not set in the script: give {name}=VALUE")
        found = self._joined(operands, in_quotes=_is_in_quotes(node))
        if operator.endswith("="):
            self.script.set(name, found)
        return found

    def _cut(self, value: str, operator: str, operands: Sequence[Node]) -> str | None:
        """Take a part of a value, or put another in its place."""
        if operator[:1] in {"#", "%"} and operator:
            return _without(value, self._joined(operands), operator)
        if operator == ":" and operands and all(child.type == "number" for child in operands):
            start, *length = (int(text_of(child)) for child in operands)
            return value[start : start + length[0]] if length else value[start:]
        if operator in {"/", "//"} and operands:
            pattern, made = self._joined(operands[:1]), self._joined(operands[1:])
            return re.sub(_regular(pattern), lambda _: made, value, count=0 if operator == "//" else 1)
        return None

    def _joined(self, nodes: Sequence[Node], *, in_quotes: bool = False) -> str:
        """Return several nodes as one value, with the white space between them; single quotes stay in double ones."""
        parts: list[str] = []
        for number, node in enumerate(nodes):
            gap = node.start_byte - nodes[number - 1].end_byte if number else 0
            parts += [" " * gap, self._in_quotes(node) if in_quotes else self.text(node)]
        return "".join(parts)

    def _in_quotes(self, node: Node) -> str:
        if node.type == "raw_string":
            return text_of(node)
        if node.type != "concatenation":
            return self.text(node)
        return "".join(self._in_quotes(each) if isinstance(each, Node) else gap for each, gap in _with_gaps(node))

    def number(self, node: Node) -> int:
        """Evaluate arithmetic.

        Raises:
            InvalidSpec: it is not known, or cannot be followed.
        """
        try:
            found = self._number(node)
        except (ValueError, ZeroDivisionError, OverflowError):
            found = MAX_NUMBER
        if not -MAX_NUMBER < found < MAX_NUMBER:
            raise self._problem(node, "this arithmetic cannot be followed: write the value")
        return found

    def _number(self, node: Node) -> int:
        inner = [child for child in node.named_children if child.type != "comment"]
        match node.type:
            case "arithmetic_expansion" | "parenthesized_expression" | "compound_statement" if len(inner) == 1:
                return self._number(inner[0])
            case "binary_expression" if len(inner) >= 2:
                return self._binary(node)
            case "unary_expression" if text_of(node).startswith("-"):
                return -self._number(inner[-1])
            case "variable_name" | "word" if NAME.fullmatch(text_of(node)):
                return int(self.script.value(text_of(node), node) or 0)
            case "number" | "simple_expansion" | "expansion" | "string" | "command_substitution":
                return int(self.text(node) or 0)
        raise ValueError("unknown arithmetic")

    def _binary(self, node: Node) -> int:
        operator = text_of(node.children[1])
        left, right = self._number(node.children[0]), self._number(node.children[2])
        if operator in {"/", "%"}:
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if operator == "/" else left - right * quotient
        if operator == "**" and not 0 <= right < 64:
            raise ValueError("too large")
        found = OPERATORS.get(operator)
        if found is None:
            raise ValueError("unknown operator")
        return int(found(left, right))


OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "**": lambda a, b: a**b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b, "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
}  # fmt: skip


def _with_gaps(node: Node) -> Iterator[tuple[Node | None, str]]:
    """Return the parts of a node, and as text what stands between them, which its grammar leaves out."""
    source, at = node.text or b"", 0
    for child in node.children:
        start = child.start_byte - node.start_byte
        if start > at:
            yield None, source[at:start].decode("utf-8", "replace")
        yield child, text_of(child)
        at = child.end_byte - node.start_byte


def _is_in_quotes(node: Node) -> bool:
    return node.parent is not None and node.parent.type == "string"


def _fields(pieces: Iterator[Piece] | Sequence[Piece]) -> list[str]:
    """Cut pieces into words where a shell does: at the white space of what was expanded without quotes."""
    words: list[str] = []
    open_word: str | None = None
    for piece, is_cut in pieces:
        if not is_cut:
            open_word = (open_word or "") + piece
            continue
        parts = piece.split()
        if open_word is not None and piece[:1].isspace():
            words, open_word = [*words, open_word], None
        for number, part in enumerate(parts):
            if number and open_word is not None:
                words, open_word = [*words, open_word], None
            open_word = (open_word or "") + part
        if piece[-1:].isspace() and open_word is not None:
            words, open_word = [*words, open_word], None
    return words if open_word is None else [*words, open_word]


def _regular(pattern: str) -> str:
    return translate(pattern).removeprefix("(?s:").removesuffix(r")\Z")


def _without(value: str, pattern: str, operator: str) -> str:
    """Take a pattern off a value: off its start or its end, the shortest or the longest match."""
    matches = re.compile(translate(pattern)).match
    cuts = range(len(value) + 1)
    if operator[0] == "#":
        found = [cut for cut in cuts if matches(value[:cut])]
        return value[(found[-1] if operator == "##" else found[0]) :] if found else value
    found = [cut for cut in cuts if matches(value[cut:])]
    return value[: (found[0] if operator == "%%" else found[-1])] if found else value
