"""The plan of faults: one line of text, read strictly.

    marks=/tmp/marks; streams.forward kill in=rollout nth=3 phase=after times=1; http.request slow seconds=0.2

Entries are separated by ``;``. Each is a site, a kind and parameters. ``marks`` stands alone: a directory in which
processes that come and go count together how often each entry with ``times`` has happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from flotilla.shared.config.base.model import TextConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.faults.sites import PLACES, PROCESSES, VARIABLE, Kind, Site

MARKS = "marks"
NEEDS_SECONDS = frozenset({Kind.STALL, Kind.SLOW, Kind.SKEW})
MAY_HAVE_SECONDS = NEEDS_SECONDS | {Kind.REORDER}
SWITCH_PATTERN = r"^[a-z][a-z0-9-]*$"
"""Marks begin with a digit: the two are never mistaken for each other."""
HAS_PHASE = frozenset({Kind.KILL, Kind.REFUSE})


class Fault(TextConfig):
    """One entry of the plan."""

    model_config = ConfigDict(populate_by_name=True)

    site: Site
    """Where."""
    kind: Kind
    """What."""
    process: Literal[PROCESSES] | None = Field(None, alias="in")  # type: ignore[valid-type]
    """In which processes; in all if not given."""
    nth: int | None = Field(None, ge=1)
    """At this reach of the site, from 1, counted in each process from 0."""
    probability: float | None = Field(None, gt=0, le=1)
    """At each reach with this probability, drawn from ``seed``."""
    seed: int = 0
    """Of ``probability``: the same draws in each process of the same name."""
    after_seconds: float | None = Field(None, ge=0)
    """At each reach from this time after the start of the process."""
    switch: str | None = Field(None, alias="while", pattern=SWITCH_PATTERN)
    """Only while the directory of ``marks`` holds a file of this name: made and removed, it switches the fault."""
    times: int | None = Field(None, ge=1)
    """At most so often: in each process, or in all of them together where the plan has ``marks``."""
    seconds: float | None = None
    """How long, how late or, for the clock, how far off."""
    phase: Literal["before", "after"] = "before"
    """Whether the operation is done first."""
    path: str | None = None
    """Only requests whose path begins so."""
    slices: int | None = Field(None, ge=0)
    """Only after this many slices of an image."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        place = PLACES[self.site]
        if self.kind not in place.kinds:
            allowed = ", ".join(sorted(place.kinds))
            raise ValueError(f"{self.site} knows no {self.kind}; it knows {allowed}")
        triggers = [name for name in ("nth", "probability", "after_seconds") if getattr(self, name) is not None]
        if len(triggers) > 1:
            raise ValueError(f"{' and '.join(triggers)} exclude each other: choose one")
        if self.seed and self.probability is None:
            raise ValueError("seed is that of probability: give both or neither")
        return self

    @model_validator(mode="after")
    def _fits_its_site(self) -> Self:
        place = PLACES[self.site]
        if (self.kind in NEEDS_SECONDS and self.seconds is None) or (
            self.kind not in MAY_HAVE_SECONDS and self.seconds is not None
        ):
            raise ValueError(f"{self.kind} {'needs' if self.kind in NEEDS_SECONDS else 'has no'} seconds")
        if self.seconds is not None and self.seconds < 0 and self.kind is not Kind.SKEW:
            raise ValueError("only a clock's seconds may be negative")
        if self.phase == "after" and not (place.has_after and self.kind in HAS_PHASE):
            raise ValueError(f"{self.kind} at {self.site} has no phase=after")
        if self.path is not None and not place.has_path:
            raise ValueError(f"{self.site} has no path")
        if self.slices is not None and not place.has_slices:
            raise ValueError(f"{self.site} has no slices")
        return self


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All faults of a fleet.

    Attributes:
        faults: in the order written; an entry's number, from 1, names it in logs and marks.
        marks: where processes count together; None if each counts for itself.
    """

    faults: tuple[Fault, ...]
    marks: Path | None = None


def parse_plan(text: str) -> FaultPlan:
    """Read a plan.

    Raises:
        InvalidRequest: an entry is malformed; the detail quotes it and names what is allowed.
    """
    faults: list[Fault] = []
    marks: Path | None = None
    for entry in filter(None, (part.strip() for part in text.replace("\n", ";").split(";"))):
        words = entry.split()
        if len(words) == 1 and words[0].startswith(f"{MARKS}="):
            marks = Path(words[0].removeprefix(f"{MARKS}="))
        else:
            faults.append(_fault(entry, words))
    if not faults:
        raise InvalidRequest(f"{VARIABLE} is set and names no fault: unset it, or write 'SITE KIND [NAME=VALUE ...]'")
    if marks is None and (switched := next((fault for fault in faults if fault.switch), None)) is not None:
        raise InvalidRequest(
            f"{VARIABLE}: while={switched.switch} is a file in the directory of {MARKS}: add {MARKS}=DIRECTORY"
        )
    return FaultPlan(tuple(faults), marks)


def _fault(entry: str, words: Sequence[str]) -> Fault:
    if len(words) < 2:
        raise InvalidRequest(f"{VARIABLE}: {entry!r} is not 'SITE KIND [NAME=VALUE ...]'")
    site, kind, *parameters = words
    _check_known(entry, "site", site, list(Site))
    _check_known(entry, "kind", kind, list(Kind))
    values: dict[str, str] = {"site": site, "kind": kind}
    for parameter in parameters:
        name, equals, value = parameter.partition("=")
        known = [field.alias or key for key, field in Fault.model_fields.items() if key not in {"site", "kind"}]
        _check_known(entry, "parameter", name, known)
        if not equals or not value or name in values:
            raise InvalidRequest(f"{VARIABLE}: {entry!r}: {name} must be given once, as {name}=VALUE")
        values[name] = value
    try:
        return Fault.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = f"{problem['loc'][0]}: " if problem["loc"] else ""
        raise InvalidRequest(f"{VARIABLE}: {entry!r}: {where}{problem['msg'].removeprefix('Value error, ')}") from None


def _check_known(entry: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = get_close_matches(name, known, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise InvalidRequest(f"{VARIABLE}: {entry!r}: no {what} {name!r}{meant} (allowed: {', '.join(known)})")
