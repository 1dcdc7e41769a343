"""One launch file, tried: read, compared with the truth, imported by the command."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.importers.systems import beside, read_launch_text
from tests.launch_files.files import LaunchFile
from tests.launch_files.outcome import Outcome, import_into
from tests.launch_files.reading import Reading, compare


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a launch file.

    Attributes:
        id: of the file.
        system: whose it is.
        reading: how much of it is read as it was meant.
        differs: what is read differently, or not.
        outcome: how its import ends.
        refused: names of the parameters that are refused.
        reasons: why, by name.
        problems: what else keeps a spec from being made.
    """

    id: str
    system: str
    reading: Reading
    differs: tuple[str, ...]
    outcome: Outcome
    refused: tuple[str, ...]
    reasons: Mapping[str, str]
    problems: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        """Whether the program is at fault, and not the file."""
        return any(each.startswith("wrong:") for each in self.problems)

    @property
    def causes(self) -> tuple[str, ...]:
        """What each keeps the file out: refused names, and the fields of the spec that are missing or wrong."""
        names = (f"{name}: {self.reasons[name][:70]}" for name in self.refused)
        return tuple(dict.fromkeys([*names, *(each.partition(":")[0] for each in self.problems)]))

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "id": self.id,
            "reading": self.reading.value,
            "differs": list(self.differs),
            "outcome": self.outcome.value,
            "refused": list(self.refused),
            "problems": list(self.problems),
        }


def tried(files: Iterable[LaunchFile]) -> Iterator[Tried]:
    """Try each file in a folder of its own."""
    for file in files:
        around = beside(file.path.parent, read_launch_text) if file.path is not None else _neighbours(file)
        found = compare(file, around)
        with tempfile.TemporaryDirectory(prefix="launch-file-") as folder:
            ended = import_into(file, Path(folder))
        yield Tried(
            file.id, file.system, found.reading, found.differs, ended.outcome, ended.refused, ended.reasons,
            ended.problems,
        )  # fmt: skip


def _neighbours(file: LaunchFile) -> Any:
    def find(place: str) -> str | None:
        return next((file.beside[each] for each in (place, f"{place}.yaml") if each in file.beside), None)

    return find
