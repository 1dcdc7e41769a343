"""A spec under change, and the list of what was changed."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

Document = dict[str, Any]
"""A spec, or a row, as plain data."""
Section = Mapping[str, Any]
"""A part of one, to be read."""
WIDTH: Final = 40


@dataclass(frozen=True, slots=True)
class Change:
    """One key that has another value in the trial.

    Attributes:
        key: dotted path in the spec.
        before, after: the values, as JSON writes them, shortened.
        why: the reason, in a few words.
    """

    key: str
    before: str
    after: str
    why: str


class Edits:
    """Changes a spec's document, and remembers what and why.

    Args:
        document: of the whole spec, defaults included; it stays as it is.
    """

    def __init__(self, document: Section) -> None:
        self.document: Document = deepcopy(dict(document))
        self.changes: list[Change] = []

    def at(self, path: str) -> Any:
        """Find the value at a dotted path; None where there is none. Numbers count entries of lists."""
        found: Any = self.document
        for part in path.split("."):
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                return None
        return found

    def set(self, path: str, value: Any, why: str) -> None:
        """Set a value; it is noted where it is another than before. Nothing is set below what is null."""
        *parents, last = path.split(".")
        above = self.at(".".join(parents)) if parents else self.document
        if isinstance(above, list) and last.isdecimal():
            before, above[int(last)] = above[int(last)], value
        elif isinstance(above, dict):
            before = above.get(last)
            above[last] = value
        else:
            return
        if before != value:
            self.changes.append(Change(path, _shown(before), _shown(value), why))

    def note(self, key: str, before: str, after: str, why: str) -> None:
        """Note a change that is none of the document."""
        self.changes.append(Change(key, _shown(before), _shown(after), why))

    def at_most(self, path: str, most: float, why: str) -> None:
        """Lower a number."""
        value = self.at(path)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > most:
            self.set(path, most, why)

    def scale(self, path: str, ratio: float, why: str) -> None:
        """Multiply a whole number, to 1 at least where it was not 0."""
        value = self.at(path)
        if isinstance(value, int) and not isinstance(value, bool) and value:
            self.set(path, max(round(value * ratio), 1), why)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False, default=str)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _plain(value: Any) -> Any:
    """Leave out of sections what they do not say."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each not in (None, [], {}, ())}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
