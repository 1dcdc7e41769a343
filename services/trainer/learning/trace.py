"""Per-token figures of a step's updates, kept for later inspection of the step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.objective import TokenFigures
from flotilla.services.trainer.data.batch import piece_starts, scored_trajectories
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.learning.mini_batches import Prepared
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.schemas.sample_kinds import TrainedTokens
from flotilla.shared.schemas.trajectory import Group, Trajectory

PREFIX = "engine_gap/"
MOST_ROLLOUTS = 64
"""Of one step; the others have no series."""


def engine_gaps(traced: Iterable[tuple[Group, Sequence[TrainedTokens | None]]]) -> dict[str, float]:
    """Measure the mean distance in nats per token, by the service that sampled.

    Only tokens of lag 0 count: the trainer computed them with the weights that sampled them, as long as the step made
    one update and began with a published version.

    Args:
        traced: groups with what was found about each trajectory; None for one that was not trained.

    Returns:
        ``engine_gap/ROLLOUT``, for rollouts that sampled such tokens.
    """
    sums: dict[str, tuple[float, int]] = {}
    for group, tokens in traced:
        for trajectory, found in zip(group.trajectories, tokens, strict=True):
            if found is None or trajectory.rollout is None:
                continue
            is_of_now = np.zeros(trajectory.token_ids.shape, dtype=bool)
            ends = [start for start, _ in found.lags[1:]] + [trajectory.token_ids.size]
            for (start, lag), end in zip(found.lags, ends, strict=True):
                is_of_now[start:end] = lag == 0
            apart = np.abs(found.log_probs.astype(np.float64) - trajectory.log_probs)
            apart = apart[is_of_now & trajectory.loss_mask.astype(bool) & np.isfinite(found.log_probs)]
            total, count = sums.get(trajectory.rollout, (0.0, 0))
            sums[trajectory.rollout] = total + float(apart.sum()), count + apart.size
    counted = [(name, total / count) for name, (total, count) in sorted(sums.items()) if count]
    return {f"{PREFIX}{name}": mean for name, mean in counted[:MOST_ROLLOUTS]}


Floats = npt.NDArray[np.float32]


class TokenTrace:
    """Collects figures of the step's span tokens [T]; a token that several updates see keeps those of the last.

    Args:
        prepared: of the whole step, before anything is drawn from it.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        nothing = torch.full_like(prepared.old_log_probs, torch.nan)
        self._log_probs, self._weights, self._clipped = nothing, nothing.clone(), nothing.clone()
        self._update = torch.full_like(nothing, -1.0)

    def note(self, prepared: Prepared, micro: MicroBatch, figures: TokenFigures, update: int) -> None:
        """Record what a micro-batch of ``prepared`` gave in an update, counted over the step."""
        tokens = micro.tokens if prepared.origin is None else prepared.origin[micro.tokens]
        self._log_probs[tokens] = figures.log_probs
        self._weights[tokens] = figures.weights
        self._clipped[tokens] = figures.clipped.float()
        self._update[tokens] = update

    def collect(self, ranks: Ranks) -> None:
        """Add what the other ranks found of each token; the last update's counts, whichever process made it."""
        if not ranks.is_several:
            return
        last = ranks.largest(self._update)
        is_mine = (self._update == last) & (self._update >= 0)
        for name in ("_log_probs", "_weights", "_clipped"):
            found = ranks.sum(torch.where(is_mine, getattr(self, name), 0.0))
            setattr(self, name, torch.where(last >= 0, found, torch.nan))

    def arrays(self) -> "TracedStep":
        """Take the figures off the device."""
        batch = self._prepared.batch
        return TracedStep(
            span_starts=batch.span_starts,
            span_lengths=tuple(batch.span_lengths),
            mask=_array(batch.sequences.response_mask).astype(bool),
            advantages=_array(self._prepared.advantages),
            old_log_probs=_array(self._prepared.old_log_probs),
            ref_log_probs=None if self._prepared.ref_log_probs is None else _array(self._prepared.ref_log_probs),
            log_probs=_array(self._log_probs),
            weights=_array(self._weights),
            clipped=_array(self._clipped),
        )


@dataclass(frozen=True, eq=False)
class TracedStep:
    """The same as arrays over the spans of all scored trajectories, which it cuts into one part for each of them."""

    span_starts: Sequence[int]
    span_lengths: Sequence[int]
    mask: npt.NDArray[np.bool_]
    advantages: Floats
    old_log_probs: Floats
    ref_log_probs: Floats | None
    log_probs: Floats
    weights: Floats
    clipped: Floats

    @cached_property
    def _offsets(self) -> list[int]:
        found: list[int] = np.concatenate([[0], np.cumsum(self.span_lengths)]).tolist()
        return found

    def of_groups(
        self, groups: Sequence[Group], lag: Callable[[int], int]
    ) -> Iterator[tuple[Group, list[TrainedTokens | None]]]:
        """Go through the step's groups, with what was found about each trajectory; None for one without a reward.

        Args:
            groups: of the step, in training order.
            lag: versions from the one that sampled a token to the one that was trained.
        """
        number = 0
        for group in groups:
            scored = {id(each) for each in scored_trajectories(group)}
            found: list[TrainedTokens | None] = []
            for trajectory in group.trajectories:
                if id(trajectory) not in scored:
                    found.append(None)
                    continue
                found.append(self._tokens(trajectory, number, lag))
                number += len(piece_starts(trajectory))
            yield group, found

    def engine_gaps(self, groups: Sequence[Group], lag: Callable[[int], int]) -> dict[str, float]:
        """Measure how far the engine of each rollout is; see ``data.engine_gaps`` and ``of_groups``."""
        return engine_gaps(self.of_groups(groups, lag))

    def _tokens(self, trajectory: Trajectory, first: int, lag: Callable[[int], int]) -> TrainedTokens:
        spans = []
        for number, begins in enumerate(piece_starts(trajectory), start=first):
            at = begins + self.span_starts[number]
            own = slice(self._offsets[number], self._offsets[number + 1])
            spans.append((slice(at, at + self.span_lengths[number]), own))

        def placed(values: Floats) -> Floats:
            full = np.full(trajectory.token_ids.shape[0], np.nan, np.float32)
            for there, here in spans:
                full[there] = np.where(self.mask[here], values[here], np.nan)
            return full

        return TrainedTokens(
            advantages=placed(self.advantages),
            old_log_probs=placed(self.old_log_probs),
            log_probs=placed(self.log_probs),
            weights=placed(self.weights),
            clipped=placed(self.clipped),
            ref_log_probs=None if self.ref_log_probs is None else placed(self.ref_log_probs),
            lags=tuple((start, lag(version)) for start, version in trajectory.versions),
        )


def _array(values: Tensor) -> Floats:
    found: Floats = values.detach().cpu().numpy()
    return found
