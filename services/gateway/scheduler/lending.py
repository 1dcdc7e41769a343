"""Which trainer's devices a lent rollout computes on, and what is told of it.

A rollout of the pool ``lent`` has no devices of its own, so it is in no quota. It works for the experiment whose
trainer is on its host and lends its devices; of several, for the one with fewest such rollouts. It begins once the
trainer is there, and leaves only for a trainer elsewhere: one that is started again finds it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.registry.shifts import holder_of
from flotilla.services.gateway.scheduler.placement import Placement, WhyLeave
from flotilla.shared.schemas.service import LENT, ServiceKind

GENERATED: Final = "generated_tokens"
"""Gauge of a rollout: what its engine has sampled since it began."""


class LentDevices:
    """Places lent rollouts, and says what is lent and why.

    Args:
        why: says why an experiment lends the devices now, or why not.
    """

    def __init__(self, registry: Registry, repository: ExperimentRepository, why: Callable[[Experiment], str]) -> None:
        self._registry, self._repository, self._why = registry, repository, why

    def with_lent(self, placement: Placement) -> Placement:
        """Add lent rollouts to what is assigned and what leaves."""
        lent = [each for each in self._registry if each.is_lent and not each.record.is_draining]
        if not lent:
            return placement
        counts = Counter(each.experiment_id for each in lent if each.experiment_id is not None)
        assigned, leaving = dict(placement.assigned), dict(placement.leaving)
        for service in lent:
            if service.experiment_id is not None:
                trainer = self._registry.trainer_of(service.experiment_id)
                if trainer is not None and not _is_beside(service, trainer):
                    leaving[service.id] = WhyLeave.TRAINER
            elif not service.is_busy and (found := self._lenders(service)):
                chosen = min(found, key=lambda each: counts[each.id])
                counts[chosen.id] += 1
                assigned[service.id] = chosen.id
        return replace(placement, assigned=assigned, leaving=leaving)

    def told(self, experiment: Experiment) -> str | None:
        """Return whether an experiment's devices are lent now, and why; None where its spec does not let them be."""
        if experiment.spec.resources.lending is None:
            return None
        lent = [each for each in self._registry.of(experiment.id, ServiceKind.ROLLOUT) if each.is_lent]
        trainer = self._registry.trainer_of(experiment.id)
        if not lent:
            host = "the trainer's host" if trainer is None else trainer.record.host
            return f"nothing is lent: no rollout of the pool {LENT} is there (flotilla rollout --pool {LENT} on {host})"
        if holder_of(experiment.record.device_shift) is ServiceKind.TRAINER:
            return f"the trainer has its devices: {self._why(experiment)}"
        return f"{', '.join(sorted(each.id for each in lent))} has the trainer's devices: {self._why(experiment)}"

    def sampled(self, experiment_id: str) -> float | None:
        """Count the tokens that an experiment's lent rollouts say to have sampled; None where not all say it."""
        rollouts = self._registry.of(experiment_id, ServiceKind.ROLLOUT)
        loads = [each.observed.load for each in rollouts if each.is_lent]
        return sum(load[GENERATED] for load in loads) if loads and all(GENERATED in load for load in loads) else None

    def _lenders(self, service: LiveService) -> list[Experiment]:
        return [each for each in self._lending() if self._suits(service, each)]

    def _lending(self) -> Iterator[Experiment]:
        return (each for each in self._repository if each.is_active and each.spec.resources.lending is not None)

    def _suits(self, service: LiveService, experiment: Experiment) -> bool:
        trainer = self._registry.trainer_of(experiment.id)
        hears = service.capabilities.live_changes or service.kind not in experiment.steering.hearers
        return trainer is not None and hears and _is_beside(service, trainer)


def _is_beside(service: LiveService, trainer: LiveService) -> bool:
    """Whether a rollout is on a trainer's host, and all that it may compute on is the trainer's."""
    here, there = (each.capabilities.machine or each.record.host for each in (service, trainer))
    return here == there and service.devices <= trainer.devices
