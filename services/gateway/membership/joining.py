"""Registrations that wait for their turn are stored together: a thousand services that start are not a thousand writes.

Whoever has the turn stages its own registration and those that wait behind it. They find themselves registered in their
own turn, or, where the database did not take them, stage themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.membership.returning import Returning
from flotilla.services.gateway.records.repository import ExperimentRepository
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Conflict, Unavailable
from flotilla.shared.schemas.service import Registration

MOST_TOGETHER = 64
REPLACED = "another process was started in its place"


@dataclass(eq=False, slots=True)
class _Waiting:
    """A registration that is not stored yet.

    Attributes:
        service_id: once it is staged.
        refused: why it was not.
        is_alone: whether the database refused it together with others, so that it is stored without them.
    """

    registration: Registration
    service_id: str | None = None
    refused: Conflict | None = None
    is_alone: bool = False

    @property
    def names(self) -> frozenset[str]:
        """What no two live services have alike: the process, and the address."""
        of = self.registration
        return frozenset({of.incarnation, f"{of.kind} {of.host} {of.address}"})


class Joining:
    """Registers services.

    Args:
        stage_leave: forgets a service, for a reason.

    Attributes:
        returning: those that were given up, and may come back.
    """

    def __init__(
        self,
        registry: Registry,
        repository: ExperimentRepository,
        events: EventLog,
        store: Store,
        clock: Clock,
        stage_leave: Callable[[Transaction, str, str], None],
    ) -> None:
        self._registry = registry
        self.returning = Returning(registry, repository, events, store, clock)
        self._store = store
        self._stage_leave = stage_leave
        # In the order in which they came.
        self._waiting: dict[_Waiting, None] = {}

    async def join(self, registration: Registration) -> LiveService:
        """Add a service; the same process gets the same id again.

        Raises:
            Conflict: a service of another kind has this incarnation.
        """
        own = _Waiting(registration)
        self._waiting[own] = None
        try:
            await self._in_turn(own)
        finally:
            self._waiting.pop(own, None)
        if own.refused is not None:
            raise own.refused
        return self._registry.get(own.service_id or "")

    async def _in_turn(self, own: _Waiting) -> None:
        """Store it, with others that wait; what is wrong with one of them then keeps none of the others out."""
        together = [own]
        try:
            async with self._store.transaction() as change:
                if own.refused is None and self._registry.find(own.service_id) is None:
                    together = self._stage(change, own)
        except Unavailable:
            raise
        except Exception:
            if len(together) == 1:
                raise
            for each in together:
                each.is_alone = True
            await self._in_turn(own)

    def _stage(self, change: Transaction, first: _Waiting) -> list[_Waiting]:
        together, names = [first], set(first.names)
        for each in self._waiting:
            if len(together) == MOST_TOGETHER or first.is_alone:
                break
            # What a process that is known may have depends on what all others have now: it takes its own turn.
            if names.isdisjoint(each.names) and not self.returning.knows(each.registration):
                together.append(each)
                names |= each.names
        for each in together:
            self._waiting.pop(each, None)
            try:
                service = self.returning.stage_registration(change, each.registration)
            except Conflict as error:
                each.refused = error
                continue
            each.service_id = service.id
            for dead in self._registry.superseded_by(change.staged(service, service.record)):
                self._stage_leave(change, dead.id, REPLACED)
        return together
