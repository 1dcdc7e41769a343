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
from services.gateway.store.transaction import Transaction
from services.gateway.store.writes import PutMetrics
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
        if version is None or experiment_id not in self._committed:
            return
        settled = []
        for committed in self._committed[experiment_id]:
            if version >= committed.version:
                committed.missing.discard(service_id)
            if not committed.missing:
                committed.seconds[COMMIT] = self._clock.monotonic() - committed.at
                settled.append(self._values(experiment_id, committed))
        self._forget_settled(experiment_id)
        if settled:
            async with self._store.transaction() as change:
                change.write(*settled)

    def stage_gone(self, change: Transaction, experiment_id: str, service_id: str) -> None:
        """Record that a rollout is gone: nobody waits for it."""
        for committed in self._committed.get(experiment_id, []):
            if committed.missing <= {service_id}:
                committed.seconds[COMMIT] = self._clock.monotonic() - committed.at
                change.write(self._values(experiment_id, committed))

        def follow() -> None:
            for committed in self._committed.get(experiment_id, []):
                committed.missing.discard(service_id)
            self._forget_settled(experiment_id)

        change.then(follow)

    def stage_close(self, change: Transaction, experiment_id: str) -> None:
        """Store what is known, without the commits that have not ended: the experiment ends."""
        for committed in self._committed.get(experiment_id, []):
            change.write(self._values(experiment_id, committed))

        def follow() -> None:
            self._open.pop(experiment_id, None)
            self._committed.pop(experiment_id, None)

        change.then(follow)

    def _forget_settled(self, experiment_id: str) -> None:
        remaining = [each for each in self._committed.pop(experiment_id, []) if each.missing]
        if remaining:
            self._committed[experiment_id] = remaining

    def _values(self, experiment_id: str, committed: _Committed) -> PutMetrics:
        at = rfc3339(self._clock.now())
        points = [
            MetricPoint(name=name, step=committed.step, version=committed.version, value=value, at=at)
            for name, value in committed.seconds.items()
        ]
        return PutMetrics(experiment_id, points)
