"""What a command in ``$( )`` prints, of those that only do something to text: folders, dates, echo, own functions."""

import posixpath
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from tree_sitter import Node

from flotilla.importers.hydra import problem
from flotilla.importers.shell_script import NO_FOLDER, Script
from flotilla.importers.shell_words import Words, text_of

NOT_KNOWN: Final = "what a command prints is not known here: write the value, or give a variable as NAME=VALUE"
PROBE: Final = re.compile(r"\s*import torch_npu\s*")
"""What a script asks Python to find out whether there are NPUs; the fleet has none."""
PYTHON: Final = re.compile(r"python[\d.]*")
DATE: Final = re.compile(r"\+[\w%:.@ -]*")
Printed = tuple[str, bool]
"""Text, and whether the command succeeds."""


class Output:
    """Says what commands print.

    Args:
        script: what is known; left as it is.
        function: finds the body of a function by its name.
    """

    def __init__(self, script: Script, function: Callable[[str], Node | None]) -> None:
        self._script = script
        self._function = function

    def substituted(self, node: Node) -> str:
        """Return what stands in the place of ``$( )`` or of what is between backticks.

        Raises:
            InvalidSpec: it is not known.
        """
        inner = Output(self._script.inner(), self._function)
        return "".join(inner._printed(each)[0] for each in node.named_children).rstrip("\n")

    def folder(self, parts: Sequence[Node]) -> str:
        """Return where ``cd`` leads.

        Raises:
            InvalidSpec: it is not known.
        """
        words = [each for each in self._values(parts) if each not in {"--", "-P", "-L"}]
        return _within(self._script.known("PWD") or ".", words[0] if words else "~")

    def _values(self, parts: Sequence[Node]) -> list[str]:
        words = Words(self._script, self.substituted)
        found = [each for part in parts for each in words.of(part)]
        for _, error in found:
            if error is not None:
                raise error
        return [word for word, _ in found]

    def _printed(self, node: Node) -> Printed:
        inner = node.named_children
        match node.type:
            case "list":
                operator = next(text_of(child) for child in node.children if text_of(child) in {"&&", "||"})
                left, succeeds = self._printed(inner[0])
                if succeeds is (operator == "||"):
                    return left, succeeds
                right, succeeds = self._printed(inner[-1])
                return left + right, succeeds
            case "redirected_statement":
                body = node.child_by_field_name("body")
                if body is not None and ">&2" not in text_of(node).replace("2>&1", ""):
                    return self._printed(body)
            case "compound_statement" if inner:
                return "".join(self._printed(each)[0] for each in inner), True
            case "command":
                parts = [each for each in inner if not each.type.endswith("_redirect")]
                name = text_of(parts[0])
                if (body := self._function(name)) is not None and len(parts) == 1:
                    return self._printed(body)
                found = self._of_command(name, parts[1:])
                if found is not None:
                    return found
        raise problem(self._script.where(node), text_of(node)[:80], NOT_KNOWN)

    def _of_command(self, name: str, parts: Sequence[Node]) -> Printed | None:
        if name in {"cd", "pushd"}:
            self._script.variables["PWD"] = self.folder(parts)
            return "", True
        if name == "pwd":
            return (self._script.known("PWD") or ".") + "\n", True
        if PYTHON.fullmatch(name):
            words = self._values(parts)
            return ("", False) if words[:1] == ["-c"] and PROBE.fullmatch("".join(words[1:])) else None
        if name not in COMMANDS:
            return None
        found = COMMANDS[name]([each for each in self._values(parts) if each != "--"])
        return None if found is None else (found + "\n", True)


def _within(folder: str, path: str) -> str:
    """Return a path that is given from a folder; ``~`` and ``.`` are folders of the machine that trains.

    A script is started in its repository's root: what is above its own folder, and not known, is that.
    """
    if path.startswith(("/", "~")):
        return posixpath.normpath(path)
    found = posixpath.normpath(posixpath.join("" if path.startswith(NO_FOLDER) else folder, path))
    return "." if found.split("/")[0] == ".." else found


def _date(words: Sequence[str]) -> str | None:
    return datetime.now().astimezone().strftime(words[0][1:]) if len(words) == 1 and DATE.fullmatch(words[0]) else None


def _basename(words: Sequence[str]) -> str | None:
    if not words:
        return None
    name = posixpath.basename(words[0].rstrip("/"))
    return name.removesuffix(words[1]) if len(words) > 1 and name != words[1] else name


def _path(words: Sequence[str]) -> str | None:
    names = [word for word in words if not word.startswith("-")]
    return posixpath.normpath(names[0]) if len(names) == 1 else None


def _echo(words: Sequence[str]) -> str | None:
    return None if words[:1] and words[0].startswith("-") else " ".join(words)


COMMANDS: dict[str, Callable[[Sequence[str]], str | None]] = {
    "dirname": lambda words: posixpath.dirname(words[0].rstrip("/")) or "." if len(words) == 1 else None,
    "basename": _basename,
    "realpath": _path,
    "readlink": lambda words: _path(words[1:]) if words[:1] == ["-f"] else None,
    "date": _date,
    "echo": _echo,
}
"""Commands whose output depends on their arguments alone, or on the time."""
