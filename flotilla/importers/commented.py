"""The spec of an import as YAML in which each key has a comment: the parameter that it came from."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flotilla.importers.report import Entry

MOST_NAMED = 3
"""Parameters that a comment names; of more it says how many there are besides."""
WIDTH = 110


def commented(document: Mapping[str, Any], entries: Sequence[Entry], system: str, write: Callable[[Any], str]) -> str:
    """Write a document, each of its keys beside the parameters that set it.

    Args:
        document: plain data.
        entries: of the report.
        system: whose defaults the other keys are.
        write: writes a mapping as block YAML.
    """
    origins: dict[str, list[str]] = {}
    for entry in entries:
        for field in entry.fields:
            origins.setdefault(field, []).append(entry.name)
    return "".join(_lines(document, "", 0, origins, system, write))


def _lines(
    section: Mapping[str, Any],
    above: str,
    depth: int,
    origins: Mapping[str, Sequence[str]],
    system: str,
    write: Callable[[Any], str],
) -> list[str]:
    found: list[str] = []
    indent = "  " * depth
    for key, value in section.items():
        path = f"{above}{key}"
        below = [field for field in origins if field.startswith(f"{path}.")]
        names = _names(origins, path)
        is_section = isinstance(value, Mapping) and value
        if is_section and (below or names is None):
            # As YAML writes it: some words are no texts without quotes.
            head = write({key: {}}).rstrip().removesuffix(" {}")
            found.append(f"{indent}{head}{f'  # {names}' if names else ''}\n")
            found += _lines(value, f"{path}.", depth + 1, origins, system, write)
            continue
        text = textwrap.indent(write({key: value}), indent)
        said = names or f"follows from {system}'s defaults"
        if text.count("\n") == 1 and len(text) < WIDTH:
            found.append(f"{text.rstrip()}  # {said}\n")
        else:
            found.append(f"{indent}# {said}\n{text}")
    return found


def _names(origins: Mapping[str, Sequence[str]], path: str) -> str | None:
    """Name the parameters that set a key; None where none is known to."""
    found = list(dict.fromkeys(origins.get(path, ())))
    if not found:
        return None
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{', '.join(found[:MOST_NAMED])}{more}"
