"""Lets trainer and rollouts of one experiment take turns on the devices that they share.

With ``resources.lending`` only lent rollouts are on the trainer's devices. What it waits for does not depend on them:
they get the devices where it pays and tasks wait for somebody, and give them back as soon as the trainer needs them.

The number of the shift is in the experiment's record, so that a gateway that restarts continues with it; everything
else is read again at each look. A holder that dies, hangs or is taken away ends no shift by itself: its place is empty
then, and what the others need decides.
"""

import logging

from flotilla.services.gateway.evaluation.schedule import due_version
from flotilla.services.gateway.feeder.admission import admitted
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.monitoring.lending import Lending
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.registry.shifts import Need, Reports, holder_of, next_shift, wants
from flotilla.services.gateway.signals import wait_for_any
from flotilla.shared.clock import Clock
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class Shifts:
    """Moves one experiment's shift.

    Args:
        feeder_status: holds the ledger as last read.
        lending: whether lending the devices pays now.
    """

    def __init__(
        self,
        experiment: Experiment,
        repository: ExperimentRepository,
        registry: Registry,
        publications: Publications,
        clock: Clock,
        feeder_status: FeederStatus,
        lending: Lending,
    ) -> None:
        self._experiment = experiment
        self._repository = repository
        self._registry = registry
        self._publications = publications
        self._clock = clock
        self._feeder_status = feeder_status
        self._lending = lending
        self._wanted_since: float | None = None

    async def run(self) -> None:
        """Check several times a second until cancelled."""
        while True:
            changed = self._experiment.changed.next
            await self.look()
            await wait_for_any(POLL_SECONDS, changed)

    async def look(self) -> None:
        """Compare the shift with what it should be."""
        experiment = self._experiment
        if experiment.state not in {ExperimentState.STARTING, ExperimentState.RUNNING}:
            return
        shift = experiment.record.device_shift
        trainer = self._registry.device_reports(experiment.id, ServiceKind.TRAINER)
        is_lending = experiment.spec.resources.lending is not None
        rollouts = self._registry.device_reports(experiment.id, ServiceKind.ROLLOUT, is_lending=is_lending)
        now = self._clock.monotonic()
        if not wants(shift, trainer.values()):
            self._wanted_since = None
        elif self._wanted_since is None:
            self._wanted_since = now
        waited = 0.0 if self._wanted_since is None else now - self._wanted_since
        need = self._need_of_lent(rollouts, waited) if is_lending else self._need(waited)
        wanted = next_shift(shift, trainer, rollouts, need)
        if wanted == shift:
            return
        self._wanted_since = None
        await self._repository.update(experiment, device_shift=wanted)
        facts = {"experiment_id": experiment.id, "shift": wanted, "holder": holder_of(wanted).value}
        log.info("devices change hands", extra=facts)

    def _need(self, waited_seconds: float) -> Need:
        experiment, record = self._experiment, self._experiment.record
        is_publishing = self._publications.open_phase(experiment.id) is not None
        if experiment.state is ExperimentState.STARTING:
            engines = self._registry.of(experiment.id, ServiceKind.ROLLOUT)
            lacks = any(each.observed.policy_version is None for each in engines)
            return Need(lacks, is_publishing=is_publishing, waited_seconds=waited_seconds)
        evaluation = experiment.spec.evaluation
        due = evaluation and due_version(
            policy_version=record.policy_version,
            evaluated_version=record.evaluated_version,
            every_versions=evaluation.every_versions,
            is_trained=experiment.is_trained,
        )
        is_pinned = record.evaluating_version is not None or due is not None
        return Need(self._has_work(), is_pinned, is_publishing, waited_seconds)

    def _need_of_lent(self, rollouts: Reports, waited_seconds: float) -> Need:
        """Return what speaks for lending; the trainer has its devices back at once in any case."""
        experiment = self._experiment
        return Need(
            bool(rollouts) and (self._lacks_engine(rollouts) or self._pays()),
            is_publishing=self._publications.open_phase(experiment.id) is not None,
            waited_seconds=waited_seconds,
            patience_seconds=0.0,
        )

    def _lacks_engine(self, rollouts: Reports) -> bool:
        """Whether a lent rollout has no engine yet: one that is loaded while somebody waits for it helps nobody."""
        found = map(self._registry.find, rollouts)
        return any(each is not None and each.observed.policy_version is None for each in found)

    def _pays(self) -> bool:
        """Whether tasks wait for somebody, and the trainer for their groups, for longer than lending takes."""
        ledger, experiment = self._feeder_status.ledger, self._experiment
        if ledger is None or not self._lending.verdict.lends or experiment.record.evaluating_version is not None:
            return False
        has_next_step = ledger.waiting.scored + ledger.claimed.scored >= experiment.spec.groups_per_step
        return ledger.waiting.tasks > 0 and not has_next_step

    def _has_work(self) -> bool:
        """Whether rollouts could sample something; while it is unknown they keep the devices."""
        ledger, spec = self._feeder_status.ledger, self._experiment.spec
        if ledger is None:
            return holder_of(self._experiment.record.device_shift) is ServiceKind.ROLLOUT
        origin = self._experiment.record.origin
        steps = spec.optimisation.steps - (0 if origin is None else origin["step"])
        room = admitted(
            ledger,
            budget=spec.admission_budget,
            steps=steps,
            groups_per_step=spec.groups_per_step,
            redundant=spec.asynchrony.redundant_groups,
        )
        return bool(ledger.waiting.tasks or ledger.claimed.tasks or room)
