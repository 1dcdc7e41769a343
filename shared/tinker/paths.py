"""Names of the Tinker API, and where what they mean lies below the fleet's data directory.

``tinker://RUN/weights/NAME`` is a state that training continues from, ``tinker://RUN/sampler_weights/NAME`` what is
sampled from, ``tinker://RUN/external_weights/NAME`` what is downloaded; ``ephemeral`` ones belong to a sampling session
and have no address.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from flotilla.shared.errors import InvalidRequest

SCHEME = "tinker://"
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*:train:[0-9]+")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
FOLDER = "tinker"


class Kind(StrEnum):
    """What a saved model is for."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"
    EPHEMERAL = "ephemeral"


@dataclass(frozen=True, slots=True)
class SavedPath:
    """A saved model: whose, for what, and its name."""

    run: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if not RUN.fullmatch(self.run) or not NAME.fullmatch(self.name):
            raise InvalidRequest(f"{self.run!r} / {self.name!r}: a name has 1 to 128 letters, digits, '.', '_' and '-'")

    @classmethod
    def read(cls, text: str) -> Self:
        """Read ``tinker://RUN/KIND/NAME``.

        Raises:
            InvalidRequest: it is none.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in set(Kind):
            raise InvalidRequest(
                f"{text!r} is no path: it is written tinker://RUN/KIND/NAME, and KIND is weights, sampler_weights or "
                "external_weights"
            )
        return cls(parts[0], Kind(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    def below(self, data: Path) -> Path:
        """Return its directory below the fleet's data."""
        return data / FOLDER / "saved" / self.run / self.kind / self.name


def saved_of(data: Path, run: str) -> Path:
    """Return where all that a run saved lies."""
    if not RUN.fullmatch(run):
        raise InvalidRequest(f"{run!r} is no training run")
    return data / FOLDER / "saved" / run


def runs_with_state(data: Path) -> list[str]:
    """List the models that have a state on the disk."""
    return [each.name for each in (data / FOLDER / "state").glob("*") if RUN.fullmatch(each.name)]


def state_of(data: Path, run: str) -> Path:
    """Return where the present state of a model is kept, from which a new process continues."""
    if not RUN.fullmatch(run):
        raise InvalidRequest(f"{run!r} is no training run")
    return data / FOLDER / "state" / run
