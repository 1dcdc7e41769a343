"""What a caller may ask of an engine that runs elsewhere (a thread or a process), and how it looks on a wire.

Every ``Call`` has a number and gets one reply with it: a result or an error. The other commands get none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.resumption import Prefix, ResumeRule
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, error_for_code
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
    """Take a snapshot; the result is an ``EngineLoad``."""

    call: int


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
class Close:
    """Abort everything, reply to it, and end."""


Call = Generate | UpdateWeights | TakeLoad | Sleep | DiscardWeights | Wake
TransferCommand = BeginTransfer | AdvanceTransfer | CompleteTransfer | AbortTransfer
Command = Call | TransferCommand | Abort | Cancel | Close
Result = Sequence[Completion] | EngineLoad | FlotillaError | None


def command_to_wire(command: Command) -> dict[str, Any]:
    """Make a plain mapping of a command."""
    match command:
        case Generate(call, request):
            return {"do": "generate", "call": call, "request": asdict(request)}
        case UpdateWeights(call, image, version, mode):
            return {"do": "update", "call": call, "image": str(image), "version": version, "mode": mode.value}
        case BeginTransfer(transfer, image, version):
            return {"do": "begin_transfer", "transfer": transfer, "image": str(image), "version": version}
        case AdvanceTransfer(transfer, bytes_arrived):
            return {"do": "advance_transfer", "transfer": transfer, "bytes_arrived": bytes_arrived}
        case CompleteTransfer(transfer):
            return {"do": "complete_transfer", "transfer": transfer}
        case AbortTransfer(transfer, reason):
            return {"do": "abort_transfer", "transfer": transfer, "reason": reason}
        case TakeLoad(call):
            return {"do": "load", "call": call}
        case Sleep(call):
            return {"do": "sleep", "call": call}
        case DiscardWeights(call):
            return {"do": "discard", "call": call}
        case Wake(call):
            return {"do": "wake", "call": call}
        case Abort(request_id):
            return {"do": "abort", "request_id": request_id}
        case Cancel(call):
            return {"do": "cancel", "call": call}
        case Close():
            return {"do": "close"}


def command_from_wire(wire: Mapping[str, Any]) -> Command:
    """Read what ``command_to_wire`` made.

    Raises:
        ValueError: the mapping is no command.
    """
    match wire["do"]:
        case "generate":
            return Generate(wire["call"], _request_from_wire(wire["request"]))
        case "update":
            return UpdateWeights(wire["call"], Path(wire["image"]), wire["version"], OnWeightUpdate(wire["mode"]))
        case "begin_transfer":
            return BeginTransfer(wire["transfer"], Path(wire["image"]), wire["version"])
        case "advance_transfer":
            return AdvanceTransfer(wire["transfer"], wire["bytes_arrived"])
        case "complete_transfer":
            return CompleteTransfer(wire["transfer"])
        case "abort_transfer":
            return AbortTransfer(wire["transfer"], wire["reason"])
        case "load":
            return TakeLoad(wire["call"])
        case "sleep":
            return Sleep(wire["call"])
        case "discard":
            return DiscardWeights(wire["call"])
        case "wake":
            return Wake(wire["call"])
        case "abort":
            return Abort(wire["request_id"])
        case "cancel":
            return Cancel(wire["call"])
        case "close":
            return Close()
        case other:
            raise ValueError(f"no such command: {other!r}")


def _request_from_wire(wire: Mapping[str, Any]) -> GenerationRequest:
    sampling = SamplingParameters(**wire["sampling"])
    sampling = replace(sampling, stop=tuple(sampling.stop), stop_token_ids=tuple(sampling.stop_token_ids))
    request = GenerationRequest(**{**wire, "sampling": sampling, "resume": ResumeRule(**wire["resume"])})
    prefixes = tuple(None if each is None else _prefix_from_wire(each) for each in wire["prefixes"])
    return replace(request, prompt_ids=tuple(request.prompt_ids), seeds=tuple(request.seeds), prefixes=prefixes)


def _prefix_from_wire(wire: Mapping[str, Any]) -> Prefix:
    versions = tuple((start, version) for start, version in wire["versions"])
    return Prefix(tuple(wire["token_ids"]), tuple(wire["log_probs"]), versions)


def result_to_wire(result: Result) -> dict[str, Any]:
    """Make a plain mapping of a reply's result."""
    match result:
        case None:
            return {"is": "none"}
        case EngineLoad():
            return {"is": "load", **asdict(result)}
        case FlotillaError():
            return {"is": "error", "code": result.code, "detail": result.detail, "errors": result.errors} | {
                "context": result.context
            }
        case _:
            return {"is": "completions", "completions": [_completion_to_wire(completion) for completion in result]}


def result_from_wire(wire: Mapping[str, Any]) -> Result:
    """Read what ``result_to_wire`` made.

    Raises:
        ValueError: the mapping is no result.
    """
    fields = dict(wire)
    match fields.pop("is"):
        case "none":
            return None
        case "load":
            return EngineLoad(**fields)
        case "error":
            return error_for_code(fields["code"])(fields["detail"], errors=fields["errors"], **fields["context"])
        case "completions":
            return [_completion_from_wire(completion) for completion in fields["completions"]]
        case other:
            raise ValueError(f"no such result: {other!r}")


def _completion_to_wire(completion: Completion) -> dict[str, Any]:
    return {
        "token_ids": completion.token_ids.astype("<i4", copy=False).tobytes(),
        "log_probs": completion.log_probs.astype("<f4", copy=False).tobytes(),
        "versions": [list(run) for run in completion.versions],
        "finish_reason": completion.finish_reason.value,
        "num_resumed": completion.num_resumed,
    }


def _completion_from_wire(wire: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=np.frombuffer(wire["token_ids"], dtype="<i4"),
        log_probs=np.frombuffer(wire["log_probs"], dtype="<f4"),
        versions=tuple((start, version) for start, version in wire["versions"]),
        finish_reason=FinishReason(wire["finish_reason"]),
        num_resumed=wire["num_resumed"],
    )
