"""What pages tell a reader to type, line by line."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.shell_text import blocks, commands

ROOT = Path(__file__).parents[3]
GUIDES = (
    *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
PROGRAMS = {
    "flotilla",
    "python",
    "python3.11",
    "make",
    "curl",
    "pip",
    "docker",
    "kubectl",
    "sh",
    "git",
    "source",
    "eval",
}
COMMENT = re.compile(r"\s+#\s.*$")
OPTIONAL = re.compile(r"\s*\[[^]]*\]")

Line = tuple[str, str]
"""A page, as a path below the checkout, and a line of it that a shell reads."""


def plain(line: str) -> str:
    """Take a line without its comment, with single spaces."""
    return " ".join(COMMENT.sub("", line).split())


def documented() -> Iterator[Line]:
    """List every line of a code block that runs a program."""
    for page in GUIDES:
        for line in blocks(page.read_text(encoding="utf-8")):
            names = [words[0].rpartition("/")[2] for words in commands(line)]
            if names and PROGRAMS & set(names) and line[:1] not in "│{":
                yield page.relative_to(ROOT).as_posix(), plain(line)
