"""How long the parts of a publication took, stored as metrics of its version once every member serves it.

prepare    until every member had joined the epoch; over all epochs of the publication
transfer   until every member had received the version; likewise
commit     from the decision until the last member said that it serves the version, finished evaluations included

The event ``publication_served`` has the same of each member: ``negotiate`` until it had joined, ``transfer`` from there
until it had received, ``commit`` until it said that it serves. They are in memory: what a member did before another
gateway took over is not known.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flotilla.services.gateway.publications.negotiation import Negotiation
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import AppendEvent, PointRecord, PutMetrics, PutWindow, Write
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


Members = dict[str, dict[str, float]]
"""Seconds of ``negotiate``, ``transfer`` and ``commit`` by member."""
MOST_MEMBERS = 256
"""The slowest of a publication, which its event names."""


@dataclass
class _Measured:
    """A publication whose announcement this process has seen."""

    since: float
    seconds: dict[str, float] = field(default_factory=lambda: {PREPARE: 0.0, TRANSFER: 0.0})
    began: float | None = None
    members: Members = field(default_factory=dict)


@dataclass
class _Committed:
    """A committed version that some members do not serve yet."""

    version: int
    step: int
    at: float
    missing: set[str]
    seconds: dict[str, float]
    members: Members = field(default_factory=dict)


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
        self._newest: dict[str, Members] = {}

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
        now = self._clock.monotonic()
        self._stage(change, experiment_id, _Measured(now, began=now), [])

    def stage_moved(self, change: Transaction, experiment_id: str, before: Negotiation, after: Negotiation) -> None:
        """Record a change of the open publication."""
        known: _Measured | None = change.staged((self, experiment_id), self._open.get(experiment_id))
        if known is None:
            return
        now = self._clock.monotonic()
        measured = _Measured(now, dict(known.seconds), known.began, known.members)
        self.note(measured, before, after)
        if before.phase in NAMES:
            measured.seconds[NAMES[before.phase]] += now - known.since
        committed = []
        if after.phase is PublicationPhase.COMMITTED:
            members = {name: parts for name, parts in measured.members.items() if name in after.members}
            committed.append(_Committed(after.version, after.step, now, set(after.members), measured.seconds, members))
        self._stage(change, experiment_id, None if after.is_over else measured, committed)

    def stage_progress(self, change: Transaction, experiment_id: str, before: Negotiation, after: Negotiation) -> None:
        """Record how far members came where nothing else changed."""
        known: _Measured | None = change.staged((self, experiment_id), self._open.get(experiment_id))
        if known is not None:
            self.note(known, before, after)

    def note(self, measured: _Measured, before: Negotiation, after: Negotiation) -> None:
        """Record what members reported between two states. What a member did in an earlier epoch is forgotten."""
        if measured.began is None:
            return
        spent = self._clock.monotonic() - measured.began
        if before.epoch.number != after.epoch.number:
            measured.members.clear()
        for name in after.joined - before.joined:
            # Who maps the image joins nothing.
            if (member := after.epoch.by_id.get(name)) is not None and member.rank is not None:
                measured.members.setdefault(name, {})["negotiate"] = spent
        for name in after.received - before.received:
            parts = measured.members.setdefault(name, {})
            parts["transfer"] = spent - parts.get("negotiate", 0.0)

    def newest(self, experiment_id: str) -> Members:
        """What the newest publication that all members serve took of each of them; nothing before the first."""
        return self._newest.get(experiment_id, {})

    async def serves(self, experiment_id: str, service_id: str, version: int | None) -> None:
        """Record which version a rollout serves, and store what a publication took if it was the last to serve it."""
        if version is None or experiment_id not in self._committed:
            return
        settled: list[Write] = []
        for committed in self._committed[experiment_id]:
            if version >= committed.version and service_id in committed.missing:
                committed.missing.discard(service_id)
                committed.members.setdefault(service_id, {})["commit"] = self._clock.monotonic() - committed.at
            if not committed.missing:
                committed.seconds[COMMIT] = self._clock.monotonic() - committed.at
                settled += self._writes(experiment_id, committed)
                self._newest[experiment_id] = committed.members
        self._forget_settled(experiment_id)
        if settled:
            async with self._store.transaction() as change:
                change.write(*settled, self._window(experiment_id))

    def stage_gone(self, change: Transaction, experiment_id: str, service_id: str) -> None:
        """Record that a rollout is gone: it is no longer waited for."""
        for committed in self._committed.get(experiment_id, []):
            if committed.missing <= {service_id}:
                committed.seconds[COMMIT] = self._clock.monotonic() - committed.at
                change.write(*self._writes(experiment_id, committed))

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
            change.write(*self._writes(experiment_id, committed))
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

    def _writes(self, experiment_id: str, committed: _Committed) -> list[Write]:
        now = self._clock.now()
        at = rfc3339(now)
        points = [
            PointRecord(name=name, step=committed.step, version=committed.version, value=value, at=at)
            for name, value in committed.seconds.items()
        ]
        slowest = sorted(committed.members.items(), key=lambda item: -sum(item[1].values()))[:MOST_MEMBERS]
        members = {name: {part: round(seconds, 4) for part, seconds in parts.items()} for name, parts in slowest}
        facts = {"version": committed.version, "members": members}
        return [PutMetrics(experiment_id, points), AppendEvent(experiment_id, "publication_served", now, facts)]
