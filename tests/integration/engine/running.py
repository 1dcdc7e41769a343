"""Runs a synchronous engine to its end."""

from collections.abc import Sequence

from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.services.rollout.engines.embedded.engine import TorchEngine
from flotilla.services.rollout.engines.embedded.outcomes import Generated, Outcome, Updated
from flotilla.shared.errors import FlotillaError

Answers = dict[str, Sequence[Completion]]


def steps(engine: TorchEngine, num: int | None = None) -> Answers:
    """Step so often, or until the engine is idle; gives the completions of the requests that ended."""
    answers: Answers = {}
    while (num is None and not engine.is_idle) or (num is not None and num > 0):
        answers |= {o.request_id: o.completions for o in engine.step() if isinstance(o, Generated)}
        num = None if num is None else num - 1
    return answers


def outcomes(engine: TorchEngine) -> list[Outcome]:
    """Step until the engine is idle; gives all outcomes."""
    found: list[Outcome] = []
    while not engine.is_idle:
        found += engine.step()
    return found


def update_errors(found: Sequence[Outcome]) -> list[FlotillaError | None]:
    """List the errors of the updates among outcomes."""
    return [outcome.error for outcome in found if isinstance(outcome, Updated)]


def answer(engine: TorchEngine, request: GenerationRequest) -> Sequence[Completion]:
    """Have one request answered."""
    engine.submit(request)
    return steps(engine)[request.request_id]
