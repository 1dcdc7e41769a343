"""Which trainer a request speaks for: the one that its token names, while that is the experiment's trainer."""

from flotilla.services.gateway.records.repository import ExperimentRepository
from flotilla.services.gateway.registry.services import Registry
from flotilla.shared.errors import NotAssigned
from flotilla.shared.net.authorisation.access import Principal, Scope


def speaking_trainer(
    who: Principal, experiment_id: str, repository: ExperimentRepository, registry: Registry
) -> str | None:
    """Find the trainer service that a request to an experiment speaks for.

    An operator speaks for whichever is assigned, and a reader, where one is let in at all, for none in particular.

    Args:
        who: of the request's token; that it is bound to this experiment was examined before.

    Returns:
        The service's id; None where no trainer is assigned.

    Raises:
        NotFound: there is no such experiment.
        NotAssigned: the token is of a service that is not its trainer now, or of an earlier epoch.
    """
    experiment = repository.get(experiment_id)
    trainer = registry.trainer_of(experiment_id)
    trainer_id = None if trainer is None else trainer.id
    if who.scope is not Scope.SERVICE:
        return trainer_id
    if who.service_id != trainer_id:
        raise NotAssigned(
            f"{who.service_id} is not the trainer of {experiment_id}; its trainer is {trainer_id or 'none'}"
        )
    if who.epoch != experiment.record.trainer_epoch:
        present = experiment.record.trainer_epoch
        raise NotAssigned(f"this token is of epoch {who.epoch} of the trainer of {experiment_id}; it is {present} now")
    return trainer_id
