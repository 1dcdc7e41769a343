"""What a caller may ask of an engine that runs elsewhere (a thread or a process), and how it looks on a wire.

Every ``Call`` has a number and gets one reply with it: a result or an error. The other commands get none.
"""

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample a request; the result is its completions."""

    call: int
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Replace the weights; the result is None."""

    call: int
    image: Path
    version: int
    mode: OnWeightUpdate
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Let requests have an adapter; the result is None. See ``AddsAdapters``."""

    call: int
    name: str
    file: Path | None
    scale: float
    version: int
    mode: OnWeightUpdate


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget an adapter; the result is None."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class BeginTransfer:
    """A ``WeightTransfer`` begins, under a number; the commands of its methods follow."""

    transfer: int
    image: Path
    version: int


@dataclass(frozen=True, slots=True)
class AdvanceTransfer:
    """See ``WeightTransfer.advance``."""

    transfer: int
    bytes_arrived: int


@dataclass(frozen=True, slots=True)
class CompleteTransfer:
    """See ``WeightTransfer.complete``."""

    transfer: int


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """See ``WeightTransfer.abort``."""

    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class TakeLoad:
    """Take a snapshot, of all or of one adapter's part; the result is an ``EngineLoad``."""

    call: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free weights and cache; the result is None."""

    call: int


@dataclass(frozen=True, slots=True)
class DiscardWeights:
    """Give the weights up, and keep their memory for others; the result is None."""

    call: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Read the initial weights; the result is None."""

    call: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request now."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget a call whose caller no longer waits: end its request, or drop its update if it was not applied."""

    call: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Record so many steps under each of these versions; see ``ProfilesSteps.profile``."""

    directory: Path
    versions: frozenset[int]
    num_steps: int
    service_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """Abort everything, reply to it, and end."""


AdapterCall = LoadAdapter | DropAdapter
Call = Generate | UpdateWeights | AdapterCall | TakeLoad | Sleep | DiscardWeights | Wake
TransferCommand = BeginTransfer | AdvanceTransfer | CompleteTransfer | AbortTransfer
Command = Call | TransferCommand | Abort | Cancel | Profile | Close
Result = Sequence[Completion] | EngineLoad | FlotillaError | None
Answer = Sequence[Completion] | EngineLoad | None
"""The result of a call that does not fail."""

_EXPERTS = TypeAdapter(RoutedExperts)
_READERS: dict[str, TypeAdapter[Command]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (*Call.__args__, *TransferCommand.__args__, Abort, Cancel, Profile, Close)  # type: ignore[attr-defined]
}


def command_to_wire(command: Command) -> list[Any]:
    """Make plain JSON values of a command."""
    name = type(command).__name__
    return [name, _READERS[name].dump_python(command, mode="json")]


def command_from_wire(wire: Sequence[Any]) -> Command:
    """Read what ``command_to_wire`` made.

    Raises:
        ValueError: it is no command.
    """
    name, fields = wire
    if name not in _READERS:
        raise ValueError(f"no such command: {name!r}")
    return _READERS[name].validate_python(fields)


def answer_to_wire(answer: Answer) -> Any:
    """Make plain JSON values of an answer."""
    if answer is None:
        return None
    if isinstance(answer, EngineLoad):
        return asdict(answer)
    return [
        [
            _text(each.token_ids, "<i4"),
            _text(each.log_probs, "<f4"),
            each.versions,
            each.finish_reason,
            each.num_resumed,
            None if each.experts is None else _EXPERTS.dump_python(each.experts, mode="json"),
        ]
        for each in answer
    ]


def answer_from_wire(wire: Any) -> Answer:
    """Read what ``answer_to_wire`` made."""
    if wire is None:
        return None
    if isinstance(wire, dict):
        return EngineLoad(**wire)
    return [
        Completion(
            np.frombuffer(base64.b64decode(token_ids), dtype="<i4"),
            np.frombuffer(base64.b64decode(log_probs), dtype="<f4"),
            tuple((start, version) for start, version in versions),
            FinishReason(finish_reason),
            num_resumed,
            None if experts is None else _EXPERTS.validate_python(experts),
        )
        for token_ids, log_probs, versions, finish_reason, num_resumed, experts in wire
    ]


def _text(values: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype, copy=False).tobytes()).decode("ascii")
