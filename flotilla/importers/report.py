"""What became of every parameter of a launch file, for people and as data."""

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.importers.parameter import Verdict
from flotilla.importers.values import shown

WIDTH = 116


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one parameter.

    Attributes:
        name: as it was written.
        value: what was written, shortened; hidden if it is a secret.
        where: file, override, script, command line, or default.
        verdict: what became of it.
        detail: how, or why.
        fields: spec fields that it set, with their final values.
    """

    name: str
    value: str
    where: str
    verdict: Verdict
    detail: str
    fields: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "name": self.name,
            "value": self.value,
            "where": self.where,
            "verdict": self.verdict.value,
            "detail": self.detail,
            "fields": dict(self.fields),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What became of every parameter.

    Attributes:
        system: where the launch file is from.
        entries: one per parameter.
        problems: what else keeps the spec from being made.
        suggestion: lines that tell what the spec could have besides.
    """

    system: str
    entries: Sequence[Entry]
    problems: Sequence[str]
    suggestion: Sequence[str] = ()

    @property
    def refused(self) -> list[Entry]:
        """The entries that make the import fail."""
        return [entry for entry in self.entries if entry.verdict is Verdict.REFUSED]

    @property
    def unsupported(self) -> list[Entry]:
        """The entries that ask for what is not done, without a change to what is trained."""
        return [entry for entry in self.entries if entry.verdict is Verdict.UNSUPPORTED]

    def counts(self) -> dict[str, int]:
        """Count the entries by verdict."""
        found = Counter(entry.verdict.value for entry in self.entries)
        return {verdict.value: found[verdict.value] for verdict in Verdict}

    def render(self) -> str:
        """Write it for people: what needs attention last."""
        lines: list[str] = []
        for verdict in Verdict:
            chosen = [entry for entry in self.entries if entry.verdict is verdict]
            if chosen:
                lines += ["", f"{verdict.value} ({len(chosen)})"]
            for entry in chosen:
                lines += _lines_of(entry)
        if self.problems:
            lines += ["", f"problems ({len(self.problems)})"]
            lines += [wrapped for problem in self.problems for wrapped in _wrapped(problem, "  ")]
        total = ", ".join(f"{number} {verdict}" for verdict, number in self.counts().items())
        head = [f"import from {self.system}: {total}"]
        if self.unsupported:
            head.append(f"{len(self.unsupported)} asked for and not done: see unsupported")
        return "\n".join([*head, *self.suggestion, *lines]) + "\n"


def _lines_of(entry: Entry) -> list[str]:
    origin = "" if entry.where == "file" else f"   ({entry.where})"
    lines = [f"  {entry.name} = {entry.value}{origin}"]
    lines += [f"      -> {field} = {_as_in_a_spec(value)}" for field, value in entry.fields.items()]
    return lines + _wrapped(entry.detail, "      ")


def _as_in_a_spec(value: Any) -> str:
    return shown(value if isinstance(value, str) else json.dumps(_written(value), ensure_ascii=False, default=str))


def _written(value: Any) -> Any:
    """Leave out of sections in a list what they do not say."""
    if isinstance(value, list | tuple):
        return [_written(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _written(each) for key, each in value.items() if each not in (None, [], {}, ())}
    return value


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent)
