"""How long the parts of a publication took, stored as metrics of its version once every member serves it.

prepare    until every member had joined the epoch; over all epochs of the publication
transfer   until every member had received the version; likewise
commit     from the decision until the last member reported that it serves the version, finished evaluations included

The event ``publication_served`` has the same of each member: ``negotiate`` until it had joined, ``transfer`` from there
until it had received, ``commit`` until it reported that it serves. They are in memory: what a member did before another
gateway took over is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flotilla.services.gateway.events.log import EventLog
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


@dataclass(eq=False)
class _Committed:
    """A committed version that some members do not serve yet.

    Attributes:
        is_served: whether a member has reported that it serves it.
    """

    version: int
    step: int
    at: float
    missing: set[str]
    seconds: dict[str, float]
    members: Members = field(default_factory=dict)
    is_served: bool = False


class Durations:
    """Measures the publications of all experiments. What is open is stored with what it measures, for the next gateway:
    time between two gateways counts, as the members wait meanwhile.

    This does not wait for the store: what a version took that all serve is stored with what comes next, and found out
    again by the next report where it was not.
    """

    def __init__(self, store: Store, clock: Clock, events: EventLog) -> None:
        self._store = store
        self._clock = clock
        self._events = events
        self._open: dict[str, _Measured] = {}
        self._committed: dict[str, list[_Committed]] = {}
        self._newest: dict[str, Members] = {}

    async def load(self, experiment_id: str) -> None:
        """Continue with what an earlier gateway had open."""
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
            committed.is_served = each.get("served", False)
            self._committed.setdefault(experiment_id, []).append(committed)

    def stage_announced(self, change: Transaction, experiment_id: str) -> None:
        """Begin with a publication."""
        now = self._clock.monotonic()
        self._stage(change, experiment_id, _Measured(now, began=now))

    def stage_moved(self, change: Transaction, experiment_id: str, before: Negotiation, after: Negotiation) -> None:
        """Record a change of the open publication."""
        known: _Measured | None = change.staged((self, experiment_id), self._open.get(experiment_id))
        if known is None:
            return
        now = self._clock.monotonic()
        members = {name: dict(parts) for name, parts in known.members.items()}
        measured = _Measured(now, dict(known.seconds), known.began, members)
        self._note(measured, before, after, now)
        if before.phase in NAMES:
            measured.seconds[NAMES[before.phase]] += now - known.since
        committed: list[_Committed] = []
        if after.phase is PublicationPhase.COMMITTED:
            members = {name: parts for name, parts in measured.members.items() if name in after.members}
            committed.append(_Committed(after.version, after.step, now, set(after.members), measured.seconds, members))
        self._stage(change, experiment_id, None if after.is_over else measured, *committed)

    def stage_progress(self, change: Transaction, experiment_id: str, before: Negotiation, after: Negotiation) -> None:
        """Record how far members came where nothing else changed."""
        known: _Measured | None = change.staged((self, experiment_id), self._open.get(experiment_id))
        if known is not None:
            # Not of a copy, whose cost would grow with the members; so only once it is stored.
            now = self._clock.monotonic()
            change.then(lambda: self._note(known, before, after, now))

    def _note(self, measured: _Measured, before: Negotiation, after: Negotiation, now: float) -> None:
        """Record what members reported between two states. What a member did in an earlier epoch is forgotten."""
        if measured.began is None:
            return
        spent = now - measured.began
        if before.epoch.number != after.epoch.number:
            measured.members.clear()
        for name in after.joined - before.joined:
            # A member that maps the image joins no group.
            if (member := after.epoch.by_id.get(name)) is not None and member.rank is not None:
                measured.members.setdefault(name, {})["negotiate"] = spent
        for name in after.received - before.received:
            parts = measured.members.setdefault(name, {})
            parts["transfer"] = spent - parts.get("negotiate", 0.0)

    def newest(self, experiment_id: str) -> Members:
        """What the newest publication that all members serve took of each of them; nothing before the first."""
        return self._newest.get(experiment_id, {})

    def serves(self, experiment_id: str, service_id: str, version: int | None) -> None:
        """Record which version a rollout serves, and store soon what a publication took if it was the last."""
        if version is None:
            return
        for committed in self._committed.get(experiment_id, []):
            if version >= committed.version and len(committed.missing) > (service_id in committed.missing):
                self._serves_alone(committed, service_id)
        if not self._served_by(self._committed.get(experiment_id, []), service_id, version):
            return
        now = self._clock.monotonic()

        def stage(change: Transaction) -> None:
            # Asked again: another report of it may have been stored before.
            served = self._served_by(self._staged_committed(change, experiment_id), service_id, version)
            self._stage_served(change, experiment_id, served, service_id, now)

        self._store.stage_soon(stage)

    def _serves_alone(self, committed: _Committed, service_id: str) -> None:
        """Record in memory, where the next gateway receives it again, that a member serves and others do not yet."""
        if service_id in committed.missing:
            committed.missing.discard(service_id)
            committed.is_served = True
            committed.members.setdefault(service_id, {})["commit"] = self._clock.monotonic() - committed.at

    @staticmethod
    def _served_by(all_committed: Sequence[_Committed], service_id: str, version: int) -> list[_Committed]:
        """Those that no member is missing of once this one serves a version."""
        return [
            each
            for each in all_committed
            if len(each.missing) == (version >= each.version and service_id in each.missing)
        ]

    def stage_gone(self, change: Transaction, experiment_id: str, service_id: str) -> None:
        """Record that a rollout is gone, and stop waiting for it.

        A version that no other member has served is not served by its end.
        """
        all_committed = self._staged_committed(change, experiment_id)
        served = [each for each in all_committed if each.missing <= {service_id}]

        def follow() -> None:
            for each in all_committed:
                each.missing.discard(service_id)

        change.then(follow)
        if served:
            self._stage_served(change, experiment_id, served, None, self._clock.monotonic(), without=service_id)
        elif any(service_id in each.missing for each in all_committed):
            # The next gateway has no member of its name to wait for.
            shown = [replace(each, missing=each.missing - {service_id}) for each in all_committed]
            measured = change.staged((self, experiment_id), self._open.get(experiment_id))
            change.write(self._window_of(experiment_id, measured, shown))

    def _stage_served(
        self,
        change: Transaction,
        experiment_id: str,
        served: Sequence[_Committed],
        last: str | None,
        now: float,
        *,
        without: str | None = None,
    ) -> None:
        """Store what versions took that all members serve now; memory follows.

        Args:
            last: the member that was the last to serve them; None if the last one is gone.
            now: when that was.
            without: a member that is gone.
        """
        if not served:
            return
        newest: Members = {}
        for each in served:
            if last is None and not each.is_served:
                self._stage_points(change, experiment_id, each, each.seconds)
                continue
            newest = {name: dict(parts) for name, parts in each.members.items()}
            if last is not None and last in each.missing:
                newest.setdefault(last, {})["commit"] = now - each.at
            if without is not None:
                newest.pop(without, None)
            self._stage_points(change, experiment_id, each, each.seconds | {COMMIT: now - each.at})
            slowest = sorted(newest.items(), key=lambda item: -sum(item[1].values()))[:MOST_MEMBERS]
            members = {name: {part: round(spent, 4) for part, spent in parts.items()} for name, parts in slowest}
            self._events.stage(change, experiment_id, "publication_served", version=each.version, members=members)
        remaining = [each for each in self._staged_committed(change, experiment_id) if each not in served]
        self._stage_committed(change, experiment_id, remaining)
        shown = [replace(each, missing=each.missing - {without}) for each in remaining]
        measured = change.staged((self, experiment_id), self._open.get(experiment_id))
        change.write(self._window_of(experiment_id, measured, shown))
        if last is not None:
            change.then(lambda: self._newest.update({experiment_id: newest}))

    def stage_close(self, change: Transaction, experiment_id: str) -> None:
        """Store what is known, without the commits that have not ended: the experiment ends.

        No record shows that all members serve these versions: some never will.
        """
        for committed in self._staged_committed(change, experiment_id):
            self._stage_points(change, experiment_id, committed, committed.seconds)
        self._stage_committed(change, experiment_id, [])
        change.write(self._window_of(experiment_id, None, []))
        change.then(lambda: self._open.pop(experiment_id, None))

    def _stage(
        self, change: Transaction, experiment_id: str, measured: _Measured | None, *committed: _Committed
    ) -> None:
        change.stage((self, experiment_id), measured)
        all_committed = [*self._staged_committed(change, experiment_id), *committed]
        change.write(self._window_of(experiment_id, measured, all_committed))

        def follow() -> None:
            self._open.pop(experiment_id, None)
            if measured is not None:
                self._open[experiment_id] = measured

        change.then(follow)
        if committed:
            self._stage_committed(change, experiment_id, all_committed)

    def _staged_committed(self, change: Transaction, experiment_id: str) -> list[_Committed]:
        return change.staged((self, experiment_id, "committed"), self._committed.get(experiment_id, []))

    def _stage_committed(self, change: Transaction, experiment_id: str, remaining: list[_Committed]) -> None:
        change.stage((self, experiment_id, "committed"), remaining)

        def follow() -> None:
            self._committed.pop(experiment_id, None)
            if remaining:
                self._committed[experiment_id] = remaining

        change.then(follow)

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
                    "served": each.is_served,
                }
                for each in committed
            ],
        }
        return PutWindow(experiment_id, WINDOW, data)

    def _stage_points(
        self, change: Transaction, experiment_id: str, committed: _Committed, seconds: Mapping[str, float]
    ) -> None:
        at = rfc3339(self._clock.now())
        points = [
            PointRecord(name=name, step=committed.step, version=committed.version, value=value, at=at)
            for name, value in seconds.items()
        ]
        change.write(PutMetrics(experiment_id, points))
