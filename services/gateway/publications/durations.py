"""How long the parts of a publication took, stored as metrics of its version once every member serves it.

prepare    until every member had joined the epoch; over all epochs of the publication
transfer   until every member had received the version; likewise
commit     from the decision until the last member said that it serves the version, finished evaluations included
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flotilla.services.gateway.publications.negotiation import Negotiation
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics, PutWindow
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.schemas.publication import PublicationPhase

PREPARE = "publication/prepare_seconds"
TRANSFER = "publication/transfer_seconds"
COMMIT = "publication/commit_seconds"
WINDOW = "publication"
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
    """Measures the publications of all experiments. What is open is stored with what it measures, for the next gateway:
    time between two gateways counts, as the members wait meanwhile.

    Only the report that a rollout serves a version waits for the store here: it never delays a commit.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._open: dict[str, _Measured] = {}
        self._committed: defaultdict[str, list[_Committed]] = defaultdict(list)

    async def load(self, experiment_id: str) -> None:
        """Go on with what an earlier gateway had open."""
        window = await self._store.window(experiment_id, WINDOW)
        if not window:
            return
        # Seconds of the wall clock, which may have gone back.
        began = self._clock.monotonic() - max(0.0, self._clock.now() - window["at"])
        if window["open"] is not None:
            self._open[experiment_id] = _Measured(began - window["open"]["age"], dict(window["open"]["seconds"]))
        for each in window["committed"]:
            missing = set(each["missing"])
            committed = _Committed(each["version"], each["step"], began - each["age"], missing, dict(each["seconds"]))
            self._committed[experiment_id].append(committed)

    def stage_announced(self, change: Transaction, experiment_id: str) -> None:
        """Begin with a publication."""
        self._stage(change, experiment_id, _Measured(self._clock.monotonic()), [])

    def stage_moved(self, change: Transaction, experiment_id: str, before: Negotiation, after: Negotiation) -> None:
        """Record a change of the open publication."""
        known: _Measured | None = change.staged((self, experiment_id), self._open.get(experiment_id))
        if known is None:
            return
        now = self._clock.monotonic()
        measured = _Measured(now, dict(known.seconds))
        if before.phase in NAMES:
            measured.seconds[NAMES[before.phase]] += now - known.since
        committed = []
        if after.phase is PublicationPhase.COMMITTED:
            committed.append(_Committed(after.version, after.step, now, set(after.members), measured.seconds))
        self._stage(change, experiment_id, None if after.is_over else measured, committed)

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
                change.write(*settled, self._window(experiment_id))

    def stage_gone(self, change: Transaction, experiment_id: str, service_id: str) -> None:
        """Record that a rollout is gone: it is no longer waited for."""
        for committed in self._committed.get(experiment_id, []):
            if committed.missing <= {service_id}:
                committed.seconds[COMMIT] = self._clock.monotonic() - committed.at
                change.write(self._values(experiment_id, committed))

        def follow() -> None:
            for committed in self._committed.get(experiment_id, []):
                committed.missing.discard(service_id)
            self._forget_settled(experiment_id)

        change.then(follow)
        remaining = [
            replace(each, missing=each.missing - {service_id})
            for each in self._committed.get(experiment_id, [])
            if not each.missing <= {service_id}
        ]
        if len(remaining) < len(self._committed.get(experiment_id, [])):
            change.write(self._window_of(experiment_id, self._open.get(experiment_id), remaining))

    def stage_close(self, change: Transaction, experiment_id: str) -> None:
        """Store what is known, without the commits that have not ended: the experiment ends."""
        for committed in self._committed.get(experiment_id, []):
            change.write(self._values(experiment_id, committed))
        change.write(self._window_of(experiment_id, None, []))

        def follow() -> None:
            self._open.pop(experiment_id, None)
            self._committed.pop(experiment_id, None)

        change.then(follow)

    def _stage(
        self, change: Transaction, experiment_id: str, measured: _Measured | None, committed: list[_Committed]
    ) -> None:
        change.stage((self, experiment_id), measured)
        change.write(self._window_of(experiment_id, measured, [*self._committed.get(experiment_id, []), *committed]))

        def follow() -> None:
            self._open.pop(experiment_id, None)
            if measured is not None:
                self._open[experiment_id] = measured
            if committed:
                self._committed[experiment_id] += committed

        change.then(follow)

    def _window(self, experiment_id: str) -> PutWindow:
        return self._window_of(experiment_id, self._open.get(experiment_id), self._committed.get(experiment_id, []))

    def _window_of(self, experiment_id: str, measured: _Measured | None, committed: Sequence[_Committed]) -> PutWindow:
        now = self._clock.monotonic()
        data = {
            "at": self._clock.now(),
            "open": None if measured is None else {"age": now - measured.since, "seconds": measured.seconds},
            "committed": [
                {
                    "version": each.version,
                    "step": each.step,
                    "age": now - each.at,
                    "missing": sorted(each.missing),
                    "seconds": each.seconds,
                }
                for each in committed
            ],
        }
        return PutWindow(experiment_id, WINDOW, data)

    def _forget_settled(self, experiment_id: str) -> None:
        remaining = [each for each in self._committed.pop(experiment_id, []) if each.missing]
        if remaining:
            self._committed[experiment_id] = remaining

    def _values(self, experiment_id: str, committed: _Committed) -> PutMetrics:
        at = rfc3339(self._clock.now())
        points = [
            PointRecord(name=name, step=committed.step, version=committed.version, value=value, at=at)
            for name, value in committed.seconds.items()
        ]
        return PutMetrics(experiment_id, points)
