"""What a spec names: its strings, and what of a folder its paths and patterns can mean."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

RESUME_FROM: Final = "checkpoint.resume_from"
"""Key of a checkpoint that an experiment begins from."""
SIGNS: Final = frozenset("*?[")
"""A part of a path with one of them may be a pattern."""
PLACES: Final = frozenset(
    {"path", "more_paths", "dump", "resume_from", "folder", "directory", "tracking_uri", "tasks", "readable"}
)
"""Last parts of keys whose value is looked through from a folder on, or as a pattern."""
_LOCAL_URL: Final = re.compile(r"(?:file|local):(?://[^/]*)?(/.*)|sqlite(?:\+\w+)?:///([^?]*).*", re.DOTALL)


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Go through all strings of a document, with their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each, key)


def named_in(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Go through all that a spec names, with the keys: of a checkpoint, ``WHERE@STEP``, where it is."""
    for key, text in texts_of(spec):
        where, at, step = text.rpartition("@")
        yield key, where if key == RESUME_FROM and at and step.isdigit() else text


def is_place(key: str) -> bool:
    """Whether folders above, and patterns, mean all that is below them or matches, rather than just one file."""
    return key.rpartition(".")[2] in PLACES


def local_paths(key: str, text: str) -> list[str]:
    """List the absolute paths that a text of a spec may be: none, one, or as written and unquoted.

    Args:
        key: of the text; a tracker's relative path counts from where the process works.
        text: a path, one below a home (``~``), or a local URL (``file:``, ``sqlite:``).
    """
    if text.startswith("/"):
        return [text]
    if text.startswith("~"):
        with contextlib.suppress(RuntimeError):  # nobody's home
            return [str(Path(text).expanduser())]
        return []
    if (url := _LOCAL_URL.fullmatch(text)) is not None:
        path = url[1] or url[2]
        return [str(Path.cwd() / each) for each in dict.fromkeys((path, unquote(path))) if each and "\0" not in each]
    if key.rpartition(".")[2] in {"directory", "tracking_uri"} and ":" not in text and text:
        return [str(Path.cwd() / text)]
    return []


def parts_below(text: str, root: str) -> tuple[str, ...]:
    """Return where a path leads below a folder, links followed; nothing where it leads elsewhere. Blocks.

    Args:
        text: an absolute path.
        root: whose links are followed already.
    """
    return _below(os.path.realpath(text), root) or ()


def reached(text: str, folder: str, *, as_pattern: bool = True) -> list[tuple[str, ...]]:
    """List what a path, taken literally and as a pattern, may mean of a folder; blocks.

    Args:
        text: an absolute path.
        folder: whose links are followed already.
        as_pattern: as a pattern, too.

    Returns:
        Parts of paths below the folder, perhaps with signs of a pattern; of the folder itself, or of a place above it
        from which it is reached, none. Empty: nothing in the folder can be meant.
    """
    parts = Path(text).parts
    at = next((number for number, part in enumerate(parts) if not SIGNS.isdisjoint(part)), len(parts))
    found = [_from(os.path.realpath(text), (), folder)]
    if as_pattern and at < len(parts):
        found.append(_from(os.path.realpath(Path(*parts[:at])), parts[at:], folder))
    return [each for each in found if each is not None]


def _from(begin: str, rest: tuple[str, ...], folder: str) -> tuple[str, ...] | None:
    below = _below(begin, folder)
    if os.pardir in rest:
        # What is matched on the way decides where that leads.
        return ()
    if below is not None:
        return below + rest
    way = _below(folder, begin)
    if way is None:
        return None
    for part, pattern in zip(way, rest, strict=False):
        if "**" in pattern:
            return ()
        if not fnmatchcase(part, pattern):
            return None
    return rest[len(way) :]


def _below(path: str, folder: str) -> tuple[str, ...] | None:
    """Return the parts of a path below a folder, none where it is the folder itself; None where it is elsewhere."""
    relative = Path(os.path.relpath(path, folder)).parts
    return None if relative[:1] == (os.pardir,) else relative
