"""Who can receive weights, and by which transport: pure, from the spec and what services reported."""

from services.gateway.registry.services import LiveService
from shared.config.publication import TransportChoice
from shared.config.spec import ExperimentSpec
from shared.schemas.publication import Transport
from shared.schemas.service import Capabilities, ServiceKind, WorkState

AT_WORK = frozenset({WorkState.STARTING, WorkState.RUNNING, WorkState.PAUSED})


def transport_for(spec: ExperimentSpec, trainer: Capabilities, rollout: Capabilities) -> Transport | None:
    """Choose how a rollout gets the trainer's images; None if it has to pull them.

    Args:
        spec: the experiment; its ``asynchrony.publication.transport`` decides, and for ``auto`` its devices do.
        trainer: of the sending service.
        rollout: of the receiving service.
    """
    choice = spec.asynchrony.publication.transport
    if choice in {TransportChoice.AUTO, TransportChoice.SHARED_MEMORY} and _share_memory(trainer, rollout):
        return Transport.SHARED_MEMORY
    if choice in {TransportChoice.SHARED_MEMORY, TransportChoice.PULL}:
        return None
    collective = Transport.NCCL if spec.uses_nccl else Transport.GLOO
    return collective if collective.value in trainer.transports and collective.value in rollout.transports else None


def _share_memory(trainer: Capabilities, rollout: Capabilities) -> bool:
    return trainer.shared_memory is not None and trainer.shared_memory == rollout.shared_memory


def can_receive(service: LiveService) -> bool:
    """Whether a service is a rollout whose engine runs."""
    observed = service.observed
    has_engine = observed.policy_version is not None and observed.policy_version >= 0
    is_at_work = observed.experiment_id == service.experiment_id and observed.state in AT_WORK
    return service.kind is ServiceKind.ROLLOUT and has_engine and is_at_work and not service.is_draining
