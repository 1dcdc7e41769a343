"""Files of rows: where they are, and how they are opened. Local paths need nothing; URLs go through fsspec.

What a network does not give is tried again a few times, since a run of days shall not end with one lost connection.
"""

import io
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import translate
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, TypeVar

from flotilla.services.gateway.datasets.hub_layout import README, files_of_split
from flotilla.services.gateway.datasets.web import WEB, fetch_from_web
from flotilla.shared.config.sections.data import DATA_SUFFIXES, RowsConfig, is_data_file, is_url
from flotilla.shared.errors import DataError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.net.absence import absent_or

PAUSES_SECONDS: Final = (1.0, 4.0)
"""Between tries of what a network did not give."""
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError)
Found = TypeVar("Found")


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


def files_of(rows: RowsConfig, places: Places | None = None) -> list[str]:
    """List the files that a path or a hub name means.

    Args:
        rows: the source.
        places: where they may be; None: anywhere.

    Returns:
        At least one local path or URL, in a fixed order.

    Raises:
        DataError: there is none; the detail says where it was looked for.
    """
    if rows.hub is not None:
        return _hub_files(rows)
    assert rows.path is not None
    if places is not None:
        _check_place(rows.path, places)
    if is_data_file(rows.path):
        return _matching(rows.path) if "*" in rows.path else [rows.path]
    if "*" in rows.path:
        endings = ", ".join(DATA_SUFFIXES)
        raise DataError(f"the pattern {rows.path} matches files of rows only: end it in {endings}", path=rows.path)
    names = _names_in(rows.path)
    readme = _text(f"{rows.path}/{README}", places) if README in names else None
    chosen = files_of_split(names, split=rows.split, subset=rows.subset, readme=readme, where=rows.path)
    return [f"{rows.path.rstrip('/')}/{name}" for name in chosen]


def open_bytes(path: str, places: Places | None = None) -> IO[bytes]:
    """Open a local file or a URL for reading.

    Args:
        path: of the file.
        places: where it may be; None: anywhere.

    Raises:
        DataError: it is not there, or nothing that is installed reaches it.
    """
    if not is_url(path):
        if places is not None:
            # Each file: a link in a folder that is allowed may lead out of it.
            places.check_file(path)
        try:
            return Path(path).open("rb")
        except FileNotFoundError:
            raise DataError(f"there is no file {path}", path=path) from None
        except OSError as error:
            raise absent_or(error, DataError(f"cannot read {path}: {error.strerror or error}", path=path)) from error

    if places is not None and places.check_protocol(path) in WEB:
        return _reached(path, lambda: fetch_from_web(path, places.networks))

    def fetch() -> IO[bytes]:
        with _fsspec(path).open(path, "rb") as file:
            return io.BytesIO(file.read())

    return _reached(path, fetch)


def _check_place(path: str, places: Places) -> None:
    if is_url(path):
        if places.check_protocol(path) in WEB and (not is_data_file(path) or "*" in path):
            raise DataError(f"{path}: folders and patterns cannot be listed over the web, name a file", path=path)
        return
    # Where a pattern begins: each file that it matches is looked at when it is opened.
    parts = takewhile(lambda part: not any(sign in part for sign in "*?["), Path(path).parts)
    places.check_file(str(Path(*parts)))


def _matching(pattern: str) -> list[str]:
    if is_url(pattern):
        found = _reached(pattern, lambda: _glob(pattern))
    else:
        try:
            found = list(bounded_glob(pattern))
        except (ValueError, OSError, re.error) as error:
            raise absent_or(error, DataError(f"the pattern {pattern} cannot be used: {error}", path=pattern)) from error
    if not found:
        raise DataError(f"no file matches {pattern}", path=pattern)
    return sorted(found)


def _names_in(folder: str) -> list[str]:
    if is_url(folder):
        return _reached(folder, lambda: _find(folder))
    root = Path(folder)
    if root.is_file():
        endings = ", ".join(DATA_SUFFIXES)
        raise DataError(f"{folder} is no folder, and no file of rows by its name: end it in {endings}", path=folder)
    if not root.is_dir():
        raise DataError(f"there is no file or folder {folder}", path=folder)
    return sorted(str(PurePosixPath(Path(path).relative_to(root))) for path in bounded_glob(str(root / "**" / "*")))


def _text(path: str, places: Places | None = None) -> str:
    with open_bytes(path, places) as file:
        return file.read().decode("utf-8", "replace")


def _glob(pattern: str) -> list[str]:
    system, path = _fsspec(pattern).core.url_to_fs(pattern)
    return [str(system.unstrip_protocol(name)) for name in system.glob(path)]


def _find(folder: str) -> list[str]:
    """List the files below a folder, by their path in it."""
    system, path = _fsspec(folder).core.url_to_fs(folder)
    return sorted(str(name)[len(path.rstrip("/")) + 1 :] for name in system.find(path))


def _fsspec(url: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url} is a URL, which needs fsspec: install flotilla[data]", path=url) from None
    return fsspec


def _reached(url: str, fetch: Callable[[], Found]) -> Found:
    for pause in (*PAUSES_SECONDS, None):
        try:
            return fetch()
        except DataError:
            raise
        except FileNotFoundError:
            raise DataError(f"there is nothing at {url}", path=url) from None
        except FINAL as error:
            raise DataError(f"cannot read {url}: {error}", path=url) from error
        except Exception as error:  # each protocol's package raises errors of its own
            if pause is None:
                raise absent_or(
                    error, DataError(f"cannot read {url}: {type(error).__name__}: {error}", path=url)
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def _hub_files(rows: RowsConfig) -> list[str]:
    """Download the files of a hub dataset's split into the hub's cache; there already, they are not fetched again."""
    assert rows.hub is not None
    where = rows.location()
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise DataError(f"{where} needs the package huggingface_hub: install flotilla[hub]", hub=rows.hub) from None
    api = HfApi()
    options: dict[str, Any] = {"repo_type": "dataset", "revision": rows.revision}
    try:
        names = _reached(where, lambda: api.list_repo_files(rows.hub, **options))
        readme = _text(api.hf_hub_download(rows.hub, README, **options)) if README in names else None
        chosen = files_of_split(names, split=rows.split, subset=rows.subset, readme=readme, where=where)
        folder = _reached(where, lambda: api.snapshot_download(rows.hub, allow_patterns=chosen, **options))
    except DataError as error:
        cause = error.__cause__
        if isinstance(cause, RevisionNotFoundError):
            raise DataError(f"{where} has no revision {rows.revision!r}", hub=rows.hub) from cause
        if isinstance(cause, RepositoryNotFoundError):
            raise DataError(f"there is no {where}, or it needs a token in HF_TOKEN", hub=rows.hub) from cause
        if isinstance(cause, HfHubHTTPError):
            raise DataError(f"the hub refuses {where}: {cause}", hub=rows.hub) from cause
        raise
    return [f"{folder}/{name}" for name in chosen]
