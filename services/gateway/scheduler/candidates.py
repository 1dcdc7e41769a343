"""Services as the placement sees them, kept from one pass of the reconciler to the next.

It looks at all of a thousand services several times a second, and hardly one of them has changed meanwhile.
"""

from collections.abc import Iterable

from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.scheduler.demands import Candidate
from flotilla.services.gateway.store.records import ServiceRecord
from flotilla.shared.schemas.service import ServiceKind, WorkState

Facts = tuple[ServiceRecord, bool, frozenset[str], frozenset[str]]
"""All that a candidate is made of: the record, whether it leaves, the engines that it can start, its devices."""


class Candidates:
    """Makes a service's candidate again only when what it is made of has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Facts, Candidate]] = {}

    def of(self, services: Iterable[LiveService]) -> list[Candidate]:
        """List those that may be given work, in the order of the services."""
        known: dict[str, tuple[Facts, Candidate]] = {}
        for service in services:
            record = service.record
            # A draining trainer keeps its place until it is idle: an experiment never has two.
            if record.is_draining and not (service.kind is ServiceKind.TRAINER and record.experiment_id is not None):
                continue
            facts = (record, service.leaving is not None or _is_busy(service), service.engines, service.devices)
            found = self._known.get(record.id)
            known[record.id] = found if found is not None and found[0] == facts else (facts, _candidate(service, facts))
        self._known = known
        return [candidate for _, candidate in known.values()]


def _candidate(service: LiveService, facts: Facts) -> Candidate:
    record, is_leaving, engines, devices = facts
    return Candidate(record.id, service.kind, record.experiment_id, is_leaving, engines, devices)


def _is_busy(service: LiveService) -> bool:
    """Whether it has no experiment any more, but is not yet done with the one it had."""
    if service.record.experiment_id is not None:
        return False
    return service.observed.state is not WorkState.IDLE and service.observed.experiment_id is not None
