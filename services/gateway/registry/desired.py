"""What each service should do now: a pure function of what the gateway knows, with a tag that names the answer.

Equal facts give equal tags in every process, so a restarted gateway does not disturb a service that is up to date.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.services.gateway.digest import digest
from flotilla.services.gateway.registry.shifts import SHARERS
from flotilla.shared.schemas.checks import CheckOrder
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.publication import PublicationOrder
from flotilla.shared.schemas.service import (
    Assignment,
    DesiredState,
    DeviceOrder,
    JobNode,
    ObservedState,
    ServiceKind,
    WorkState,
)

MOST_BODIES = 64
"""How many encoded answers are kept: a few kilobytes each."""

WORK_STATES = {
    ExperimentState.STARTING: WorkState.RUNNING,
    ExperimentState.RUNNING: WorkState.RUNNING,
    ExperimentState.PAUSED: WorkState.PAUSED,
}


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What matters about a service.

    Attributes:
        is_draining: takes nothing new, and is released when it has finished.
        notice_ends: names the end of its notice; another end is another desired state.
        notice_seconds: what is left of it now.
        peers: addresses of rollouts that keep the image which this one lacks.
        node: a trainer's place in a job on several hosts.
        token: of a trainer's assignment.
    """

    service_id: str
    kind: ServiceKind
    is_draining: bool
    notice_ends: float | None = None
    notice_seconds: float | None = None
    peers: tuple[str, ...] = ()
    node: JobNode | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class ExperimentFacts:
    """What matters about the experiment that it is assigned to.

    Attributes:
        spec_digest: hash of ``spec``, computed once per revision.
        weights_address: base URL of the trainer service that serves the current version; None without a trainer.
        hold_version: version that an evaluation is pinned to.
        policy_checksum: of the image that was committed as ``policy_version``; None for the initial weights.
        policy_digest: of the weights in it; None for the initial ones.
        device_shift: where trainer and rollouts share devices: the number of the shift.
        may_hold: who may load its weights in it; None while others have not released theirs.
        last_change: id of the newest live change; None without one.
    """

    experiment_id: str
    state: ExperimentState
    revision: int
    spec: Mapping[str, Any]
    spec_digest: str
    directory: str
    trainer_epoch: int
    policy_version: int
    weights_address: str | None
    hold_version: int | None
    policy_checksum: str | None = None
    policy_digest: str | None = None
    device_shift: int | None = None
    may_hold: ServiceKind | None = None
    last_change: str | None = None


def desired(
    service: ServiceFacts, experiment: ExperimentFacts | None, order: PublicationOrder | None = None
) -> DesiredState:
    """Compute what a service should do.

    Args:
        service: the service.
        experiment: what it is assigned to, or None.
        order: what it has to do for the open publication, if it is a member of it.
    """
    if experiment is None or experiment.state not in WORK_STATES:
        state = WorkState.DRAINING if service.is_draining else WorkState.IDLE
        return DesiredState(tag=digest([state.value]), state=state)
    state = WorkState.DRAINING if service.is_draining else WORK_STATES[experiment.state]
    is_rollout = service.kind is ServiceKind.ROLLOUT
    version = experiment.policy_version if is_rollout else None
    answer = DesiredState(
        tag="",
        state=state,
        notice_seconds=service.notice_seconds if service.is_draining else None,
        assignment=Assignment(
            experiment_id=experiment.experiment_id,
            revision=experiment.revision,
            spec=experiment.spec,
            directory=experiment.directory,
            # Only for the trainer: the others have nothing to do when it is replaced.
            trainer_epoch=experiment.trainer_epoch if service.kind is ServiceKind.TRAINER else 0,
            last_change=experiment.last_change if service.kind is ServiceKind.TRAINER else None,
            node=service.node,
            token=service.token,
        ),
        policy_version=version,
        policy_checksum=experiment.policy_checksum if is_rollout else None,
        policy_digest=experiment.policy_digest if is_rollout else None,
        weights_url=weights_url(experiment) if is_rollout else None,
        weights_peers=tuple(url_at(peer, experiment.policy_version) for peer in service.peers) if is_rollout else (),
        hold_version=experiment.hold_version if is_rollout else None,
        publication=order if is_rollout else None,
        device=_device_order(service.kind, experiment),
    )
    # Exclude the remaining seconds of a notice, which change all the time; include its end.
    content = answer.model_dump(mode="json", exclude={"tag": True, "notice_seconds": True, "assignment": {"spec"}})
    ends = [] if service.notice_ends is None else [service.notice_ends]
    return answer.model_copy(update={"tag": digest([content, experiment.spec_digest, *ends])})


def _device_order(kind: ServiceKind, experiment: ExperimentFacts) -> DeviceOrder | None:
    if experiment.device_shift is None or kind not in SHARERS:
        return None
    return DeviceOrder(shift=experiment.device_shift, may_hold=kind is experiment.may_hold)


class DesiredStates:
    """``desired`` for the services of one experiment, computed once for all that have the same.

    What is for one service alone, an order, peers, a trainer's place and token, is computed again for others, or when
    it changes; the rest of a notice does all the time.
    """

    def __init__(self) -> None:
        self._experiment: ExperimentFacts | None = None
        self._answers: dict[tuple[ServiceKind, bool], DesiredState] = {}
        self._own: dict[str, tuple[ServiceFacts, PublicationOrder | None, DesiredState]] = {}

    def of(
        self, service: ServiceFacts, experiment: ExperimentFacts | None, order: PublicationOrder | None = None
    ) -> DesiredState:
        """Find what a service should do; the arguments are those of ``desired``."""
        if service.notice_ends is not None:
            return desired(service, experiment, order)
        if experiment != self._experiment:
            self._experiment, self._answers, self._own = experiment, {}, {}
        if order is not None or service.peers or service.token is not None:
            known = self._own.get(service.service_id)
            if known is None or known[:2] != (service, order):
                known = self._own[service.service_id] = service, order, desired(service, experiment, order)
            return known[2]
        key = (service.kind, service.is_draining)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = desired(service, experiment)
        return answer


class DesiredBodies:
    """Desired states as JSON, encoded once for all services that have the same."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    def of(self, answer: DesiredState) -> bytes:
        """Encode a desired state."""
        # The tag covers all of it but the remaining seconds of a notice.
        if answer.notice_seconds is not None:
            return answer.model_dump_json().encode()
        body = self._bodies.get(answer.tag)
        if body is None:
            if len(self._bodies) >= MOST_BODIES:
                self._bodies.clear()
            body = self._bodies[answer.tag] = answer.model_dump_json().encode()
        return body


def with_check(answer: DesiredState, order: CheckOrder | None) -> DesiredState:
    """Add what a service should try while the fleet is examined."""
    if order is None:
        return answer
    # All of the order: services with the same work have different ones, and answers of one tag are encoded once.
    return answer.model_copy(update={"check": order, "tag": digest([answer.tag, order.model_dump(mode="json")])})


def weights_url(experiment: ExperimentFacts) -> str | None:
    """Return the URL at which a rollout that lacks the current version can pull it; None if there is none."""
    if experiment.policy_version <= 0 or experiment.weights_address is None:
        return None
    return url_at(experiment.weights_address, experiment.policy_version)


def url_at(address: str, version: int) -> str:
    """Return the URL of a version at a service."""
    return f"{address.rstrip('/')}/v1/weights/{version}"


def may_move_others(before: ObservedState, observed: ObservedState, state: ExperimentState | None) -> bool:
    """Whether placement or an experiment's life may depend on the difference.

    That a service has followed a pause or a resume is no reason to look at all of a thousand services: each of them
    says so, within a fraction of a second.
    """
    if before.experiment_id != observed.experiment_id:
        return True
    if (before.policy_version is None) != (observed.policy_version is None):
        return True
    is_starting = state is ExperimentState.STARTING
    follows = not is_starting and {before.state, observed.state} <= {WorkState.RUNNING, WorkState.PAUSED}
    return before.state is not observed.state and not follows
