"""What a step of the embedded engine reports."""

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla.services.rollout.engines.base import Completion
from flotilla.shared.errors import FlotillaError


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A request has ended: one completion per seed."""

    request_id: str
    completions: Sequence[Completion]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationFailed:
    """A request has failed."""

    request_id: str
    error: FlotillaError


@dataclass(frozen=True, slots=True, eq=False)
class Updated:
    """A weight update was applied, or was refused with ``error``."""

    update_id: int
    error: FlotillaError | None


Outcome = Generated | GenerationFailed | Updated
