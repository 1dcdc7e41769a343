"""What each service should do now: a pure function of what the gateway knows, with a tag that names the answer.

Equal facts give equal tags in every process, so a restarted gateway does not disturb a service that is up to date.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from flotilla.services.gateway.digest import digest
from flotilla.services.gateway.registry.shifts import SHARERS
from flotilla.shared.schemas.checks import CheckOrder
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.publication import Manifest, PublicationOrder
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
        notice_seconds: the remaining seconds.
        peers: addresses of rollouts that keep the image which this one lacks.
        node: a trainer's place in a job on several hosts.
        token: of a trainer's assignment.
        is_lent: computes on the trainer's devices, of all rollouts it alone, where these are lent.
    """

    service_id: str
    kind: ServiceKind
    is_draining: bool
    notice_ends: float | None = None
    notice_seconds: float | None = None
    peers: tuple[str, ...] = ()
    node: JobNode | None = None
    token: str | None = None
    is_lent: bool = False


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
        is_lending: these are shared with lent rollouts alone.
        may_hold: the service that may load its weights; None until all others have released theirs.
        last_change: id of the newest live change; None without one.
        agent_token: of the agents that its rollouts start; None where they start none.
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
    is_lending: bool = False
    may_hold: ServiceKind | None = None
    last_change: str | None = None
    agent_token: str | None = None


def desired(
    service: ServiceFacts, experiment: ExperimentFacts | None, order: PublicationOrder | None = None
) -> DesiredState:
    """Compute what a service should do.

    Args:
        service: the service.
        experiment: what it is assigned to, or None.
        order: what it has to do for the open publication, if it is a member of it.
    """
    answer = _common(service, experiment)
    if not _is_at_work(service, answer):
        return answer
    return _with_own(answer, order, "" if order is None else _digest_of(order.manifest), _urls(service, answer))


def _is_at_work(service: ServiceFacts, answer: DesiredState) -> bool:
    """Whether a service may have something to do that others have not: a rollout with an experiment."""
    return service.kind is ServiceKind.ROLLOUT and answer.assignment is not None


def _urls(service: ServiceFacts, answer: DesiredState) -> tuple[str, ...]:
    return tuple(url_at(peer, answer.policy_version or 0) for peer in service.peers)


def _digest_of(manifest: Manifest) -> str:
    # Of the text that pydantic writes: to sort the names of thousands of tensors takes five times as long.
    return digest(manifest.model_dump_json())


def _with_own(
    answer: DesiredState, order: PublicationOrder | None, manifest_digest: str, peers: tuple[str, ...]
) -> DesiredState:
    """Add what one rollout alone has to do; a manifest, of thousands of tensors, is in the tag by its digest."""
    if order is None and not peers:
        return answer
    content = None if order is None else order.model_dump(mode="json", exclude={"manifest"})
    tag = digest([answer.tag, content, manifest_digest, peers])
    return answer.model_copy(update={"publication": order, "weights_peers": peers, "tag": tag})


def _common(service: ServiceFacts, experiment: ExperimentFacts | None) -> DesiredState:
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
            token=experiment.agent_token if is_rollout else service.token,
        ),
        policy_version=version,
        policy_checksum=experiment.policy_checksum if is_rollout else None,
        policy_digest=experiment.policy_digest if is_rollout else None,
        weights_url=weights_url(experiment) if is_rollout else None,
        hold_version=experiment.hold_version if is_rollout else None,
        device=_device_order(service, experiment),
    )
    # Exclude the remaining seconds of a notice, which change all the time; include its end.
    content = answer.model_dump(mode="json", exclude={"tag": True, "notice_seconds": True, "assignment": {"spec"}})
    ends = [] if service.notice_ends is None else [service.notice_ends]
    return answer.model_copy(update={"tag": digest([content, experiment.spec_digest, *ends])})


def _device_order(service: ServiceFacts, experiment: ExperimentFacts) -> DeviceOrder | None:
    has_own = experiment.is_lending and service.kind is ServiceKind.ROLLOUT and not service.is_lent
    if experiment.device_shift is None or service.kind not in SHARERS or has_own:
        return None
    return DeviceOrder(shift=experiment.device_shift, may_hold=service.kind is experiment.may_hold)


class DesiredStates:
    """``desired`` for the services of one experiment, computed once for all that have the same.

    What is for one service alone, a trainer's place and token, is computed again when it changes; the rest of a notice
    does all the time. Orders, which differ by the member's rank, and peers are added to what all rollouts have in
    common, again when they change.
    """

    def __init__(self) -> None:
        self._experiment: ExperimentFacts | None = None
        self._answers: dict[tuple[ServiceKind, bool, bool], DesiredState] = {}
        self._own: dict[str, tuple[ServiceFacts, PublicationOrder | None, DesiredState]] = {}
        self._manifest: tuple[Manifest, str] | None = None

    def of(
        self, service: ServiceFacts, experiment: ExperimentFacts | None, order: PublicationOrder | None = None
    ) -> DesiredState:
        """Find what a service should do; the arguments are those of ``desired``."""
        if service.notice_ends is not None:
            return desired(service, experiment, order)
        if experiment != self._experiment:
            self._experiment, self._answers, self._own = experiment, {}, {}
        if order is None and not service.peers and service.token is None:
            return self._shared(service, experiment)
        known = self._own.get(service.service_id)
        if known is None or known[:2] != (service, order):
            known = self._own[service.service_id] = service, order, self._of_one(service, experiment, order)
        return known[2]

    def _of_one(
        self, service: ServiceFacts, experiment: ExperimentFacts | None, order: PublicationOrder | None
    ) -> DesiredState:
        if service.token is not None:
            return desired(service, experiment, order)
        answer = self._shared(service, experiment)
        if not _is_at_work(service, answer):
            return answer
        manifest_digest = "" if order is None else self._manifest_digest(order.manifest)
        return _with_own(answer, order, manifest_digest, _urls(service, answer))

    def _shared(self, service: ServiceFacts, experiment: ExperimentFacts | None) -> DesiredState:
        key = (service.kind, service.is_draining, service.is_lent)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _common(service, experiment)
        return answer

    def _manifest_digest(self, manifest: Manifest) -> str:
        if self._manifest is None or self._manifest[0] is not manifest:
            self._manifest = manifest, _digest_of(manifest)
        return self._manifest[1]


class Encoded:
    """What objects are as JSON, encoded once each: by what they are, not by what they hold."""

    def __init__(self) -> None:
        # With the object, so that no other one gets its identity.
        self._known: dict[int, tuple[object, bytes]] = {}

    def of(self, value: object, encode: Callable[[], bytes]) -> bytes:
        """Encode an object that never changes."""
        known = self._known.get(id(value))
        if known is None:
            if len(self._known) >= MOST_BODIES:
                self._known.clear()
            known = self._known[id(value)] = value, encode()
        return known[1]


class DesiredBodies:
    """Desired states as JSON, encoded once for all services that have the same; of others the large parts are."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        self._specs = Encoded()
        self._manifests = Encoded()

    def of(self, answer: DesiredState) -> bytes:
        """Encode a desired state."""
        if answer.publication is not None or answer.weights_peers:
            return self._in_parts(answer)
        # The tag covers all of it but the remaining seconds of a notice.
        if answer.notice_seconds is not None:
            return answer.model_dump_json().encode()
        body = self._bodies.get(answer.tag)
        if body is None:
            if len(self._bodies) >= MOST_BODIES:
                self._bodies.clear()
            body = self._bodies[answer.tag] = answer.model_dump_json().encode()
        return body

    def _in_parts(self, answer: DesiredState) -> bytes:
        """Encode what is for one service alone around what many have: the spec, and the manifest."""
        assignment, order = answer.assignment, answer.publication
        parts = {"assignment": assignment, "publication": order}
        body = answer.model_dump_json(exclude={name for name, part in parts.items() if part is not None}).encode()
        if assignment is not None:
            spec = self._specs.of(assignment.spec, lambda: _only(assignment, "spec"))
            body = _joined(body, "assignment", _with_member(_without(assignment, "spec"), spec))
        if order is not None:
            manifest = self._manifests.of(order.manifest, lambda: _only(order, "manifest"))
            body = _joined(body, "publication", _with_member(_without(order, "manifest"), manifest))
        return body


def _without(model: BaseModel, name: str) -> bytes:
    return model.model_dump_json(exclude={name}).encode()


def _only(model: BaseModel, name: str) -> bytes:
    """Encode one member of an object: its name and value, without braces."""
    return model.model_dump_json(include={name}).encode()[1:-1]


def _with_member(encoded: bytes, member: bytes) -> bytes:
    """Add a member to an object that has others."""
    return encoded[:-1] + b"," + member + b"}"


def _joined(encoded: bytes, name: str, value: bytes) -> bytes:
    return _with_member(encoded, b'"%s":%s' % (name.encode(), value))


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
