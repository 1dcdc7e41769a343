"""Claims of services that are dead: they end as soon as the gateway knows of the death, not only with their leases.

Level-triggered: whoever holds claims under the name of a process of the fleet, and is not registered, is dead. So a
death that a data plane's absence or a restart of the gateway hid is found at the next look. A service that was
removed while it lived finds its claims lost, discards its work and claims again once it has registered again.
"""

import logging

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.signals import Signal, wait_for_any
from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.hop import holder_of

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class OrphanedClaims:
    """Releases the claims of dead holders in the lanes of one experiment.

    Args:
        left: fires whenever a service has left the experiment.
    """

    def __init__(self, experiment: Experiment, registry: Registry, events: EventLog, left: Signal) -> None:
        self._experiment = experiment
        self._registry = registry
        self._events = events
        self._left = left

    async def run(self) -> None:
        """Check after each departure, and periodically, until cancelled."""
        while True:
            left = self._left.next
            try:
                await self.look()
            except Unavailable as error:
                log.warning(
                    "data plane is unavailable", extra={"experiment_id": self._experiment.id, "error": repr(error)}
                )
            await wait_for_any(POLL_SECONDS, left)

    async def look(self) -> int:
        """Free the claims of the dead, and return how many these were.

        Raises:
            Unavailable: the data plane does not answer.
        """
        freed = 0
        for plane in (self._experiment.train, self._experiment.evaluation):
            consumers = await plane.holders()
            # Only now: whoever held a claim a moment ago and lives was registered before, and still is.
            alive = {service.holder for service in self._registry}
            dead = {each for each in consumers if (holder := holder_of(each)) is not None and holder not in alive}
            freed += await plane.release(dead)
        if freed:
            await self._events.append(self._experiment.id, "claims_released", claims=freed)
        return freed
