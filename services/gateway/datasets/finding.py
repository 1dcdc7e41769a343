"""Files that a pattern means, looked for within bounds: a pattern may name the whole machine."""

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Final

from flotilla.shared.errors import DataError

MAX_ENTRIES: Final = 200_000
"""Looked at by one pattern: some seconds on a warm disk."""
ANY_FOLDERS: Final = "**"


def bounded_glob(pattern: str, *, max_entries: int = MAX_ENTRIES) -> Iterator[str]:
    """List the files that match, as ``Path.glob`` does: ``*``, ``?``, ``[...]``, and ``**`` for any folders.

    Links to folders are followed by name, but not by ``**``.

    Raises:
        DataError: more entries than that had to be looked at.
        OSError: a folder cannot be listed.
        ValueError: ``**`` is not all of a part.
    """
    path = Path(pattern)
    parts = path.parts[1:] if path.anchor else path.parts
    wrong = next((part for part in parts if ANY_FOLDERS in part and part != ANY_FOLDERS), None)
    if wrong is not None:
        raise ValueError(f"** must be all of a part of the path, got {wrong!r}")
    look = _Look(pattern, max_entries)
    yield from dict.fromkeys(look.files(path.anchor or ".", parts))


class _Look:
    def __init__(self, pattern: str, max_entries: int) -> None:
        self._pattern = pattern
        self._left = max_entries

    def files(self, folder: str, parts: Sequence[str]) -> Iterator[str]:
        name, rest = parts[0], parts[1:]
        if name == ANY_FOLDERS:
            # No folder at all is one of the ways.
            yield from self.files(folder, rest or ("*",))
            for entry in self._entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    yield from self.files(entry.path, parts)
            return
        if not any(sign in name for sign in "*?["):
            path = Path(folder) / name
            if rest and path.is_dir():
                yield from self.files(str(path), rest)
            elif not rest and path.is_file():
                yield str(path)
            return
        wanted = re.compile(translate(name))
        for entry in self._entries(folder):
            if not wanted.fullmatch(entry.name):
                continue
            if rest and entry.is_dir():
                yield from self.files(entry.path, rest)
            elif not rest and entry.is_file():
                yield str(Path(entry.path))

    def _entries(self, folder: str) -> list["os.DirEntry[str]"]:
        try:
            with os.scandir(folder) as found:
                entries = []
                for entry in found:
                    self._left -= 1
                    if self._left < 0:
                        raise DataError(
                            f"{self._pattern} means too many files to look for: name a folder", path=self._pattern
                        )
                    entries.append(entry)
                return entries
        except PermissionError:
            return []
