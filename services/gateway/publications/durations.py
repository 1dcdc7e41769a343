"""How long the parts of a publication took, stored as metrics of its version once every member serves it.

prepare    until every member had joined the epoch; over all epochs of the publication
transfer   until every member had received the version; likewise
commit     from the decision until the last member said that it serves the version, finished evaluations included
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.publications.negotiation import Negotiation
from services.gateway.store.base import Store
from shared.clock import Clock, rfc3339
from shared.schemas.experiment import MetricPoint
from shared.schemas.publication import PublicationPhase

PREPARE = "publication/prepare_seconds"
TRANSFER = "publication/transfer_seconds"
COMMIT = "publication/commit_seconds"
NAMES: Mapping[PublicationPhase, str] = {
    PublicationPhase.PREPARING: PREPARE,
    PublicationPhase.TRANSFERRING: TRANSFER,
}


@dataclass
class _Measured:
    """A publication whose announcement this process has seen."""

    since: float
    seconds: dict[str, float] = field(default_factory=lambda: {PREPARE: 0.0, TRANSFER: 0.0})


@dataclass
class _Committed:
    """A committed version that some members do not serve yet."""

    version: int
    step: int
    at: float
    missing: set[str]
    seconds: dict[str, float]


class Durations:
    """Measures the publications of all experiments. In memory: what was open when the gateway died is not measured.

    Nobody waits for the store here but who reports that a rollout serves a version: a commit is never later for it.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._open: dict[str, _Measured] = {}
        self._committed: defaultdict[str, list[_Committed]] = defaultdict(list)

    def announced(self, experiment_id: str) -> None:
        """Begin with a publication."""
        self._open[experiment_id] = _Measured(self._clock.monotonic())

    def moved(self, experiment_id: str, before: Negotiation, after: Negotiation) -> None:
        """Record a change of the open publication."""
        measured, now = self._open.get(experiment_id), self._clock.monotonic()
        if measured is None:
            return
        if before.phase in NAMES:
            measured.seconds[NAMES[before.phase]] += now - measured.since
        measured.since = now
        if after.is_over:
            del self._open[experiment_id]
        if after.phase is PublicationPhase.COMMITTED:
            committed = _Committed(after.version, after.step, now, set(after.members), measured.seconds)
            self._committed[experiment_id].append(committed)

    async def serves(self, experiment_id: str, service_id: str, version: int | None) -> None:
        """Record which version a rollout serves, and store what a publication took if it was the last to serve it."""
        if experiment_id in self._committed and version is not None:
            for committed in self._committed[experiment_id]:
                if version >= committed.version:
                    committed.missing.discard(service_id)
            await self._settle(experiment_id)

    async def gone(self, experiment_id: str, service_id: str) -> None:
        """Record that a rollout is gone: nobody waits for it."""
        if experiment_id in self._committed:
            for committed in self._committed[experiment_id]:
                committed.missing.discard(service_id)
            await self._settle(experiment_id)

    async def close(self, experiment_id: str) -> None:
        """Store what is known, without the commits that have not ended: the experiment ends."""
        self._open.pop(experiment_id, None)
        for committed in self._committed.pop(experiment_id, []):
            await self._store_values(experiment_id, committed)

    async def _settle(self, experiment_id: str) -> None:
        settled = [each for each in self._committed[experiment_id] if not each.missing]
        remaining = [each for each in self._committed.pop(experiment_id) if each.missing]
        if remaining:
            self._committed[experiment_id] = remaining
        for committed in settled:
            committed.seconds[COMMIT] = self._clock.monotonic() - committed.at
            await self._store_values(experiment_id, committed)

    async def _store_values(self, experiment_id: str, committed: _Committed) -> None:
        at = rfc3339(self._clock.now())
        points = [
            MetricPoint(name=name, step=committed.step, version=committed.version, value=value, at=at)
            for name, value in committed.seconds.items()
        ]
        await self._store.put_metrics(experiment_id, points)
