"""Where the episodes of a rollout are: each that was handed out is open, or ended in one of three ways."""

from dataclasses import dataclass, field

from flotilla.services.rollout.agents.episode import Ended


@dataclass
class EpisodeCounts:
    """Counts since the session began.

    Attributes:
        opened: handed out.
        by_end: ended, by how.
    """

    opened: int = 0
    by_end: dict[Ended, int] = field(default_factory=lambda: dict.fromkeys(Ended, 0))

    def ended(self, how: Ended) -> None:
        """Count an end."""
        self.by_end[how] += 1

    @property
    def num_open(self) -> int:
        """Episodes that are with an agent."""
        return self.opened - sum(self.by_end.values())

    def to_load(self) -> dict[str, float]:
        """Make gauges of it."""
        ends = {f"episodes_{how.value}": float(count) for how, count in self.by_end.items()}
        return {"episodes_opened": float(self.opened), "episodes_open": float(self.num_open), **ends}
