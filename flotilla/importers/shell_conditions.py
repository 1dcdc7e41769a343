"""Whether a condition of a script holds: comparisons of values that are known; of others that is not known."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from tree_sitter import Node

from flotilla.importers.shell_script import Script
from flotilla.importers.shell_words import Words, text_of
from flotilla.shared.errors import InvalidSpec

PATTERN = frozenset("*?[")
NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
ALWAYS = {"true": True, ":": True, "false": False}


class Conditions:
    """Evaluates conditions; True, False, or None where it is not known."""

    def __init__(self, script: Script, words: Words) -> None:
        self._script = script
        self._words = words

    def all_hold(self, statements: Sequence[Node]) -> bool | None:
        """Evaluate the commands before ``then`` or ``do``, of which the last one counts."""
        return self.holds(statements[-1]) if len(statements) == 1 else None

    def holds(self, node: Node) -> bool | None:
        """Evaluate one command."""
        try:
            return self._holds(node)
        except (InvalidSpec, ValueError):
            return None

    def meets(self, subject: str | None, pattern: Node) -> bool | None:
        """Compare a value with a pattern of ``case``."""
        written = text_of(pattern)
        if written == "*":
            return True
        if subject is None:
            return None
        try:
            return self._matches(subject, pattern)
        except InvalidSpec:
            return None

    def _matches(self, subject: str, pattern: Node) -> bool | None:
        written = text_of(pattern)
        if pattern.type in {"word", "extglob_pattern", "number", "regex"} and not set("\\'\"$@+!(") & set(written):
            return fnmatchcase(subject, written)
        if PATTERN & set(written):
            return None
        return subject == self._words.text(pattern)

    def _holds(self, node: Node) -> bool | None:
        inner = node.named_children
        match node.type:
            case "test_command":
                is_old = text_of(node).startswith("[ ")
                return self._test(inner[0], is_old=is_old) if len(inner) == 1 else None
            case "compound_statement" if text_of(node).startswith("(("):
                return bool(self._words.number(node))
            case "compound_statement" if len(inner) == 1:
                return self._holds(inner[0])
            case "negated_command":
                found = self.holds(inner[0])
                return None if found is None else not found
            case "list":
                operator = next(text_of(child) for child in node.children if text_of(child) in {"&&", "||"})
                return _joined(operator, self.holds(inner[0]), lambda: self.holds(inner[-1]))
            case "command":
                return self._command(inner)
        return None

    def _command(self, parts: Sequence[Node]) -> bool | None:
        head = text_of(parts[0])
        if head == "test":
            words = [self._words.text(each) for each in parts[1:]]
            return _of_words(words)
        return ALWAYS.get(head) if len(parts) == 1 else None

    def _test(self, node: Node, *, is_old: bool) -> bool | None:
        inner = node.named_children
        if node.type == "parenthesized_expression" and len(inner) == 1:
            return self._test(inner[0], is_old=is_old)
        if node.type == "unary_expression":
            return self._unary(node, is_old=is_old)
        if node.type != "binary_expression":
            return bool(self._words.text(node))
        operator = node.child_by_field_name("operator")
        sign = text_of(operator) if operator is not None else ""
        left, right = inner[0], inner[-1]
        if sign in {"&&", "||"}:
            return _joined(sign, self._test(left, is_old=is_old), lambda: self._test(right, is_old=is_old))
        if left.type == "binary_expression" or right.type == "binary_expression":
            return None  # -a and -o, whose order the grammar does not say
        if sign in NUMBERS:
            return NUMBERS[sign](int(self._words.text(left) or 0), int(self._words.text(right) or 0))
        if sign not in {"=", "==", "!="}:
            return None
        value = self._words.text(left)
        found = value == self._words.text(right) if is_old else self._matches(value, right)
        return None if found is None else found == (sign != "!=")

    def _unary(self, node: Node, *, is_old: bool) -> bool | None:
        operator, value = text_of(node.children[0]), node.named_children[-1]
        if operator == "!":
            found = self._test(value, is_old=is_old)
            return None if found is None else not found
        if operator in {"-z", "-n"}:
            return (operator == "-n") == bool(self._words.text(value))
        return self._script.known(self._words.text(value)) is not None if operator == "-v" else None


def _joined(operator: str, left: bool | None, right: Callable[[], bool | None]) -> bool | None:
    decides = operator == "||"
    if left is decides:
        return decides
    second = right()
    if second is decides:
        return decides
    return None if None in (left, second) else not decides


def _of_words(words: Sequence[str]) -> bool | None:
    if words[:1] == ["!"]:
        found = _of_words(words[1:])
        return None if found is None else not found
    match words:
        case [("-z" | "-n") as sign, value]:
            return (sign == "-n") == bool(value)
        case [value]:
            return bool(value)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, sign, right] if sign in NUMBERS:
            return NUMBERS[sign](int(left), int(right))
    return None
