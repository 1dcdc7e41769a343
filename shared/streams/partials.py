"""What a group's members have so far when their task changes hands.

A partial trajectory is a trajectory whose finish reason is ``aborted``; it is continued from its tokens by the service
that claims the task next. Members that are finished travel along and are not sampled again.
"""

from collections.abc import Sequence

from flotilla.shared.schemas.trajectory import FinishReason, Trajectory

Partials = tuple[Trajectory | None, ...]
"""One per member of the group, in the order of their seeds; None for a member without tokens. Empty: none has any."""

BYTES_PER_TOKEN = 9
"""Token id, mask and log-probability."""


def is_finished(member: Trajectory | None) -> bool:
    """Return whether a member needs no more tokens."""
    return member is not None and member.finish_reason is not FinishReason.ABORTED


def num_kept(partials: Sequence[Trajectory | None]) -> int:
    """Count the sampled tokens."""
    return sum(member.num_sampled for member in partials if member is not None)


def within(partials: Sequence[Trajectory | None], max_bytes: int) -> Partials:
    """Leave members out until the rest fits: those with the fewest tokens first, finished ones last."""
    order = [index for index, member in enumerate(partials) if member is not None]
    order.sort(key=lambda index: (not is_finished(partials[index]), -_size(partials[index])))
    kept: list[Trajectory | None] = [None] * len(partials)
    room = max_bytes
    for index in order:
        room -= _size(partials[index])
        if room < 0:
            break
        kept[index] = partials[index]
    return tuple(kept) if any(kept) else ()


def _size(member: Trajectory | None) -> int:
    if member is None:
        return 0
    routed = 0 if member.experts is None else len(member.experts.data)
    shown = sum(len(image) for image in {each.data for each in member.images})
    return BYTES_PER_TOKEN * int(member.token_ids.shape[0]) + 4 * len(member.text) + routed + shown
