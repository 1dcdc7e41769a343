"""What is true after a trainer took over: the control plane's side of ``lineage.reconcile``.

Nothing goes back here. A version that is lost stays the current one until the trainer has published the weights that it
has under a higher number; rollouts and the feeder follow that as any other publication.
"""

import logging
from collections.abc import Callable, Sequence

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import DeleteCheckpoints
from flotilla.shared.checkpoints.lineage import Published, reconcile
from flotilla.shared.checkpoints.takeover import RefusedIncarnation, TakeoverAnswer, TakeoverRequest
from flotilla.shared.errors import Conflict, Unavailable
from flotilla.shared.schemas.live_changes import LiveChange
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.streams.plans import WORKERS_PER_EPOCH

log = logging.getLogger(__name__)


RestoreChanges = Callable[[Transaction, Experiment, Sequence[LiveChange]], None]


class Takeovers:
    """Answers trainers that take over.

    Args:
        restore_changes: takes over the live changes of a checkpoint.
    """

    def __init__(
        self,
        repository: ExperimentRepository,
        registry: Registry,
        store: Store,
        events: EventLog,
        restore_changes: RestoreChanges,
    ) -> None:
        self._repository = repository
        self._restore_changes = restore_changes
        self._registry = registry
        self._store = store
        self._events = events

    async def decide(self, experiment_id: str, service_id: str | None, request: TakeoverRequest) -> TakeoverAnswer:
        """Decide which versions the lineage has that a trainer service continues with.

        Raises:
            Conflict: the experiment is not active, or the service is not its trainer.
            Unavailable: the gateway has just started and has not yet heard from every rollout.
        """
        newest_version = await self._newest_version(self._of_trainer(experiment_id, service_id))
        async with self._repository.transaction() as change:
            # Asked again: a version may have been committed, or the experiment stopped, while this waited.
            experiment = self._of_trainer(experiment_id, service_id)
            record, spec = experiment.record, experiment.spec
            decided = reconcile(
                request.standing(),
                Published(record.policy_version, record.published_step),
                newest_version,
                steps_per_version=spec.steps_per_version,
                total_steps=spec.optimisation.steps,
            )
            if decided.end_step < spec.optimisation.steps:
                # The checkpoint of the last step may be the one that is gone.
                step = min(record.step, decided.end_step)
                self._repository.stage(change, experiment, is_trained=False, step=step)
            self._restore_changes(change, experiment, request.changes)
            # Those after the one that the trainer found whole are gone, or damaged and set aside.
            change.write(DeleteCheckpoints(experiment_id, request.step))
            if decided.lost is not None or request.groups_lost or request.groups_waiting:
                facts = {
                    "checkpoint_step": request.step,
                    "step": decided.end_step,
                    "lost_version": decided.lost,
                    "version": decided.points[-1].version,
                    "groups_lost": request.groups_lost,
                    "groups_waiting": request.groups_waiting,
                }
                log.warning("an experiment was rolled back", extra={"experiment_id": experiment_id, **facts})
                self._events.stage(change, experiment_id, "rolled_back", **facts)
        return TakeoverAnswer.of(decided, experiment.steering.changes)

    async def raise_epoch(self, experiment_id: str, service_id: str | None, refused: RefusedIncarnation) -> None:
        """Appoint a trainer again with a number that the data plane accepts.

        It knows a later one than the database where that came back older.

        Raises:
            Conflict: the experiment is not active, or the service is not its trainer.
        """
        epoch = refused.recorded // WORKERS_PER_EPOCH + 1
        async with self._repository.transaction() as change:
            experiment = self._of_trainer(experiment_id, service_id)
            before = experiment.record.trainer_epoch
            if epoch > before:
                self._repository.stage(change, experiment, trainer_epoch=epoch)
                self._events.stage(change, experiment_id, "trainer_epoch_raised", before=before, epoch=epoch)

    def _of_trainer(self, experiment_id: str, service_id: str | None) -> Experiment:
        experiment = self._repository.get(experiment_id)
        if not experiment.is_active:
            raise Conflict(f"experiment {experiment_id} is {experiment.state}: nobody takes over")
        trainer = self._registry.trainer_of(experiment_id)
        if trainer is None or trainer.id != service_id:
            raise Conflict(f"{service_id or 'no service'} is not the trainer of {experiment_id}")
        return experiment

    async def _newest_version(self, experiment: Experiment) -> int:
        """Find the highest number that was announced, committed or not, or that a rollout serves."""
        rollouts = self._registry.of(experiment.id, ServiceKind.ROLLOUT)
        unheard = [service.id for service in rollouts if not service.is_observed]
        if unheard:
            raise Unavailable(f"the gateway has not yet heard from {', '.join(unheard)}")
        announced = [publication.version for publication in await self._store.publications(experiment.id)]
        observed = [service.observed for service in rollouts]
        served = [each.policy_version or 0 for each in observed if each.experiment_id == experiment.id]
        return max([0, *announced, *served])
