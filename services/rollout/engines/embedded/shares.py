"""What the samples of each adapter took of an engine: figures that only grow, whatever others do beside them."""

from collections import Counter, defaultdict
from collections.abc import Mapping

Adapter = str | None


class AdapterShares:
    """Divides an engine's processor time among adapters, by the tokens of each between two looks.

    Attributes:
        prefilled: tokens that were computed and not sampled, by adapter.
    """

    def __init__(self) -> None:
        self.prefilled: Counter[Adapter] = Counter()
        self._cpu_seconds: defaultdict[Adapter, float] = defaultdict(float)
        self._seen: Counter[Adapter] = Counter()
        self._seen_cpu_seconds = 0.0

    def account(self, sampled: Mapping[Adapter, int], cpu_seconds: float) -> None:
        """Divide what the process took since the last look; while nothing was computed it waits for who computes next.

        Args:
            sampled: tokens since the start, by adapter.
            cpu_seconds: of the process since its start.
        """
        tokens = Counter(sampled) + self.prefilled
        new = {name: num - self._seen[name] for name, num in tokens.items()}
        if total := sum(new.values()):
            taken = cpu_seconds - self._seen_cpu_seconds
            for name, num in new.items():
                self._cpu_seconds[name] += taken * num / total
            self._seen, self._seen_cpu_seconds = tokens, cpu_seconds

    def cpu_seconds(self, adapter: Adapter) -> float:
        """Return what an adapter's samples took, as at the last look."""
        return self._cpu_seconds[adapter]

    def forget(self, adapter: str, sampled: "Counter[Adapter]") -> None:
        """Add an adapter's figures, which nobody asks for any more, to those of none.

        Args:
            sampled: tokens that ended samples have, by adapter; changed with them.
        """
        for counts in (self.prefilled, self._seen, sampled):
            counts[None] += counts.pop(adapter, 0)
        self._cpu_seconds[None] += self._cpu_seconds.pop(adapter, 0.0)
