"""How a group that is kept ended, and what training knows of it beside the group itself.

Imports no library: commands that show samples start with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from flotilla.shared.schemas.trajectory import Group

    Floats = npt.NDArray[np.float32]


class SampleKind(StrEnum):
    """What became of a group."""

    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"
    EVALUATION = "evaluation"


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """What the trainer found about one trajectory; arrays are [T] over its tokens, NaN where there is no value.

    Attributes:
        advantages: of each token that was trained.
        old_log_probs: nats, the denominator of the ratio.
        log_probs: nats, under the weights of the last update that saw the token, before that update. NaN where the
            advantage was 0 and so nothing was computed.
        weights: what the token's loss was multiplied with: importance correction and sample weight. NaN as above.
        clipped: 1 where a clip or gate changed the gradient, else 0; NaN as above.
        ref_log_probs: nats of the reference; None without one.
        lags: run-length ``(start, lag)`` over positions, as the trajectory's versions.
    """

    advantages: Floats
    old_log_probs: Floats
    log_probs: Floats
    weights: Floats
    clipped: Floats
    ref_log_probs: Floats | None
    lags: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class KeptGroup:
    """A group on its way into a file.

    Attributes:
        group: as it was when it ended.
        kind: how it ended.
        reason: why, where that needs one (``zero_spread``, ``stale``, ...).
        tokens: per trajectory; None for one that was not trained.
    """

    group: Group
    kind: SampleKind
    reason: str | None = None
    tokens: Sequence[TrainedTokens | None] = ()


@dataclass(frozen=True, eq=False)
class SampleFile:
    """What one file holds.

    Attributes:
        name: of the file, within the folder.
        groups: in order; of a trained step, in training order.
        step: that trained them, or that the evaluated version contains; None where no step is known.
        version: that was trained or evaluated; of groups that ended otherwise, the newest that sampled a token.
        facts: plain values about the whole file: see ``docs/samples.md``.
    """

    name: str
    groups: Sequence[KeptGroup]
    step: int | None
    version: int
    facts: Mapping[str, Any] = field(default_factory=dict)
