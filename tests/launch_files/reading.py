"""Whether a launch file is read as a real shell, or Hydra, read it."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flotilla.importers.source import Given
from flotilla.importers.systems import SCRIPTS, read, read_openrlhf
from flotilla.importers.values import same
from flotilla.importers.verl.launch import MODULE
from flotilla.shared.errors import InvalidSpec
from tests.launch_files.files import LaunchFile

Beside = Callable[[str], str | None]

UNTOLD = frozenset({"defaults", MODULE, "--config-name", "--config-path", "--config-dir"})
"""Names of which the truth says nothing, or says it by the name of the program."""
DATE = re.compile(r"(?<!\d)20\d{6}(?:\d\d|_\d{4}(?:\d\d)?)?(?!\d)|(?<=_)\d\d-\d\d-\d\d$")
"""What ``$(date +...)`` printed when a script ran, and when it was read."""
PLACES = (("HOME", "~"), ("PWD", "."))
"""Folders of the machine that trains, which the importer leaves as they are."""


class Reading(StrEnum):
    """How much of a file is read as it was meant."""

    EXACT = "exact"
    PARTLY = "partly"
    """Some values are not known, and said to be so."""
    DIFFERENT = "different"
    """A value, or a name, is another than it was, in silence."""
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class Read:
    """What a file was read as.

    Attributes:
        reading: how much of it is right.
        differs: names that are read differently, with both values; or those that are not known; or why nothing is.
    """

    reading: Reading
    differs: tuple[str, ...] = ()


def compare(file: LaunchFile, beside: Beside) -> Read:
    """Read a file, and compare that with what really happened to it.

    A file of which that is not known is exact where all of it is read.
    """
    try:
        given = read(file.system, file.text, (), file.environment, source=file.name, beside=beside)
    except InvalidSpec as error:
        return Read(Reading.UNREAD, (error.detail,))
    found = {each.spelling: each for each in given}
    unknown = [name for name, each in found.items() if each.refusal is not None and name not in UNTOLD]
    truth = _truth(file, beside)
    if truth is not None:
        truth = {name: value for name, value in truth.items() if not _is_untold(name)}
        found = {name: each for name, each in found.items() if not _is_untold(name)}
        unknown = [name for name in unknown if name not in truth or not _is_same(found[name].value, truth[name], file)]
        differs = [*_differences(found, truth, unknown, file)]
        if differs:
            return Read(Reading.DIFFERENT, tuple(differs))
    return Read(Reading.PARTLY, tuple(unknown)) if unknown else Read(Reading.EXACT)


def _differences(
    found: Mapping[str, Given], truth: Mapping[str, Any], unknown: Sequence[str], file: LaunchFile
) -> list[str]:
    has_words = any(
        "$" in name for name in unknown
    )  # what a variable that is not known stands for may be any parameter
    missing = [] if has_words else [name for name in truth if name not in found and not _is_below(name, found)]
    invented = [
        name
        for name, each in found.items()
        if name not in truth and each.refusal is None and each.where != "default" and not _is_below(name, truth)
    ]
    other = [
        name
        for name, value in truth.items()
        if name in found and name not in unknown and not _is_same(found[name].value, value, file)
    ]
    return [
        *(f"{name}: is {_short(truth[name])}, read as {_short(found[name].value)}" for name in other),
        *(f"{name}: is {_short(truth[name])}, not read" for name in missing),
        *(f"{name}: read as {_short(found[name].value)}, is not there" for name in invented),
    ]


def _is_untold(name: str) -> bool:
    return name in UNTOLD or name.startswith("hydra.")


def _is_same(found: Any, told: Any, file: LaunchFile) -> bool:
    return same(_placed(found, file), _placed(told, file))


def _is_below(name: str, known: Mapping[str, Any]) -> bool:
    """Whether a section of that name, or one above it, is read: an empty one stands for its absence."""
    return any(each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in known)


def _truth(file: LaunchFile, beside: Beside) -> dict[str, Any] | None:
    """Return what really happened as names and values; None where it is not known."""
    if file.resolved is not None:
        return dict(file.resolved)
    if file.program is None or not file.name.endswith(SCRIPTS):
        return None
    try:
        if file.system == "openrlhf":
            given = read_openrlhf(["python", "-m", file.program, *file.arguments])
        else:
            line = shlex.join(["python3", "-m", file.program, *file.arguments])
            given = read(file.system, line, (), file.environment, source="truth.sh", beside=beside)
    except InvalidSpec:
        return None
    return {each.spelling: each.value for each in given}


def _placed(value: Any, file: LaunchFile) -> Any:
    if isinstance(value, list):
        return [_placed(each, file) for each in value]
    if not isinstance(value, str):
        return value
    for variable, sign in PLACES:
        if place := file.environment.get(variable):
            value = re.sub(rf"{re.escape(place)}(?=/|\W|$)", sign, value)
    return DATE.sub("DATE", re.sub(r"(?:(?<=\W)|^)\./(?:\./)*", "./", value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
