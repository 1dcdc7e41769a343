"""The commands that a page tells a reader to type."""

import re
import shlex
from collections.abc import Iterator

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4,}\S.*\n(?:\n(?= {4}))*)+", re.MULTILINE)
NAMED = re.compile(r"^`([\w.-]+)`[^\n]*:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SHELLS = {"", "sh", "bash", "shell", "console", "text"}
ENDS = set(";&|<>()")
ASSIGNMENT = re.compile(r"\w+=.*")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")


def blocks(page: str) -> Iterator[str]:
    """List the lines of a page's code blocks that a shell may read; continued lines are one."""
    for _, language, text in FENCED.findall(page):
        if language in SHELLS:
            yield from _lines(text)
    for text in INDENTED.findall(FENCED.sub("", page)):
        yield from _lines(text)


def named_files(page: str) -> dict[str, str]:
    """Find the files that a page shows: a block after a line that begins with the file's name and ends with a colon."""
    return dict(NAMED.findall(page))


def inline(page: str) -> Iterator[str]:
    """List what stands in a page's sentences as code."""
    yield from INLINE.findall(INDENTED.sub("", FENCED.sub("", page)))


def _lines(text: str) -> Iterator[str]:
    yield from (line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines())


def commands(line: str) -> Iterator[list[str]]:
    """Split a line into its simple commands, without variables that are set before one, comments and redirections.

    ``[--json]``, an option that may be left out, counts as given; ``...`` as nothing; a placeholder such as ``N`` as 1.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= ENDS:
            if command:
                yield command
            command = []
        elif command or not ASSIGNMENT.fullmatch(word):
            plain = word.strip("[]")
            if plain not in {"", "..."}:
                command.append("1" if PLACEHOLDER.fullmatch(plain) else plain)
