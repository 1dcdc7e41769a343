"""Join a YAML file with those that its ``defaults`` list names, as Hydra does."""

import posixpath
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.importers.hydra import problem, read_yaml

Beside = Callable[[str], str | None]
"""Gives the text of the file of a name (without suffix, relative to the launch file); None where there is none."""

SELF = "_self_"
FILES = (".yaml", ".yml", ".py")
"""Suffixes of names that are whole."""


def nothing_beside(name: str) -> str | None:
    """Stand for a launch file that is not on a disk."""
    return None


def beside(folder: Path, read: Callable[[Path], str], *, first: Path | None = None) -> Beside:
    """Look for files in a folder, and above it within its repository.

    A launch file may come from someone else: wherever its names and links lead, nothing else is read.

    Args:
        folder: of the launch file.
        read: gives a file's text.
        first: a folder that the user named, which wins over it.
    """
    folders = [(folder, _repository(folder.resolve()))]
    if first is not None:
        folders.insert(0, (first, first.resolve()))

    def find(name: str) -> str | None:
        file = Path(name if name.endswith(FILES) else f"{name}.yaml").expanduser()
        for each, root in folders:
            path = (each / file).resolve()
            if path.is_relative_to(root) and path.is_file():
                return read(path)
        return None

    return find


def _repository(folder: Path) -> Path:
    """Return the root of the git repository that a folder is in, or the folder where it is in none."""
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


@dataclass(frozen=True, slots=True)
class Composition:
    """Reads a file and all that it names.

    Attributes:
        beside: finds files.
        own: names of the system's own files, whose values are the defaults that the tables know.
        libraries: those of them that hold what other files refer to; one that lies beside is read.
        defined: the names that such files hold.
    """

    beside: Beside
    own: Collection[str]
    libraries: Collection[str] = ()
    defined: set[str] = field(default_factory=set)

    def read(self, text: str, *, source: str, folder: str = "") -> dict[str, Any]:
        """Return dotted names; ``defaults`` stays among them as it was written.

        Args:
            text: what the file holds.
            source: its name, for messages.
            folder: that it lies in, as ``beside`` knows it; files that it names are searched for from there.

        Raises:
            InvalidSpec: a file does not parse, or is named and missing.
        """
        return self._joined(text, source, "", folder, (source,))

    def _joined(self, text: str, source: str, package: str, folder: str, trail: tuple[str, ...]) -> dict[str, Any]:
        flat = read_yaml(text if text.strip() or len(trail) == 1 else "{}", source=source)  # a file of nothing is one
        entries = flat.get("defaults")
        values = {f"{package}.{name}" if package else name: value for name, value in flat.items() if name != "defaults"}
        if entries is None:
            return values
        if not isinstance(entries, list):
            raise problem(source, entries, "defaults must be a list of files")
        found: dict[str, Any] = {} if package or len(trail) > 1 else {"defaults": entries}
        for entry in entries if SELF in entries else [*entries, SELF]:
            _merge(found, values if entry == SELF else self._entry(entry, source, package, folder, trail))
        return found

    def _entry(self, entry: Any, source: str, package: str, folder: str, trail: tuple[str, ...]) -> dict[str, Any]:
        if isinstance(entry, Mapping) and len(entry) == 1:
            key, option = next(iter(entry.items()))
            words = str(key).split()
            group, _, wanted = words[-1].partition("@")
            if option is None or group.partition("/")[0] == "hydra":
                return {}
            name, is_optional = f"{group}/{option}", "optional" in words
        elif isinstance(entry, str):
            (name, _, wanted), is_optional = entry.partition("@"), False
        else:
            raise problem(source, entry, "an entry of defaults is a file, or a group and its file")
        group, _, last = name.rpartition("/")
        if last in self.own and last not in self.libraries:
            return {}
        place = posixpath.normpath(name[1:] if name.startswith("/") else posixpath.join(folder, name))
        text = self.beside(place)
        if text is None and (is_optional or last in self.libraries):
            return {}
        if text is None:
            raise problem(source, name, f"defaults names a file that is not there: put it at {place}.yaml, or give the "
                          "whole configuration, as the option --cfg job of the launcher prints it")  # fmt: skip
        if place in trail:
            raise problem(source, name, "defaults must not lead back to the file itself")
        found = self._joined(text, place, _package(wanted, package, group), posixpath.dirname(place), (*trail, place))
        if last in self.libraries:
            self.defined.update(found)
        return found


def _package(wanted: str, package: str, group: str) -> str:
    """Return below which name a file's values stand: by itself below that of its folder."""
    if wanted == "_global_":
        return ""
    below = "" if wanted == "_here_" else wanted or ".".join(part for part in group.split("/") if part.strip("."))
    return ".".join(part for part in (package, below) if part)


def _merge(found: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set values; what stood at or below a name of theirs, or above it, is gone."""
    above = {name[:end] for name in values for end in _dots(name)}
    for name in [name for name in found if name in above or any(name[:end] in values for end in _dots(name))]:
        del found[name]
    found |= values


def _dots(name: str) -> list[int]:
    return [position for position, letter in enumerate(name) if letter == "."]
