"""Files of rows: where they are, and how they are opened. Local paths need nothing; URLs go through fsspec.

What a network does not give is tried again a few times, since a run of days shall not end with one lost connection.

Which files of a folder hold a split: the conventions of datasets on the Hugging Face hub. Pure.

A README whose head lists ``configs`` with ``data_files`` decides. Else a file belongs to the split whose name is
in its path as a word (``train-00000-of-00002.parquet``, ``test/data.jsonl``), and where no file names any split all of
them are ``train``.
"""

import asyncio
import contextlib
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch, translate
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, TypeVar, cast
from urllib.parse import urljoin

import httpx
import yaml

from flotilla.shared.config.sections.data import DATA_SUFFIXES, RowsConfig, is_data_file, is_url
from flotilla.shared.environment.settings import GRADER_NETWORKS, IPNetwork
from flotilla.shared.errors import DataError, Unavailable
from flotilla.shared.locations.allowed import Places
from flotilla.shared.net.absence import BUSY_STATUS, absent_or
from flotilla.shared.net.client.address_policy import AddressRefused, permitted_address
from flotilla.shared.net.client.bearer_client import tls_context

WEB: Final = frozenset({"http", "https"})
PORTS: Final = {"http": 80, "https": 443}
MAX_REDIRECTIONS: Final = 5
SILENCE_SECONDS: Final = 30.0
FETCH_SECONDS: Final = 3600.0
MAX_BYTES: Final = 16 * 1024**3
MEMORY_BYTES: Final = 64 * 1024**2
"""What is kept in memory of a file; more is on disk."""


def fetch_from_web(url: str, networks: Sequence[IPNetwork]) -> IO[bytes]:
    """Fetch a file; blocks.

    Args:
        url: http or https.
        networks: that are not public, and may be asked all the same.

    Raises:
        DataError: the address is not allowed, there are too many redirections, or the server refuses.
        FileNotFoundError: there is nothing.
        OSError, httpx.HTTPError: it cannot be reached, or broke off.
    """
    end = time.monotonic() + FETCH_SECONDS
    with httpx.Client(follow_redirects=False, trust_env=False, timeout=SILENCE_SECONDS, verify=tls_context()) as client:
        at = url
        for _ in range(MAX_REDIRECTIONS + 1):
            answer = client.send(_request(client, at, url, networks), stream=True)
            with contextlib.closing(answer):
                if answer.is_redirect:
                    at = urljoin(at, answer.headers["location"])
                    continue
                if answer.status_code in {404, 410}:
                    raise FileNotFoundError(url)
                if not answer.is_success:
                    found = f"cannot read {url}: HTTP {answer.status_code}"
                    raise (Unavailable if answer.status_code in BUSY_STATUS else DataError)(found, path=url)
                # What a few bytes unpack to is the server's choice.
                if answer.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
                    raise DataError(f"cannot read {url}: it comes compressed, though it was asked not to", path=url)
                return _content(answer, url, end)
    raise DataError(f"cannot read {url}: more than {MAX_REDIRECTIONS} redirections", path=url)


def _content(answer: httpx.Response, url: str, end: float) -> IO[bytes]:
    with contextlib.ExitStack() as unless_whole:
        content = unless_whole.enter_context(tempfile.SpooledTemporaryFile(MEMORY_BYTES))
        for chunk in answer.iter_raw():
            content.write(chunk)
            if content.tell() > MAX_BYTES:
                raise DataError(f"cannot read {url}: it has more than {MAX_BYTES} bytes", path=url)
            if time.monotonic() > end:
                raise Unavailable(f"cannot read {url}: it takes more than {FETCH_SECONDS:g} s", path=url)
        content.seek(0)
        unless_whole.pop_all()
        return cast(IO[bytes], content)


def _request(client: httpx.Client, at: str, url: str, networks: Sequence[IPNetwork]) -> httpx.Request:
    """Make the request to the address that was checked, so that a name cannot mean another one a moment later."""
    try:
        target = httpx.URL(at)
        host, port = target.raw_host.decode(), target.port or PORTS.get(target.scheme)
    except (httpx.InvalidURL, ValueError) as error:
        raise DataError(f"cannot read {url}: {error}", path=url) from None
    if port is None or not host:
        raise DataError(f"cannot read {url}: it leads to {at}, which is no address of the web", path=url)
    try:
        address = asyncio.run(permitted_address(host, port, private=networks))
    except AddressRefused:
        raise DataError(
            f"cannot read {url}: {host} is not a public address; the gateway's {GRADER_NETWORKS} may name its network",
            path=url,
        ) from None
    headers = {"Host": target.netloc.decode(), "Accept-Encoding": "identity"}
    pinned = target.copy_with(host=address)
    return client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": host})


README: Final = "README.md"
DESCRIPTIONS: Final = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files that describe rows, and hold none."""
TRAIN: Final = "train"
WORDS: Final[Mapping[str, str]] = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words in a path, and the split that they name."""


def files_of_split(
    names: Iterable[str], *, split: str | None, subset: str | None, readme: str | None, where: str
) -> list[str]:
    """Choose the files of a split.

    Args:
        names: paths of all files, relative to the folder, with forward slashes.
        split: its name; None is train.
        subset: configuration of the README, or else a folder; None is the default one.
        readme: text of README.md, if there is one.
        where: the folder, for messages.

    Returns:
        At least one path, sorted.

    Raises:
        DataError: there is no such split or subset; the detail lists those that there are.
    """
    data = sorted(name for name in names if is_data_file(name) and PurePosixPath(name).name not in DESCRIPTIONS)
    configs = _configs(readme)
    found = _by_readme(data, configs, subset, where) if configs else _by_name(data, subset, where)
    wanted = split or TRAIN
    if not found.get(wanted):
        there = ", ".join(sorted(name for name, files in found.items() if files)) or "none: it has no files of rows"
        raise DataError(f"{where} has no split {wanted!r}; splits there: {there}", split=wanted)
    return found[wanted]


def _configs(readme: str | None) -> list[Mapping[str, Any]]:
    match = re.match(r"---\n(.*?)\n---(\n|$)", readme or "", re.DOTALL)
    try:
        head = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return []
    configs = head.get("configs") if isinstance(head, dict) else None
    return [
        each
        for each in (configs if isinstance(configs, list) else [])
        if isinstance(each, dict) and each.get("data_files")
    ]


def _by_readme(
    data: Sequence[str], configs: Sequence[Mapping[str, Any]], subset: str | None, where: str
) -> dict[str, list[str]]:
    named = {str(config.get("config_name", "default")): config for config in configs}
    default = next((name for name, config in named.items() if config.get("default")), None)
    wanted = subset or default or ("default" if "default" in named else None)
    if wanted is None and len(named) == 1:
        wanted = next(iter(named))
    if wanted not in named:
        what = f"no subset {wanted!r}" if wanted else "several subsets, and no default one"
        raise DataError(f"{where} has {what}; subsets there: {', '.join(sorted(named))}", subset=subset)
    splits: dict[str, list[str]] = {}
    for name, patterns in _data_files(named[wanted]["data_files"]):
        matching = [file for file in data if any(fnmatch(file, pattern) for pattern in patterns)]
        splits[name] = sorted({*splits.get(name, []), *matching})
    return splits


def _data_files(written: Any) -> list[tuple[str, list[str]]]:
    """Read ``data_files``: a pattern, a list of patterns, or a list of {split, path}."""
    items = written if isinstance(written, list) else [written]
    if all(isinstance(item, dict) for item in items):
        return [(str(item.get("split", TRAIN)), _patterns(item.get("path"))) for item in items]
    return [(TRAIN, _patterns(written))]


def _patterns(written: Any) -> list[str]:
    items = written if isinstance(written, list) else [written]
    return [str(PurePosixPath(str(item))) for item in items if item]


def _by_name(data: Sequence[str], subset: str | None, where: str) -> dict[str, list[str]]:
    if subset is not None:
        inside = [name for name in data if subset in PurePosixPath(name).parts[:-1]]
        if not inside:
            folders = sorted({part for name in data for part in PurePosixPath(name).parts[:-1]})
            raise DataError(f"{where} has no subset {subset!r}; folders there: {', '.join(folders) or 'none'}")
        data = inside
    splits: dict[str, list[str]] = {}
    for name in data:
        splits.setdefault(_split_of(name) or "", []).append(name)
    if set(splits) <= {""}:
        return {TRAIN: list(data)}
    return {name: files for name, files in splits.items() if name}


def _split_of(name: str) -> str | None:
    """Find the split that a path names; the file's own name counts before its folders."""
    path = PurePosixPath(name)
    for part in (path.stem, *reversed(path.parts[:-1])):
        words = [WORDS[word] for word in re.split(r"[^A-Za-z]+", part.lower()) if word in WORDS]
        if words:
            return words[0]
    return None


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
        DataError: more entries than that had to be examined.
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
        DataError: there is none; the detail says where it was searched for.
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
    # Where a pattern begins: each file that it matches is examined when it is opened.
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
