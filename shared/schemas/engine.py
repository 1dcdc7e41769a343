"""What rollout engines promise beyond sampling with exact versions and log-probabilities."""

from enum import StrEnum
from typing import Annotated

from flotilla.shared.schemas.later_values import known_alone
from flotilla.shared.schemas.wire import TolerantWire


class EngineCapability(StrEnum):
    """What one engine can and another cannot; what a token's version and log-probability mean is the same for all."""

    SEEDED_SAMPLING = "seeded_sampling"
    """A completion is a function of weights, prompt, sampling parameters and seed, whatever else is sampled."""
    EXACT_RESUMPTION = "exact_resumption"
    """A completion that was interrupted continues with the tokens that it would have had without the interruption."""
    SPARE_COPY = "spare_copy"
    """New weights are read into a second copy while the old ones serve; switching takes no longer than one step."""
    EXACT_SPANS = "exact_spans"
    """Every token has the version that sampled it. Without it, a span that begins while weights change under
    ``continue`` may begin one token early; under ``interrupt`` and ``drain`` spans are exact with every engine."""
    SLEEP = "sleep"
    """Its device memory can be lent, and taken back."""

    UNCUT_LOG_PROBS = "uncut_log_probs"
    """Log-probabilities are those before top-k and top-p at any temperature. Without it, only at temperature 1 or
    where nothing is cut; else they are of the distribution that is sampled from, and those of evaluations that sample
    otherwise than training does are of that or of temperature 1."""


class EngineOffer(TolerantWire):
    """One kind of engine that a rollout service can use."""

    kind: str
    """As in ``rollout.engine.kind``."""
    can_start: bool = True
    """Whether the service can start one; else it can only attach to one that runs already."""
    capabilities: Annotated[tuple[EngineCapability, ...], known_alone(EngineCapability)] = ()
    takes_adapters: bool = False
    """Whether it takes an image of adapters alone, and adds them to the weights of the model's files. No capability:
    a gateway of an earlier release reads none that it does not know."""


def with_adapters(kind: str) -> str:
    """Name an engine of a kind that takes images of adapters alone."""
    return f"{kind} with adapters"
