"""Which services can receive weights, and by which transport: pure, from the spec and their reports."""

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from flotilla.services.gateway.publications.relays import Beside, relayed_of
from flotilla.services.gateway.registry.services import LiveService
from flotilla.shared.config.sections.publication import TransportChoice
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.publication import RELAY, Transport
from flotilla.shared.schemas.service import Capabilities, ServiceKind, WorkState

MAX_PEERS = 4
"""How many rollouts one is sent to: more would not be faster, and each serves as few others."""
SPREAD, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""An odd factor that gives every pair of services an order of its own, cheaply."""
MOST_IN_GROUP = 16
"""Members of a gloo group: each has two connections to each other one."""
AT_WORK = frozenset({WorkState.STARTING, WorkState.RUNNING, WorkState.PAUSED})


def transport_for(spec: ExperimentSpec, trainer: Capabilities, rollout: Capabilities) -> Transport | None:
    """Choose how a rollout gets the trainer's images; None if it has to pull them.

    Args:
        spec: the experiment; its ``asynchrony.publication.transport`` decides, with its devices.
        trainer: of the sending service.
        rollout: of the receiving service.
    """
    choice = spec.asynchrony.publication.transport
    collective = Transport.NCCL if spec.uses_nccl else Transport.GLOO
    if spec.sends_to_engines:
        # Of the group the rollout's own process sees nothing: the trainer alone has to be able to form it.
        return Transport.ENGINE if collective.value in trainer.transports else None
    if choice in {TransportChoice.AUTO, TransportChoice.SHARED_MEMORY} and _share_memory(trainer, rollout):
        return Transport.SHARED_MEMORY
    if choice in {TransportChoice.SHARED_MEMORY, TransportChoice.PULL}:
        return None
    return collective if collective.value in trainer.transports and collective.value in rollout.transports else None


def _share_memory(trainer: Capabilities, rollout: Capabilities) -> bool:
    return trainer.shared_memory is not None and trainer.shared_memory == rollout.shared_memory


def can_receive(service: LiveService) -> bool:
    """Whether a service is a rollout whose engine runs."""
    observed = service.observed
    has_engine = observed.policy_version is not None and observed.policy_version >= 0
    is_at_work = observed.experiment_id == service.experiment_id and observed.state in AT_WORK
    return service.kind is ServiceKind.ROLLOUT and has_engine and is_at_work and not service.is_draining


def lacks_version(service: LiveService, version: int) -> bool:
    """Return whether a service is a rollout that serves another version than the committed one, or none yet."""
    return service.kind is ServiceKind.ROLLOUT and version > 0 and service.observed.policy_version != version


@dataclass(frozen=True, slots=True)
class Receivers:
    """The members that can receive a version, and how.

    Attributes:
        transports: of each service.
        beside: members outside the collective.
    """

    transports: dict[str, Transport]
    beside: Beside

    @property
    def ways(self) -> list[str]:
        """Name the ways in which the version travels."""
        ways = {transport.value for name, transport in self.transports.items() if name not in self.beside.relayed}
        return sorted(ways | ({RELAY} if self.beside.relayed else set()))


def receivers_of(
    spec: ExperimentSpec,
    trainer: Capabilities,
    services: Iterable[LiveService],
    group: Collection[str],
    *,
    has_image: bool,
    most_in_group: int,
) -> Receivers:
    """Name the services that a version can be sent to, and how each gets it.

    Args:
        spec: the experiment.
        trainer: of the sending service.
        services: of the experiment.
        group: members of the group that is open.
        has_image: whether the trainer has an image to be mapped.
        most_in_group: the most members of a gloo group.
    """
    transports: dict[str, Transport] = {}
    able: set[str] = set()
    memories: dict[str, str] = {}
    for service in services:
        if not can_receive(service):
            continue
        offers = service.capabilities
        transport = transport_for(spec, trainer, offers)
        if transport is None or (transport is Transport.SHARED_MEMORY and not has_image):
            continue
        transports[service.id] = transport
        # Services of an earlier release know nothing of it.
        if RELAY in offers.transports and RELAY in trainer.transports:
            able.add(service.id)
            if spec.asynchrony.publication.may_map and offers.shared_memory is not None:
                memories[service.id] = offers.shared_memory
    relayed = relayed_of(transports, able, memories, group, most_in_group)
    return Receivers(transports, Beside(relayed, memories))


def peers_of(
    service: LiveService, rollouts: Callable[[], Iterable[LiveService]], checksum: str | None
) -> list[LiveService]:
    """Choose rollouts that a rollout can pull an image from; each gets others, always the same.

    Args:
        service: that lacks it.
        rollouts: lists those of the same experiment; not asked where the service has the image already, as all members
            of a publication have when it is committed.
        checksum: of the image; None if it is unknown, so that no source can be trusted.
    """
    if checksum is None or service.observed.held_image == checksum:
        return []
    mine = service.position
    found = [
        each
        for each in rollouts()
        if each.observed.held_image == checksum and each is not service and not each.is_draining
    ]
    return heapq.nsmallest(MAX_PEERS, found, key=lambda each: ((each.position ^ mine) * SPREAD) & MASK)
