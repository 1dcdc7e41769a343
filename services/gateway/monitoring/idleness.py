"""verl's ``rollouter/idle_ratio``: the share of a version's time in which the rollouts sampled nothing.

Every rollout reports, with its version, how long it was busy and idle since it began. The difference between its
switches to a version and to the next one is what it did under that version; a version's ratio is taken over all
rollouts, by their time. verl has one rollouter and divides the time that its generation was paused by that between two
synchronisations of weights.

From the same reports comes ``rollouter/cores``: the cores that an engine took while its rollout was busy.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from flotilla.services.gateway.records.repository import Experiment, PerExperiment, step_of
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics, PutWindow, Write
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.schemas.service import ObservedState


@dataclass(frozen=True, slots=True)
class _Reading:
    version: int
    busy: float
    idle: float
    cpu: float = 0.0


class Idleness:
    """The idle times of one experiment's rollouts, by version.

    Attributes:
        num_changes: how often what ``to_window`` describes has changed.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.is_restored = False
        self._began: dict[str, _Reading] = {}
        self._sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """Of each version: idle seconds, all seconds, and processor seconds."""

    def to_window(self) -> dict[str, Any]:
        """Describe what has begun and not ended, for ``restore``."""
        return {
            "began": {each: list(astuple(began)) for each, began in self._began.items()},
            "sums": {str(version): list(sums) for version, sums in self._sums.items()},
        }

    def restore(self, window: Mapping[str, Any]) -> None:
        """Continue where an earlier gateway was, once and before anything is recorded."""
        if self.is_restored:
            return
        self.is_restored = True
        for service_id, began in window.get("began", {}).items():
            self._began[service_id] = _Reading(*began)
        for version, sums in window.get("sums", {}).items():
            self._sums[int(version)] = [*sums, *[0.0] * (3 - len(sums))]

    def record(
        self, service_id: str, version: int | None, load: Mapping[str, float]
    ) -> tuple[int, dict[str, float]] | None:
        """Record what a rollout reports.

        Returns:
            The version that it has just left, and of all rollouts under it, as far as they are known, the idle ratio
            and the cores; None while it still serves the version of its last report.
        """
        if version is None or version < 0 or "busy_seconds" not in load:
            return None
        now = _Reading(version, load["busy_seconds"], load["idle_seconds"], load.get("cpu_seconds", 0.0))
        began = self._began.get(service_id)
        if began is None or now.version < began.version or now.busy < began.busy:
            # Another engine, or another life of the service: what it did between the reports is not known.
            self._began[service_id] = now
            self.num_changes += 1
            return None
        if now.version == began.version:
            return None
        self._began[service_id] = now
        self.num_changes += 1
        sums = self._sums[began.version]
        sums[0] += max(0.0, now.idle - began.idle)
        sums[1] += max(0.0, now.idle - began.idle) + now.busy - began.busy
        # An engine that began again has its processor time from there on.
        sums[2] += now.cpu - began.cpu if now.cpu >= began.cpu else now.cpu
        for old in [each for each in self._sums if each < began.version - 1]:
            del self._sums[old]
        if sums[1] <= 0:
            return None
        found = {IDLE_RATIO: sums[0] / sums[1]}
        if sums[2] > 0 and sums[1] > sums[0]:
            found[CORES] = sums[2] / (sums[1] - sums[0])
        return began.version, found


IDLE_RATIO = "rollouter/idle_ratio"
CORES = "rollouter/cores"


class IdleRatios:
    """The idle times of all experiments' rollouts."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._idleness = PerExperiment(Idleness)

    async def record(self, experiment: Experiment, service_id: str, observed: ObservedState) -> None:
        """Record what a rollout reports; store the ratio of the version that it has just left, if there is one."""
        idleness = self._idleness.of(experiment)
        if not idleness.is_restored:
            idleness.restore(await self._store.window(experiment.id, IDLE_RATIO))
        before = idleness.num_changes
        found = idleness.record(service_id, observed.policy_version, observed.load)
        if idleness.num_changes == before:
            return
        window = PutWindow(experiment.id, IDLE_RATIO, idleness.to_window())
        writes: list[Write] = [window]
        if found is not None:
            version, values = found
            # The step with which the version ended: that of the one which the rollout serves now.
            step = await step_of(self._store, experiment.record, observed.policy_version or 0)
            at = rfc3339(self._clock.now())
            points = [
                PointRecord(name=name, step=step, version=version, value=value, at=at) for name, value in values.items()
            ]
            writes.append(PutMetrics(experiment.id, points))
        self._store.write_soon(*writes)
