"""Read a launch script: assignments, and the words of its commands after expansion. Nothing is run.

The syntax tree is tree-sitter's. Conditions on values that are known are followed, and so are loops over known words
and the script's own functions. What would need running the script (other conditions, most of ``$(...)``) makes a value
unknown, which is refused, with its line, where a parameter uses it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from tree_sitter import Node

from flotilla.importers.hydra import problem
from flotilla.importers.shell_conditions import Conditions
from flotilla.importers.shell_output import Output
from flotilla.importers.shell_script import ARGUMENTS, NO_FOLDER, Command, Script, parse
from flotilla.importers.shell_words import NAME, VARIABLE, Words, text_of
from flotilla.shared.errors import InvalidSpec

HARMLESS = re.compile(r"(?:activate|bashrc|profile|conda\.sh|set_env\.sh|setvars\.sh)$")
"""Files that set up a machine's own environment, and no variable of a launch script."""
HOOK = re.compile(r"\b(?:conda|mamba|micromamba|pyenv|ssh-agent|direnv|brew)\b")
"""Commands whose output, given to ``eval``, does the same."""
SUCCEED = frozenset(
    {"", "cd", "pushd", "mkdir", "set", "export", "source", ".", "echo", "pip", "pip3", "sleep", "ray", "rm", "cp"}
)
"""Commands that a launch script takes to succeed; others before ``&&`` may be questions."""
NUMBERED = re.compile(r"(?<!\\)\$(?:(\d)|\{(\d+)\})")
ARITY = re.compile(r"\$#|\$\{#\}|-z \"?\$\{?[1-9]\b")
"""What asks whether a script has arguments."""
UNCERTAIN = "whether this runs is not known, the condition is no comparison of known values: give the final value"
DEPENDS = "whether this runs depends on `{}`, which is not known here: give NAME=VALUE for it, or the final value"
BROKEN = "this is no bash, or a quote, a bracket, a condition, a loop or a here-document needs its end"
FOLDER = "the script's own folder is not known: give its path from where it is started"
BODIES = frozenset({"compound_statement", "do_group", "pipeline", "negated_command", "variable_assignments"})
LOOP_ENDS = re.compile(r"\b(?:break|continue)\b")
MAX_STEPS, MAX_DEPTH, MAX_ROUNDS = 20_000, 60, 200
NOTHING: Mapping[str, str] = MappingProxyType({})

__all__ = ["Command", "Script", "given_variables", "read_script"]


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
    script = Script(source, fixed, environment, dict(fixed))
    try:
        _Reader(script).program(text, 0)
    except RecursionError:
        raise problem(source, source, "its brackets stand in each other without end") from None
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


class _Ended(Exception):
    """The script, or a function of it, ends here."""


class _Returned(_Ended):
    """A function ends here."""


class _Reader:
    """Follows a script statement by statement; ``doubt`` says why it is not known whether one runs."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._output = Output(script, self._body_of)
        self._words = Words(script, self._output.substituted)
        self._conditions = Conditions(script, self._words)
        self._steps = 0
        self._depth = 0
        self._statements: Mapping[str, Callable[[Node, str | None], None]] = {
            "variable_assignment": self._assign,
            "declaration_command": self._declare,
            "command": self._command,
            "list": self._list,
            "redirected_statement": self._redirected,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "while_statement": self._while,
            "c_style_for_statement": self._while,
            "function_definition": self._define,
            "unset_command": self._unset,
            "subshell": self._subshell,
        }

    def program(self, text: str, line: int) -> None:
        """Read a whole text, whose first line is this one."""
        root = parse(text)
        if root.has_error:
            broken = next(_broken(root))
            where = f"{self._script.source}:{broken.start_point.row + 1 + line}"
            raise problem(where, text_of(broken)[:80] or text[:80], BROKEN)
        try:
            self._all(root.named_children, None)
        except _Ended:
            return

    def _body_of(self, name: str) -> Node | None:
        return self._script.functions.get(name)

    def _all(self, statements: Sequence[Node], doubt: str | None) -> None:
        for statement in statements:
            self._one(statement, doubt)

    def _one(self, node: Node, doubt: str | None) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise problem(self._script.where(node), text_of(node)[:80], "the script takes too many steps to be read")
        follow = self._statements.get(node.type)
        if follow is not None:
            follow(node, doubt)
        elif node.type in BODIES and not text_of(node).startswith("(("):
            self._all(node.named_children, doubt)

    def _doubt(self, written: str) -> str:
        return DEPENDS.format(" ".join(written.split()))

    def _declare(self, node: Node, doubt: str | None) -> None:
        self._all([each for each in node.named_children if each.type == "variable_assignment"], doubt)

    def _assign(self, node: Node, doubt: str | None) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, script = text_of(target) if target is not None else "", self._script
        if name in script.fixed:
            return
        is_added = text_of(node)[len(name) :].startswith("+=")
        try:
            if value is not None and value.type == "array":
                self._assign_list(name, value, doubt, is_added=is_added)
            elif doubt is not None or NAME.fullmatch(name) is None:
                raise problem(script.where(node), text_of(node), doubt or "one element of a list is not followed here")
            else:
                before = (script.known(name) or "") if is_added else ""
                script.set(name, before + self._words.text(value))
        except InvalidSpec as error:
            script.forget(name.partition("[")[0], error)

    def _assign_list(self, name: str, array: Node, doubt: str | None, *, is_added: bool) -> None:
        """Assign to a list, or add to it; of what perhaps is added only that is not known."""
        script = self._script
        if is_added and name in script.unknown:
            return
        elements = self._words.elements(array)
        if doubt is not None:
            if not is_added:
                raise problem(script.where(array), text_of(array)[:80], doubt)
            elements = [(text_of(each), problem(script.where(each), text_of(each), doubt))
                        for each in array.named_children if each.type != "comment"]  # fmt: skip
        script.arrays[name] = [*script.arrays.get(name, []), *elements] if is_added else elements
        script.variables.pop(name, None)
        script.unknown.pop(name, None)

    def _command(self, node: Node, doubt: str | None) -> None:
        parts = [child for child in node.named_children if child.type not in {"variable_assignment", "comment"}
                 and not child.type.endswith("_redirect")]  # fmt: skip
        if not parts:  # a list of assignments alone
            self._all(node.named_children, doubt)
            return
        head = text_of(parts[0])
        if doubt is None and head in {"exit", "return"}:
            self._script.ends = self._script.where(node) if head == "exit" else self._script.ends
            raise _Ended if head == "exit" else _Returned
        if head in self._script.functions:
            self._call(head, parts[1:], doubt)
            return
        if head == "eval":
            self._eval(node, parts[1:], doubt)
            return
        self._change(node, head, parts[1:], doubt)
        if doubt is not None:
            words = [text_of(each) for each in parts]
            self._script.commands.append(Command(words, problem(self._script.where(node), head, doubt)))
            return
        self._run(node, parts)

    def _run(self, node: Node, parts: Sequence[Node]) -> None:
        """Take note of a command that runs, with its words after expansion."""
        found: list[str] = []
        unknown: dict[int, InvalidSpec] = {}
        for part in parts:
            before, more = found[-1:], self._words.of(_inside(part))
            if not more and before and (variable := VARIABLE.fullmatch(text_of(part))) is not None:
                self._script.empty.setdefault(before[0], variable[1])
            for word, error in more:
                if NO_FOLDER in word or error is not None:
                    unknown[len(found)] = error or problem(self._script.where(node), "$0", FOLDER)
                found.append(word)
        if found:
            self._script.commands.append(Command(found, next(iter(unknown.values()), None), unknown))

    def _change(self, node: Node, head: str, rest: Sequence[Node], doubt: str | None) -> None:
        """Do what a command does to variables: set, shift, cd, and what a file that is sourced may do."""
        script, words = self._script, [text_of(each) for each in rest]
        plain = [word for word in words if not word.startswith("-")]
        if head == "set" and any(re.fullmatch(r"-[a-z]*u[a-z]*|nounset", word) for word in words):
            script.needs_values = True
        if head == "shift" or (head == "set" and "--" in words):
            self._new_arguments(node, head, rest, doubt)
        elif head in {"source", "."} and plain and not HARMLESS.search(plain[0].strip("\"'")):
            why = f"{plain[0]} may have set it to another value: write the value"
            for name in {*script.variables, *script.arrays}:
                script.forget(name, problem(script.where(node), text_of(node)[:80], why))
        elif head in {"cd", "pushd"}:
            try:
                if doubt is not None:
                    raise problem(script.where(node), text_of(node)[:80], doubt)
                script.set("PWD", self._output.folder(rest))
            except InvalidSpec as error:
                script.forget("PWD", error)

    def _new_arguments(self, node: Node, head: str, rest: Sequence[Node], doubt: str | None) -> None:
        """Follow ``set -- WORDS`` and ``shift``."""
        script, words = self._script, [text_of(each) for each in rest]
        given = rest if head == "shift" else rest[words.index("--") + 1 :]
        found = [each for part in given for each in self._words.of(part)]
        if doubt is not None or ARGUMENTS in script.unknown or any(error is not None for _, error in found):
            why = "the script's arguments change here: write the value"
            script.unknown[ARGUMENTS] = problem(script.where(node), text_of(node)[:80], why)
            return
        values = [word for word, _ in found]
        count = int(values[0]) if values[:1] and values[0].isdigit() else 1
        script.arguments = script.arguments[count:] if head == "shift" else values

    def _call(self, name: str, rest: Sequence[Node], doubt: str | None) -> None:
        """Run a function of the script's own."""
        script, before = self._script, self._script.arguments
        found = [each for node in rest for each in self._words.of(node)]
        hidden = next((error for _, error in found if error is not None), None)
        if self._depth > MAX_DEPTH:
            raise problem(script.where(script.functions[name]), name, "the function calls itself without end")
        kept = script.unknown.get(ARGUMENTS)
        script.arguments = [word for word, _ in found]
        if hidden is not None:
            script.unknown[ARGUMENTS] = hidden
        self._depth += 1
        try:
            self._one(script.functions[name], doubt)
        except _Returned:
            pass
        finally:
            self._depth -= 1
            script.arguments = before
            script.unknown.pop(ARGUMENTS, None)
            if kept is not None:
                script.unknown[ARGUMENTS] = kept

    def _eval(self, node: Node, rest: Sequence[Node], doubt: str | None) -> None:
        if len(rest) == 1 and "$(" in text_of(rest[0]) and HOOK.search(text_of(rest[0])):
            return
        found = [each for part in rest for each in self._words.of(part)]
        if doubt is not None or any(error is not None for _, error in found) or self._depth > MAX_DEPTH:
            raise problem(self._script.where(node), text_of(node)[:80], "this is not followed: give the final values")
        self._depth += 1
        self.program(" ".join(word for word, _ in found), node.start_point.row)
        self._depth -= 1

    def _list(self, node: Node, doubt: str | None) -> None:
        """Follow ``A && B`` and ``A || B``: a command is taken to succeed, unless it is one that asks."""
        left, right = node.named_children[0], node.named_children[-1]
        operator = next(text_of(child) for child in node.children if text_of(child) in {"&&", "||"})
        holds = self._conditions.holds(left)
        if holds is None and left.type not in {"test_command", "compound_statement"}:
            self._one(left, doubt)
            is_asked = right.type == "variable_assignment" and _head(left) not in SUCCEED
            holds = None if operator == "||" or is_asked else not _is_doubtful(left)
        elif left.type == "list":
            self._one(left, doubt)
        if holds is (operator == "||") and holds is not None:
            return
        self._one(right, doubt if holds is not None else doubt or self._reason(left))

    def _reason(self, condition: Node) -> str:
        return self._doubt(text_of(condition)) if condition.type == "test_command" else UNCERTAIN

    def _redirected(self, node: Node, doubt: str | None) -> None:
        body = node.child_by_field_name("body")
        for redirect in node.named_children:
            if redirect.type == "heredoc_redirect" and body is not None and _head(body) == "read":
                name = text_of(body.named_children[-1])
                try:
                    if doubt is not None:
                        raise problem(self._script.where(node), name, doubt)
                    self._script.set(name, self._heredoc(redirect))
                except InvalidSpec as error:
                    self._script.forget(name, error)
                return
        if body is not None:
            self._one(body, doubt)

    def _heredoc(self, redirect: Node) -> str:
        start = next(child for child in redirect.children if child.type == "heredoc_start")
        body = next((child for child in redirect.children if child.type == "heredoc_body"), None)
        if body is None:
            return ""
        if text_of(start)[:1] in "'\"\\":
            return text_of(body)
        source, at, parts = body.text or b"", 0, []
        for child in [each for each in body.named_children if each.type != "heredoc_content"]:
            parts += [self._numbered(source[at : child.start_byte - body.start_byte], body), self._words.text(child)]
            at = child.end_byte - body.start_byte
        return "".join([*parts, self._numbered(source[at:], body)]).replace("\\\n", "").strip("\n")

    def _numbered(self, text: bytes, body: Node) -> str:
        """Put arguments of the script in, which the grammar does not see in a here-document."""
        value = self._script.value
        return NUMBERED.sub(lambda match: value(match[1] or match[2], body), text.decode())

    def _if(self, node: Node, doubt: str | None) -> None:
        """Follow the branch that runs; those after one of which that is not known may run, too."""
        written, is_over = "if", False
        reason: str | None = None
        for branch in [node, *(each for each in node.named_children if each.type in {"elif_clause", "else_clause"})]:
            if is_over:
                return
            condition, body = _branch(branch)
            written = "elif" if branch.type == "elif_clause" else written
            holds = self._conditions.all_hold(condition) if branch.type != "else_clause" else True
            if holds and self._asks_for_arguments(node, condition, body):
                holds = False
            if holds is None and branch.type != "else_clause":
                reason = self._doubt(f"{written} {_between(condition)}")
            if holds is not False:
                self._all(body, doubt or (reason if reason is not None else None))
            is_over = holds is True and reason is None

    def _asks_for_arguments(self, node: Node, condition: Sequence[Node], body: Sequence[Node]) -> bool:
        """Whether a script ends here for want of arguments: it is read as if it had some, which are not known."""
        script, is_script = self._script, self._depth == 0 and not self._script.arguments
        if not (is_script and ARITY.search(_between(condition)) and any(_head(each) == "exit" for each in body)):
            return False
        why = "an argument of the script is not known here: write the value in its place"
        for name in map(str, range(1, 10)):
            script.unknown[name] = problem(script.where(node), f"${name}", why)
        return True

    def _case(self, node: Node, doubt: str | None) -> None:
        subject = node.child_by_field_name("value")
        written = f"case {text_of(subject) if subject is not None else ''} in"
        try:
            value: str | None = self._words.text(subject)
        except InvalidSpec:
            value = None
        is_open = False
        for item in [each for each in node.named_children if each.type == "case_item"]:
            patterns = item.children_by_field_name("value")
            met = [self._conditions.meets(value, each) for each in patterns]
            if True not in met and None not in met:
                continue
            is_open = is_open or True not in met
            body = [each for each in item.named_children if each not in patterns]
            self._all(body, doubt or (self._doubt(written) if is_open else None))
            if True in met:
                return

    def _for(self, node: Node, doubt: str | None) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if body is None or variable is None:
            return
        found = [each for value in node.children_by_field_name("value") for each in self._words.of(value)]
        is_known = not any(error is not None or "*" in word for word, error in found) and len(found) <= MAX_ROUNDS
        if doubt is None and is_known and not LOOP_ENDS.search(text_of(body)):
            for word, _ in found:
                self._script.set(text_of(variable), word)
                self._one(body, None)
            return
        header = text_of(node)[: body.start_byte - node.start_byte].rstrip("; \n")
        why = doubt or self._doubt(header)
        self._script.forget(text_of(variable), problem(self._script.where(node), header, why))
        self._one(body, why)

    def _while(self, node: Node, doubt: str | None) -> None:
        body = node.child_by_field_name("body")
        if body is None:
            return
        condition = [each for each in node.children_by_field_name("condition") if each.is_named]
        for _ in range(MAX_ROUNDS):
            holds = self._conditions.all_hold(condition) if node.type == "while_statement" else None
            holds = not holds if holds is not None and text_of(node).startswith("until") else holds
            if holds is False:
                return
            if holds is None or doubt is not None or LOOP_ENDS.search(text_of(body)):
                break
            self._one(body, None)
        header = text_of(node)[: body.start_byte - node.start_byte].rstrip("; \n")
        self._one(body, doubt or self._doubt(header))

    def _define(self, node: Node, doubt: str | None) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._script.functions[text_of(name)] = body  # where it is not known whether it is defined, it is called

    def _unset(self, node: Node, doubt: str | None) -> None:
        script = self._script
        for each in node.named_children:
            name = text_of(each)
            if name in script.fixed or name.startswith("-"):
                continue
            if doubt is not None:
                script.forget(name, problem(script.where(node), name, doubt))
                continue
            script.variables.pop(name, None)
            script.arrays.pop(name, None)
            script.unknown.pop(name, None)
            script.environment = {key: value for key, value in script.environment.items() if key != name}

    def _subshell(self, node: Node, doubt: str | None) -> None:
        inner = _Reader(self._script.inner())
        inner._steps, inner._depth = self._steps, self._depth
        try:
            inner._all(node.named_children, doubt)
        except _Ended:
            return
        finally:
            self._steps = inner._steps


def _inside(part: Node) -> Node:
    return part.named_children[0] if part.type == "command_name" and part.named_children else part


def _head(node: Node) -> str:
    """Return the first word of a command, of a list that of its last one."""
    if node.type in {"list", "redirected_statement", "pipeline"} and node.named_children:
        inner = [child for child in node.named_children if not child.type.endswith("_redirect")]
        return _head(inner[-1 if node.type == "list" else 0]) if inner else ""
    if node.type == "declaration_command":
        return "export"
    name = node.child_by_field_name("name") if node.type == "command" else None
    return "" if name is None else text_of(name)


def _is_doubtful(node: Node) -> bool:
    """Whether a list holds what only runs where another command fails."""
    return node.type == "list" and any(text_of(child) == "||" for child in node.children)


def _branch(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the condition and the body of a branch of ``if``."""
    condition: list[Node] = []
    body: list[Node] = []
    is_condition = node.type != "else_clause"
    for child in node.children:
        if child.type == "then":
            is_condition = False
        elif child.is_named and child.type not in {"elif_clause", "else_clause", "comment"}:
            (condition if is_condition else body).append(child)
    return condition, body


def _between(nodes: Sequence[Node]) -> str:
    return "; ".join(text_of(each) for each in nodes)


def _broken(node: Node) -> Iterator[Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
        return
    for child in node.children:
        if child.has_error or child.is_missing:
            yield from _broken(child)
