"""Counts of what changed hands, for metrics: since the worker began."""

from dataclasses import asdict, dataclass

from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import Claim


@dataclass
class HandOverCounts:
    """What a worker handed over, and what it made of what it was handed.

    Attributes:
        groups_handed_over, tokens_handed_over: given to the next rollout, finished members included.
        groups_resumed, tokens_resumed: taken from an earlier rollout into groups that were answered.
        tokens_restarted: came with a task and could not be kept (mixed versions, too old): sampled afresh.
    """

    groups_handed_over: int = 0
    tokens_handed_over: int = 0
    groups_resumed: int = 0
    tokens_resumed: int = 0
    tokens_restarted: int = 0

    def answered(self, claim: Claim, group: Group) -> None:
        """Count a group that was forwarded."""
        resumed = self._count_restarted(claim, group)
        self.groups_resumed += bool(resumed)
        self.tokens_resumed += resumed

    def handed_over(self, claim: Claim, group: Group) -> None:
        """Count a group that was handed over."""
        self._count_restarted(claim, group)
        self.groups_handed_over += 1
        self.tokens_handed_over += group.num_sampled

    def to_load(self) -> dict[str, float]:
        """Make gauges of it."""
        return asdict(self)

    def _count_restarted(self, claim: Claim, group: Group) -> int:
        resumed = sum(member.resumed_tokens for member in group.trajectories)
        self.tokens_restarted += max(0, claim.header.token_count - resumed)
        return resumed
