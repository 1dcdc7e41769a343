"""How an experiment comes to rest: its services fall idle, what is left is resolved, the ledgers are kept in SQL."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.lifecycle.drain_outstanding import drain_outstanding
from flotilla.services.gateway.lifecycle.states import LifecycleEvent
from flotilla.services.gateway.membership.fleet import Fleet
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.signals import wait_for_any
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import MOST_WAITED_SECONDS, WAITS_FOR_TURN
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.redis.connection import COMPONENT

log = logging.getLogger(__name__)

EXPERIMENT_ENDED = "experiment_ended"
POLL_SECONDS = 0.1
UNAVAILABLE_BACKOFF_SECONDS = 1.0


class Teardown:
    """Brings one experiment to rest.

    Args:
        idle_timeout_seconds: how long its services may take to fall idle; later ones lose their claims.
        finish_sending: sends the last values to the trackers, and the last checkpoint to its URL, within deadlines of
            its own.
    """

    def __init__(
        self,
        experiment: Experiment,
        repository: ExperimentRepository,
        registry: Registry,
        fleet: Fleet,
        commands: ExperimentCommands,
        clock: Clock,
        *,
        idle_timeout_seconds: float,
        finish_sending: Callable[[], Awaitable[None]],
    ) -> None:
        self._experiment = experiment
        self._repository = repository
        self._registry = registry
        self._fleet = fleet
        self._commands = commands
        self._clock = clock
        self._idle_timeout_seconds = idle_timeout_seconds
        self._finish_sending = finish_sending

    async def run(self) -> None:
        """Wait for quiet, resolve what is left, release the services, finish what is sent elsewhere, conclude."""
        await self._wait_for_quiet()
        while True:
            try:
                step = await self._repository.durable_step(self._experiment)
                train = await drain_outstanding(self._experiment, Lane.TRAIN, EXPERIMENT_ENDED, durable_step=step)
                evaluation = await drain_outstanding(self._experiment, Lane.EVALUATION, EXPERIMENT_ENDED)
                break
            except Unavailable as error:
                log.warning(
                    "data plane is unavailable", extra={"experiment_id": self._experiment.id, "error": repr(error)}
                )
                # One that failed keeps its cause.
                if error.context.get("component") == COMPONENT and not self._experiment.state.is_final:
                    await self._repository.set_problem(self._experiment, COMPONENT, error.detail)
                await asyncio.sleep(UNAVAILABLE_BACKOFF_SECONDS)
        for service in self._registry.of(self._experiment.id):
            await self._fleet.release(service, "the experiment has ended")
        await self._finish_sending()
        ledgers = {"train": train.model_dump(mode="json"), "evaluation": evaluation.model_dump(mode="json")}
        async with self._repository.transaction() as change:
            self._repository.stage(change, self._experiment, final_ledger=ledgers, evaluating_version=None)
            self._commands.stage_conclusion(change, self._experiment, LifecycleEvent.QUIET, problem=None)

    async def _wait_for_quiet(self) -> None:
        began = since = self._clock.monotonic()
        while (now := self._clock.monotonic()) < since + self._idle_timeout_seconds:
            working = [s for s in self._registry.of(self._experiment.id) if s.works_for(self._experiment.id)]
            if not working:
                return
            if any(WAITS_FOR_TURN in service.observed.load for service in working):
                # Its last checkpoint has so long once others' steps let it begin.
                since = min(now, began + MOST_WAITED_SECONDS)
            await wait_for_any(POLL_SECONDS, self._experiment.changed.next)
        log.warning("services did not fall idle", extra={"experiment_id": self._experiment.id})
