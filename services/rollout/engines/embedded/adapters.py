"""The adapters that an engine's samples may have: by name, each under a version.

What the samples of each took of the engine is counted in figures that only grow.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flotilla.services.rollout.engines.base import EngineLoad, GenerationRequest
from flotilla.services.rollout.engines.decoders.base import AdaptingDecoder, Decoder
from flotilla.services.rollout.engines.embedded.batch import ActiveRequest, Batch, Rows
from flotilla.services.rollout.engines.embedded.outcomes import Updated
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, InvalidRequest

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
        """Divide the processor time since the last call; idle time goes to the next that computes.

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
        """Add the figures of an unused adapter to those without adapter.

        Args:
            sampled: tokens that ended samples have, by adapter; changed with them.
        """
        for counts in (self.prefilled, self._seen, sampled):
            counts[None] += counts.pop(adapter, 0)
        self._cpu_seconds[None] += self._cpu_seconds.pop(adapter, 0.0)


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter, and what happens to samples in flight with the one of its name; see ``AddsAdapters``."""

    update_id: int
    name: str
    file: Path | None
    scale: float
    version: int
    mode: OnWeightUpdate


class EngineAdapters:
    """Reports which adapters there are, and gives rows those that their requests name.

    Args:
        decoder: that computes with them, if it can.

    Attributes:
        waiting: those that are asked for, in the order of asking.
        shares: what the samples of each took.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.waiting: list[AdapterUpdate] = []
        self.shares = AdapterShares()
        self._rows = decoder.row_adapters if isinstance(decoder, AdaptingDecoder) else None
        self._versions: dict[str, int] = {}

    @property
    def are_taken(self) -> bool:
        """Whether the decoder can compute with them."""
        return self._rows is not None

    def ask(
        self, update_id: int, name: str, file: Path | None, scale: float, version: int, mode: OnWeightUpdate
    ) -> None:
        """Ask for one, behind the others."""
        self.waiting.append(AdapterUpdate(update_id, name, file, scale, version, mode))

    def take_due(self, active: Collection[ActiveRequest]) -> list[AdapterUpdate]:
        """Take those that no sample of a request in flight holds back, at most one of a name."""
        held = {each.request.adapter for each in active if each.request.holds_weights and each.admitted}
        running = {each.request.adapter for each in active if each.is_running}
        due: list[AdapterUpdate] = []
        seen: set[str] = set()
        for update in self.waiting:
            drains = update.mode is OnWeightUpdate.DRAIN and update.name in running
            if not (drains or update.name in held or update.name in seen):
                due.append(update)
            seen.add(update.name)
        self.waiting = [update for update in self.waiting if update not in due]
        return due

    def may_join(self, active: ActiveRequest) -> bool:
        """Whether a request may join the batch before the adapter that waits to take the place of its own."""
        name = active.request.adapter
        update = next((each for each in self.waiting if each.name == name), None)
        if update is None:
            return True
        return bool(active.admitted) if active.request.holds_weights else update.mode is not OnWeightUpdate.DRAIN

    def forget(self, why: FlotillaError) -> list[Updated]:
        """Forget those that wait; returns the report of each."""
        ended, self.waiting = [Updated(update.update_id, why) for update in self.waiting], []
        return ended

    def load(self, name: str, file: Path | None, scale: float, version: int) -> None:
        """Read one, which takes the place of the one of its name.

        Raises:
            InvalidRequest: the decoder takes none.
            WeightTransferFailed: it cannot be read, or does not fit the model; what was there stays.
        """
        if self._rows is None:
            raise InvalidRequest("this engine adds no adapters to single samples: load weights that have them merged")
        self._rows.put(name, file, scale)
        self._versions[name] = version

    def drop(self, name: str, in_flight: Iterable[GenerationRequest], batch: Batch) -> None:
        """Forget one, with its figures.

        Raises:
            InvalidRequest: a request in flight has it.
        """
        if any(request.adapter == name for request in in_flight):
            raise InvalidRequest(f"the adapter {name} is sampled with: end those requests first")
        if self._versions.pop(name, None) is not None and self._rows is not None:
            self._rows.drop(name)
        self.shares.forget(name, batch.ended_tokens)

    def clear(self) -> None:
        """Forget all of them; no sample has one."""
        self._versions.clear()
        if self._rows is not None:
            self._rows.clear()

    def check(self, request: GenerationRequest) -> None:
        """Check that a request's adapter is there.

        Raises:
            InvalidRequest: it is not.
        """
        if request.adapter is not None and request.adapter not in self._versions:
            raise InvalidRequest(f"there is no adapter {request.adapter}: load it first")

    def version_of(self, name: str | None, otherwise: int) -> int:
        """Return the version of an adapter; that of the weights where there is none."""
        return otherwise if name is None else self._versions.get(name, otherwise)

    def part_of(self, whole: EngineLoad, name: str, own: Sequence[ActiveRequest], batch: Batch) -> EngineLoad:
        """Return the part of an engine's load caused by one adapter's requests; processor time by their tokens."""
        sampled = batch.tokens_by_adapter()
        self.shares.account(sampled, whole.cpu_seconds)
        return replace(
            whole,
            version=self.version_of(name, whole.version),
            running=sum(batch.rows_of(each).size for each in own),
            waiting=sum(each.num_waiting for each in own),
            generated_tokens=sampled[name],
            prefilled_tokens=self.shares.prefilled[name],
            reused_tokens=0,
            reuses=0,
            cpu_seconds=self.shares.cpu_seconds(name),
        )

    def assign(self, rows: Rows, request: GenerationRequest) -> None:
        """Let rows that a request joins with compute with its adapter, or with none."""
        if self._rows is not None:
            self._rows.assign(rows.tolist(), request.adapter)
