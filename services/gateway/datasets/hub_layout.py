"""Which files of a folder hold a split: the conventions of datasets on the Hugging Face hub. Pure.

A README whose head lists ``configs`` with ``data_files`` decides. Else a file belongs to the split whose name is
in its path as a word (``train-00000-of-00002.parquet``, ``test/data.jsonl``), and where no file names any split all of
them are ``train``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from flotilla.shared.config.sections.data import is_data_file
from flotilla.shared.errors import DataError

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
