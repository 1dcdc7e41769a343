"""Going on with tokens that were sampled before, elsewhere: they stay as they are, their prefix is computed again.

Whether they may be kept depends on the version that serves when the sample joins the batch, so the engine decides,
between two steps. A sample whose tokens may not be kept is sampled afresh from its seed.
"""

from dataclasses import dataclass

from flotilla.shared.schemas.routing import RoutedExperts


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens that a completion has already.

    Attributes:
        token_ids: at least one, none of which ends the completion.
        log_probs: nats, one per token, under the version that sampled it.
        versions: run-length ``(start, version)`` over the tokens.
        experts: of the prompt and of all tokens but the last; None where none were recorded.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """Which tokens may be kept.

    Attributes:
        mixes_versions: whether one completion may hold tokens of several versions.
        max_lag: versions that a kept token may be older than the one that serves.
    """

    mixes_versions: bool = False
    max_lag: int = 0

    def allows(self, versions: tuple[tuple[int, int], ...], serving: int) -> bool:
        """Tell whether tokens of these runs may stay beside tokens that ``serving`` samples."""
        sampled_by = {version for _, version in versions}
        if not self.mixes_versions:
            return sampled_by == {serving}
        return serving - min(sampled_by) <= self.max_lag


UNMIXED = ResumeRule()
