"""Messages between a service and the gateway: registration, observed state, desired state.

The exchange is level-triggered: a service sends all that it observes and gets all that it should do. A lost message
costs nothing, and either side may restart at any time.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.checks import CheckOrder
from flotilla.shared.schemas.engine import EngineOffer
from flotilla.shared.schemas.health import GradingReport, SamplingReport
from flotilla.shared.schemas.later_values import known_alone, shown
from flotilla.shared.schemas.publication import PublicationOrder, PublicationReport, ReceiveState
from flotilla.shared.schemas.wire import TolerantWire, Wire

POOL = "FLOTILLA_POOL"
NOTICES = "FLOTILLA_NOTICES"
METADATA = "FLOTILLA_METADATA_URL"
LINK_LOCAL = "http://169.254.169.254"
"""Where AWS, GCP and Azure have their metadata; only the machine itself reaches it."""
POOL_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
ON_DEMAND = "on-demand"
"""Of services that name no pool."""
LENT = "lent"
"""The pool of rollouts that compute on the devices of a trainer of their host, while that lends them."""


def is_spot(pool: str | None) -> bool:
    """Whether the machines of a pool are preemptible: ``spot``, or a name that begins with ``spot-``."""
    return pool == "spot" or (pool or "").startswith("spot-")


def pool_from(values: Mapping[str, str]) -> str | None:
    """Read ``FLOTILLA_POOL``; None where it is not set.

    Raises:
        InvalidRequest: it is no name.
    """
    text = values.get(POOL, "").strip()
    if text and not re.fullmatch(POOL_PATTERN, text):
        raise InvalidRequest(
            f"{POOL} must be a name of up to 64 small letters, digits, dots, dashes and underscores, such as spot, "
            f"spot-a100 or on-demand, got {text!r}"
        )
    return text or None


class Cloud(StrEnum):
    """Clouds whose metadata announce preemption."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Where preemption notices are read."""

    cloud: Cloud
    url: str = LINK_LOCAL


def notices_from(values: Mapping[str, str]) -> NoticeSource | None:
    """Read ``FLOTILLA_NOTICES`` and ``FLOTILLA_METADATA_URL``; None without them.

    Raises:
        InvalidRequest: the one names no cloud, or the other is no address.
    """
    text, url = values.get(NOTICES, "").strip().lower(), values.get(METADATA, "").strip() or LINK_LOCAL
    if text in {"", "none"}:
        return None
    if text not in set(Cloud):
        raise InvalidRequest(f"{NOTICES} must be {', '.join(Cloud)} or none, got {text!r}")
    try:
        parts = urlsplit(url)
        is_right = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and parts.path in {"", "/"}
    except ValueError:
        is_right = False
    if not is_right or parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidRequest(f"{METADATA} must be an address such as {LINK_LOCAL}, got {url!r}")
    return NoticeSource(Cloud(text), url.rstrip("/"))


WAITS_FOR_TURN = "waits_for_turn"
"""Load of a trainer whose worker is to compute, and waits for a step of another experiment in its process."""
MOST_WAITED_SECONDS = 600.0
"""So much of what one that ends waits for others' steps is no part of the time for its last checkpoint."""
RECEIVE_STATES = frozenset(each.value for each in ReceiveState)
DRAIN_NOTICE_SECONDS = 30.0
"""The notice of a service that is to leave, where none is given."""


class ServiceKind(StrEnum):
    """The kinds of service that register."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    SANDBOX = "sandbox"
    TRAINER = "trainer"


class WorkState(StrEnum):
    """What a service does, or should do, for the experiment it is assigned to."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    FINISHED = "finished"
    FAILED = "failed"


class GpuDevice(TolerantWire):
    """A GPU that a service may compute on."""

    index: int | None = Field(None, ge=0)
    """Its number on its machine, as nvidia-smi counts; None where it is known by its UUID alone."""
    uuid: str | None = None
    """What the driver calls it everywhere; None where nothing could be asked."""
    name: str | None = None
    memory_bytes: int = Field(0, ge=0)
    """0 where it is not known."""

    @property
    def label(self) -> str:
        """What CUDA_VISIBLE_DEVICES calls it."""
        return str(self.index) if self.index is not None else self.uuid or ""


LIVE_CHANGES = "live changes"
"""What a service that takes changes while it works can do, as the scheduler names it beside engines."""


class Capabilities(TolerantWire):
    """What a service can offer to a scheduler."""

    device: str = "cpu"
    """What its torch computes on: cuda where there are devices and its build can use them, else cpu."""
    devices: tuple[GpuDevice, ...] = ()
    """GPUs that it may use; an experiment gets all of them with the service."""
    machine: str | None = None
    """Identity of the machine, the same in all its containers; with a device's number it names the device."""
    engines: tuple[EngineOffer, ...] = ()
    """What a rollout can sample with."""
    cores: int = Field(1, ge=1)
    memory_bytes: int = Field(0, ge=0)
    transports: tuple[str, ...] = ()
    """Weight transports that it can receive or send by."""
    shared_memory: str | None = None
    """Identity of the shared memory that it sees; processes with the same one can map each other's images."""
    pool: str | None = Field(None, pattern=f"^{POOL_PATTERN}$")
    """The pool of machines that it runs in; None: it names none, and counts as on demand."""
    live_changes: bool = False
    """Whether a trainer, rollout or reward takes changes of its spec while it works; earlier releases do not report
    it."""

    @property
    def is_spot(self) -> bool:
        """Whether its machine is preemptible."""
        return is_spot(self.pool)

    @property
    def is_lent(self) -> bool:
        """Whether it has no devices of its own, and computes on a trainer's while these are lent."""
        return self.pool == LENT

    def device_ids(self, host: str) -> frozenset[str]:
        """Name the devices so that two services that may use the same one name it alike."""
        return frozenset(each.uuid or f"{self.machine or host}/{each.label}" for each in self.devices)

    @model_validator(mode="before")
    @classmethod
    def _forget_the_only_engine(cls, fields: Any) -> Any:
        # Rows of before there were several kinds name one.
        is_old = isinstance(fields, Mapping) and "engine" in fields
        return {name: value for name, value in fields.items() if name != "engine"} if is_old else fields


def _is_base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        # As those that call it read it and look it up: neither may raise there.
        is_good = is_good and bool(httpx.URL(text).host) and bool((parts.hostname or "").encode("idna"))
    except (ValueError, httpx.InvalidURL):  # of a port, an IPv6 address or a name that cannot be encoded
        is_good = False
    if not is_good or "@" in parts.netloc or parts.query or parts.fragment or not text.isprintable() or " " in text:
        raise ValueError("must be a URL such as http://10.0.0.7:9002, without user, query and fragment")
    return text


BaseUrl = Annotated[str, Field(max_length=300), AfterValidator(_is_base_url)]
"""Where an HTTP interface is: http or https."""


def _is_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text without control characters")
    return text


class Registration(TolerantWire):
    """How a service presents itself."""

    kind: ServiceKind
    address: BaseUrl
    """Base URL of its own HTTP interface."""
    host: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_is_printable)]
    pid: int = Field(gt=0, lt=2**31)
    capabilities: Capabilities = Capabilities()
    incarnation: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_is_printable)]
    """Random name of this process: a second registration of the same process gets the same id."""


class Registered(TolerantWire):
    """The gateway's answer to a registration."""

    service_id: str
    lease_seconds: float
    token: str | None = None
    """The service's own pass: what it shows to the gateway until an answer brings the next one."""
    peers: Annotated[Mapping[ServiceKind, str], known_alone(ServiceKind)] = {}
    """What it shows to other services, by their kind."""
    accepts: tuple[str, ...] = ()
    """SHA-256, hexadecimal, of the tokens that it lets in, besides its own."""
    accepts_for_weights: tuple[str, ...] = ()
    """The same of those that it lets in to read weights, and to nothing else."""
    accepts_for_logs: tuple[str, ...] = ()
    """The same of those that it lets in to read what it logged."""


TEACHER, GRADER, JUDGE, SANDBOX, AGENTS = "teacher", "grader", "judge", "sandbox", "agents"
OUTSIDE = frozenset({TEACHER, GRADER, JUDGE, SANDBOX, AGENTS})
"""Components of failures that are not the service's own: servers that it asks, and that do not answer now, and agents
that it starts."""


class Failure(TolerantWire):
    """Why a worker cannot continue."""

    component: str
    cause: str
    fatal: bool = True
    """False if the service recovers by itself and only reports what happened."""


class DeviceOrder(TolerantWire):
    """Whether a service may use the devices that the trainer and the rollouts of its experiment share in turns."""

    shift: int
    """Number of the shift: it grows whenever the devices change hands."""
    may_hold: bool
    """Whether it may load its weights: the shift is its own, and everybody else has released the devices. Otherwise it
    finishes or hands over what it is at, releases them and reports so."""


class DeviceReport(TolerantWire):
    """What a service has on the shared devices."""

    shift: int
    """The order that it follows; a report of an earlier shift does not apply."""
    is_held: bool
    """Whether its memory is there, or on its way there or away."""
    is_wanted: bool = False
    """Whether it cannot continue without the devices (trainer)."""


class JobReport(TolerantWire):
    """A trainer service's report on its node of a training job on several hosts."""

    epoch: int
    """The trainer epoch that the job belongs to: reports of another one are ignored."""
    host: str | None = None
    port: int | None = None
    """Where the job's store listens; the first node reports it."""
    ended: str | None = None
    """Why the job ended here. It is not started again in this epoch."""


class JobNode(TolerantWire):
    """A trainer service's place in a training job on several hosts."""

    rank: int
    """Of the node, from 0. The first one has the store, and the rank that leads."""
    count: int
    host: str | None = None
    port: int | None = None
    """Where the first node's store listens; None until it is reported, and for that node itself."""


def _understood(report: Any) -> Any:
    """Drop a report whose state this release does not know: a publication must not continue by it."""
    state = report.get("state") if isinstance(report, Mapping) else None
    return None if isinstance(state, str) and state not in RECEIVE_STATES else report


LONGEST_SERVED_DETAIL = 1000
"""Characters: each reported one is stored as an event."""


class ServedWeights(TolerantWire):
    """What a rollout's engine has found in its own memory: the last version that it loaded.

    While they are not those that were published the engine serves nothing, and loads them again.
    """

    version: int
    digest: str | None = Field(None, max_length=64)
    """That of the publication, which it has; None where the engine cannot be asked, or found something else."""
    diverged: int = Field(0, ge=0)
    """How often in a row it found something else, of this version."""
    detail: str | None = Field(None, max_length=LONGEST_SERVED_DETAIL)
    """What, the last time."""

    @property
    def finding(self) -> tuple[int, int]:
        """The identity of a finding, however it is worded."""
        return self.version, self.diverged


class ObservedState(TolerantWire):
    """A service's full report at one instant."""

    number: int = Field(0, ge=0)
    """Grows with each instant: two calls may overtake each other on their way. 0 from an earlier release."""
    acknowledged: str | None = None
    """Tag of the last desired state that it took in."""
    experiment_id: str | None = None
    state: Annotated[WorkState, shown(WorkState)] = WorkState.IDLE
    """One that the reader does not know is neither rest nor end."""
    policy_version: int | None = None
    """Version that it serves (rollout) or has last published (trainer)."""
    step: int | None = None
    """Steps done (trainer)."""
    publication: Annotated[PublicationReport | None, BeforeValidator(_understood)] = None
    held_image: str | None = None
    """Checksum of the image that a rollout keeps whole: a patch against it can be sent, and it can be pulled there."""
    served: ServedWeights | None = None
    """What its engine has in memory (rollout)."""
    load: Mapping[str, float] = {}
    """Gauges such as running, waiting, tokens_per_second; a new name needs no change of schema."""
    failure: Failure | None = None
    grading: GradingReport | None = None
    """What it has graded in training (reward)."""
    sampling: SamplingReport | None = None
    """What it has sampled in training (rollout)."""
    device: DeviceReport | None = None
    """Where devices are shared in turns: what it has there. None before it has had an order."""
    job: JobReport | None = None
    """Of its node of a job on several hosts; None where there is none."""


class Assignment(TolerantWire):
    """The experiment that a service works for."""

    experiment_id: str
    revision: int
    """Grows with each change of the spec; a worker that sees a new one applies it at a version boundary."""
    spec: Mapping[str, Any]
    """The resolved experiment spec."""
    directory: str
    """Where the experiment keeps its checkpoints and files, as the gateway's data directory has it."""
    trainer_epoch: int = 0
    """How often a trainer was assigned; the latest one alone may plan and commit. With several nodes it also rises when
    one is lost or its ranks end: the job of each epoch is another one."""
    last_change: str | None = None
    """Id of the newest live change of the spec, which ``spec`` is without. Only for the trainer, which asks for those
    that it does not know; groups carry what concerns the others."""
    node: JobNode | None = None
    """Its place in the epoch's job; None where there is one node, and while others are missing."""
    token: str | None = None
    """What a trainer shows to the gateway in its work for the experiment: it speaks for this service in this epoch, and
    for no other. Of a rollout: what the agent shows that it starts. None for the others, which speak through their
    status alone."""


class DesiredState(TolerantWire):
    """All that a service should do at one instant."""

    tag: str
    """Changes whenever any other field does."""
    state: WorkState
    assignment: Assignment | None = None
    policy_version: int | None = None
    """The committed version: a rollout that holds it in its spare buffer switches to it."""
    policy_checksum: str | None = None
    """xxh3-64 of the image that was committed as ``policy_version``: a spare of another one is not it. None where there
    is none (version 0), or where it is not known."""
    policy_digest: str | None = None
    """What its engine is to find in its own memory once it serves ``policy_version``; see ``Manifest.digest``."""
    weights_url: str | None = None
    """Where a rollout that does not have ``policy_version`` can pull it; None while only the initial weights exist."""
    weights_peers: tuple[str, ...] = ()
    """Where else: at rollouts that keep the image of ``policy_checksum``."""
    notice_seconds: float | None = None
    """While draining: the remaining seconds of the notice. None: no end was set; a running countdown continues."""
    hold_version: int | None = None
    """While set, a rollout does not go beyond this version (an evaluation is pinned to it)."""
    publication: PublicationOrder | None = None
    device: DeviceOrder | None = None
    """Where devices are shared in turns. None: it may use them all the time."""
    check: CheckOrder | None = None
    """What to try while the fleet is examined."""


class DrainRequest(Wire):
    """How long a service may take to leave."""

    notice_seconds: float = Field(DRAIN_NOTICE_SECONDS, ge=0, le=86_400)
    """It finishes what it can within them, and hands the rest over. Under 3 seconds it hands over at once."""


class ServiceView(TolerantWire):
    """A service as the gateway lists it."""

    service_id: str
    kind: Annotated[ServiceKind, shown(ServiceKind)]
    address: str
    host: str
    pid: int
    capabilities: Capabilities
    registered_at: str
    lease_expires_in_seconds: float
    is_draining: bool
    """It takes nothing new: it is leaving its experiment, or the fleet."""
    experiment_id: str | None = None
    """Its assignment, which it may not have opened or closed yet."""
    leaving: str | None = None
    """Why it was asked to leave this experiment."""
    notice_ends_in_seconds: float | None = None
    """The remaining time that it has to leave."""
    observed: ObservedState
