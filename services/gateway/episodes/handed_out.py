"""Which episodes the holders of each token have begun and not yet completed."""

from collections import defaultdict


class HandedOutEpisodes:
    """Counts open episodes by whose they are; one that is never completed is forgotten with its deadline."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = defaultdict(dict)
        self._beginning: dict[str, int] = defaultdict(int)

    def count(self, whose: str, now: float) -> int:
        """Count those of a token, and those that it is about to get; ``now`` in seconds since the epoch."""
        opened = self._until[whose]
        for episode_id in [each for each, until in opened.items() if until <= now]:
            del opened[episode_id]
        return len(opened) + self._beginning[whose]

    def begin(self, whose: str) -> None:
        """Note that somebody waits for one; ``begun`` ends that."""
        self._beginning[whose] += 1

    def begun(self, whose: str) -> None:
        """Note that somebody waits no longer."""
        self._beginning[whose] -= 1

    def add(self, whose: str, episode_id: str, until: float) -> None:
        """Note one that was handed out."""
        self._until[whose][episode_id] = until

    def end(self, episode_id: str) -> None:
        """Forget one that has ended."""
        for opened in self._until.values():
            opened.pop(episode_id, None)
