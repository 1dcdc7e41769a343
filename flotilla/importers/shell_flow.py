"""Which commands of a script run: conditions on known values are followed; of others and of loops nothing is known."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from flotilla.importers.hydra import problem
from flotilla.shared.errors import InvalidSpec

Expand = Callable[[str], str]
"""Gives the value of a word, or raises ``InvalidSpec`` where it is not known."""

LOOPS = frozenset({"for", "while", "until", "select"})
ENDS = {"if": "fi", "case": "esac", **dict.fromkeys(LOOPS, "done")}
JOINS = frozenset({"&&", "||"})
"""What joins two commands, of which the second depends on the first."""
BRANCH_ENDS = frozenset({";;"})
"""What ends a branch of ``case``."""
SUCCEED = frozenset(
    {"", "cd", "pushd", "mkdir", "set", "export", "source", ".", "echo", "pip", "pip3", "sleep", "ray", "rm", "cp"}
)
"""Commands that a launch script takes to succeed; others before ``&&`` may be questions."""
PATTERN = frozenset("*?[~")
NOT_PLAIN = frozenset("'\"\\$`")
"""What of a pattern has to be expanded or unquoted."""
TEXTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": lambda left, right: left == right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}
NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}


@dataclass(slots=True)
class Frame:
    """A condition or loop that has begun.

    Attributes:
        opening: its first word.
        runs: whether its commands run now; None where that is not known.
        has_run: whether an earlier branch of it has run.
        is_header: whether its condition is still being read.
        join: what joins the next part of the condition to those before.
        groups: what was known before each ``{`` of the condition that is open, and what joins that to it.
        subject: what a ``case`` compares; None where that is not known.
        matches: whether one of the patterns that are being read is met; None where that is not known.
        is_pattern: whether a pattern of a ``case`` is being read.
        written: how it begins, for messages.
    """

    opening: str
    runs: bool | None
    has_run: bool | None = False
    is_header: bool = True
    join: str | None = None
    groups: list[tuple[bool | None, str | None]] = field(default_factory=list)
    subject: str | None = None
    matches: bool | None = False
    is_pattern: bool = False
    written: str = ""

    def end_branch(self) -> None:
        """Take note of what is known of the branch that ends; the next one has not begun."""
        self.has_run = True if self.runs or self.has_run else None if None in {self.runs, self.has_run} else False


@dataclass(slots=True)
class Chain:
    """Follows commands that ``&&`` and ``||`` join: the first is taken to succeed, unless it is one that asks.

    Attributes:
        join: the operator before the next command.
        is_doubtful: whether that only runs if another one fails.
        before: the first word of the command before it.
    """

    join: str | None = None
    is_doubtful: bool = False
    before: str = ""

    def step(self, words: Sequence[str], rest: Sequence[str]) -> bool:
        """Take one command, ``rest`` without the words of conditions; says whether it runs for certain."""
        if words[0] in JOINS:
            self.join = words[0]
            return False
        if self.join is None:
            self.before = ""
        self.is_doubtful = self.join == "||" or (self.is_doubtful and self.join is not None)
        is_assignment = bool(rest) and "=" in rest[0]
        is_asked = self.join == "&&" and is_assignment and self.before not in SUCCEED
        self.join = None
        if rest and not is_assignment:
            self.before = rest[0]
        return not self.is_doubtful and not is_asked


@dataclass(slots=True)
class Flow:
    """Follows a script command by command."""

    frames: list[Frame] = field(default_factory=list)

    @property
    def runs(self) -> bool | None:
        """Whether the command at hand runs; None where that is not known."""
        states = [frame.runs for frame in self.frames]
        return False if False in states else None if None in states else True

    @property
    def doubt(self) -> str | None:
        """What it depends on whether the command at hand runs, as it is written; None where that is known."""
        return next((frame.written for frame in self.frames if frame.runs is None), None)

    def step(self, words: Sequence[str], expand: Expand, where: str) -> list[str]:
        """Take the words that say what runs off a command; gives the rest.

        Raises:
            InvalidSpec: a word stands where nothing has begun that it could belong to.
        """
        head, rest = words[0], list(words[1:])
        if self.frames and self.frames[-1].opening == "case" and head != "esac":
            if head in BRANCH_ENDS:
                self.frames[-1].end_branch()
                self.frames[-1].runs, self.frames[-1].matches, self.frames[-1].is_pattern = False, False, True
                return []
            if self.frames[-1].is_pattern:
                rest = _patterns(self.frames[-1], words, expand)
                return self.step(rest, expand, where) if rest else []
        if head in JOINS:
            if self.frames and self.frames[-1].is_header:
                self.frames[-1].join = head
            return []
        if head == "case":
            return self._case(rest, expand, where)
        if head in ENDS:
            self.frames.append(Frame(head, _holds(rest, expand) if head == "if" and self.runs else None))
            self.frames[-1].written = " ".join(words)
            return []
        if head in ENDS.values():
            if ENDS[self._innermost(head, where).opening] != head:
                raise problem(where, head, f"{self.frames[-1].opening} stands open and ends with another word")
            self.frames.pop()
            return []
        if head in {"elif", "else"}:
            self._next_branch(head, rest, expand, where)
            return [] if head == "elif" else self.step(rest, expand, where) if rest else []
        if head in {"then", "do"}:
            self._innermost(head, where).is_header = False
            return self.step(rest, expand, where) if rest else []
        if self.frames and self.frames[-1].is_header:  # a second command of the condition
            self._join(words, expand)
            return []
        return list(words)

    def _case(self, words: Sequence[str], expand: Expand, where: str) -> list[str]:
        """Begin ``case WORD in``; gives what follows it on the line, from its first pattern on."""
        frame = Frame("case", False, is_header=False, is_pattern=True, written=f"case {' '.join(words[:2])}")
        if self.runs:
            with suppress(InvalidSpec):
                frame.subject = expand(words[0]) if words else None
        self.frames.append(frame)
        return self.step(words[2:], expand, where) if words[2:] else []

    def _join(self, words: Sequence[str], expand: Expand) -> None:
        """Take one more part of an ``if``'s condition; of a loop's nothing is known."""
        frame, first = self.frames[-1], self.frames[-1].runs
        frame.written += f" {frame.join or ';'} {' '.join(words)}"
        if frame.has_run:  # an earlier branch has run
            return
        if words[0] == "{":
            frame.groups.append((first, frame.join))
            frame.runs, frame.join = _holds(words[1:], expand), None
            return
        second = None
        is_group = words[0] == "}" and bool(frame.groups)
        if is_group:
            second = first
            first, frame.join = frame.groups.pop()
        can_tell = frame.opening == "if" and frame.has_run is False and frame.join is not None
        if can_tell and not is_group:
            second = _holds(words, expand)
        if can_tell and frame.join == "&&":
            frame.runs = False if False in (first, second) else None if None in (first, second) else True
        elif can_tell:
            frame.runs = True if True in (first, second) else None if None in (first, second) else False
        else:
            frame.runs = None
        frame.join = None

    def _innermost(self, word: str, where: str) -> Frame:
        if not self.frames:
            raise problem(where, word, "stands where no condition or loop has begun")
        return self.frames[-1]

    def _next_branch(self, head: str, condition: Sequence[str], expand: Expand, where: str) -> None:
        frame = self._innermost(head, where)
        frame.end_branch()
        if frame.has_run:
            frame.runs = False
        else:
            holds = True if head == "else" else _holds(condition, expand)
            if head == "elif" and holds is None:
                frame.written = f"{head} {' '.join(condition)}"
            frame.runs = None if frame.has_run is None and holds is not False else holds
        frame.is_header = head == "elif"


def _patterns(frame: Frame, words: Sequence[str], expand: Expand) -> list[str]:
    """Take patterns of a ``case`` off a command, of which the last ends with a bracket; gives the rest."""
    for number, word in enumerate(words):
        met = _meets(frame.subject, word.removesuffix(")"), expand)
        frame.matches = True if True in (frame.matches, met) else None if None in (frame.matches, met) else False
        if word.endswith(")"):
            frame.is_pattern = False
            doubt = frame.has_run is None and frame.matches is not False
            frame.runs = False if frame.has_run else None if doubt else frame.matches
            return list(words[number + 1 :])
    return []


def _meets(subject: str | None, pattern: str, expand: Expand) -> bool | None:
    """Compare a value with one pattern; None where one of them is not known."""
    if pattern == "*":
        return True
    if subject is None:
        return None
    if not NOT_PLAIN & set(pattern):
        return fnmatchcase(subject, pattern)
    if PATTERN & set(pattern):
        return None
    try:
        return subject == expand(pattern)
    except InvalidSpec:
        return None


def _holds(words: Sequence[str], expand: Expand) -> bool | None:
    """Evaluate ``[ A = B ]`` and its like; None where it is something else, or of values that are not known."""
    inner = list(words)
    for opening, closing in (("[", "]"), ("[[", "]]"), ("test", None)):
        if inner[:1] == [opening] and (closing is None or inner[-1:] == [closing]):
            inner = inner[1:] if closing is None else inner[1:-1]
            break
    else:
        return None
    is_negated = inner[:1] == ["!"]
    try:
        found = _compared(inner[1:] if is_negated else inner, expand)
    except (InvalidSpec, ValueError):
        return None
    return None if found is None else found != is_negated


def _compared(words: Sequence[str], expand: Expand) -> bool | None:
    if len(words) == 1 and not words[0].startswith("-"):
        return bool(expand(words[0]))
    if len(words) == 2 and words[0] in {"-z", "-n"}:
        return (words[0] == "-n") == bool(expand(words[1]))
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator in NUMBERS:
        return NUMBERS[operator](int(expand(left)), int(expand(right)))
    if operator not in TEXTS or PATTERN & set(right):
        return None
    return TEXTS[operator](expand(left), expand(right))
