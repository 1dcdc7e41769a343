"""The sequences that a trajectory is trained as: one, or one for each prompt of its own that the policy was shown."""

from dataclasses import replace

from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.trajectory import Trajectory


def piece_starts(trajectory: Trajectory) -> list[int]:
    """Return where each sequence begins in the trajectory's tokens, the first at 0."""
    return [0, *(turn.start for turn in trajectory.turns[1:] if turn.is_fresh)]


def pieces(trajectory: Trajectory) -> list[Trajectory]:
    """Cut a trajectory before each prompt that stands alone; each part has the reward of the whole."""
    starts = piece_starts(trajectory)
    if len(starts) == 1:
        return [trajectory]
    ends = [*starts[1:], trajectory.token_ids.shape[0]]
    spans = list(zip(starts, ends, strict=True))
    routed: list[RoutedExperts | None] = [None] * len(spans)
    if trajectory.experts is not None:
        routed = [*trajectory.experts.parts([(start, end - 1) for start, end in spans])]
    return [_part(trajectory, *span, experts) for span, experts in zip(spans, routed, strict=True)]


def _part(whole: Trajectory, start: int, end: int, experts: RoutedExperts | None) -> Trajectory:
    taught = whole.teacher_log_probs
    before = [version for at, version in whole.versions if at <= start]
    return replace(
        whole,
        token_ids=whole.token_ids[start:end],
        loss_mask=whole.loss_mask[start:end],
        log_probs=whole.log_probs[start:end],
        versions=((0, before[-1]), *((at - start, version) for at, version in whole.versions if start < at < end)),
        turns=tuple(
            replace(turn, start=turn.start - start, sampled=turn.sampled - start, end=turn.end - start)
            for turn in whole.turns
            if start <= turn.start < end
        ),
        teacher_log_probs=None if taught is None else taught[start:end],
        experts=experts,
    )
