"""The one hop abstraction: claim an entry under a lease, then forward, resolve or hand it back.

Delivery is at least once, effect exactly once: an entry leaves its stream only through the holder of its claim, in the
same atomic step that appends the result to the next stream or counts the resolution. A holder that lost its claim is
informed, and discards its result.

A delivery that ended with the death of its holder counts towards giving the entry up. One that a living holder lost,
by a pause of its process or a partition, does not: the holder reports it on noticing.

A claim is held while its entry is pending for the same consumer with the same delivery count. Consumer names are
unique to one incarnation of a process, so a restarted process never passes for its predecessor.

All keys of an experiment in Redis have the same hash tag, so that its scripts may touch them together on a cluster.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pydantic import Field

from flotilla.shared.concurrency.cancelling import Happening
from flotilla.shared.config.base.model import Config
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.task import Lane, Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.codec import (
    EntryHeader,
    decode_group,
    decode_partials,
    decode_task,
    encode_body,
    encode_grades,
    encode_task,
    graded_header,
    group_header,
    task_header,
)
from flotilla.shared.streams.partials import Partials, within

log = logging.getLogger(__name__)

CONSUMER_GROUP = "hop"
"""The one consumer group that each stream has."""

HANDED_BACK = "handed-back"
"""Reserved consumer: its entries wait to be claimed again, at once and by anyone."""

PLANNED = "planned"
"""Reserved consumer: its entries belong to the plan of a step and are never claimed."""


class HopName(StrEnum):
    """The streams of a lane, in the order that a task travels them."""

    TASKS = "tasks"
    GENERATED = "generated"
    SCORED = "scored"

    @property
    def next(self) -> "HopName | None":
        """The stream that a claim of this one is forwarded to; None after the last."""
        return _NEXT.get(self)


_NEXT = {HopName.TASKS: HopName.GENERATED, HopName.GENERATED: HopName.SCORED}

LEASED = (HopName.TASKS, HopName.GENERATED)
"""Hops whose claims belong to services that come and go, and end with a lease."""


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """Key names of one lane of one experiment."""

    experiment_id: str
    lane: Lane = Lane.TRAIN

    def __post_init__(self) -> None:
        if not self.experiment_id or set(self.experiment_id) & set("{}: \n"):
            raise ValueError(f"an experiment id has no braces, colons or spaces, got {self.experiment_id!r}")

    @property
    def prefix(self) -> str:
        """What every key of the lane begins with."""
        tag = f"{{exp:{self.experiment_id}}}"
        return tag if self.lane is Lane.TRAIN else f"{tag}:{self.lane.value}"

    def stream(self, hop: HopName) -> str:
        """The stream of a hop."""
        return f"{self.prefix}:{hop.value}"

    def marker(self, token: str) -> str:
        """The short-lived key that records how the holder of the claim with this token ended it."""
        return f"{self.prefix}:done:{token}"

    def lost_alive(self, hop: HopName, entry_id: str) -> str:
        """The short-lived set of tokens of claims of an entry that were lost by holders who lived."""
        return f"{self.prefix}:lost:{hop.value}:{entry_id}"

    def letter(self, name: str) -> str:
        """The short-lived hash of one answer that is expected later, such as a grader's."""
        return f"{self.prefix}:letter:{name}"

    @property
    def ledger(self) -> str:
        """Hash of the ledger's counters."""
        return f"{self.prefix}:ledger"

    @property
    def consumed(self) -> str:
        """Hash: version being trained -> groups planned under it and not yet covered by a publication."""
        return f"{self.prefix}:consumed"

    @property
    def outstanding(self) -> str:
        """Sorted set: group id, scored by the policy version at its issue, while it is outstanding."""
        return f"{self.prefix}:outstanding"

    @property
    def handed_over(self) -> str:
        """Hash: group id -> the task with what was sampled of it, and its header, while it is among the tasks."""
        return f"{self.prefix}:handed_over"

    @property
    def shared(self) -> str:
        """Stream of what is offered to subscribers; its ids are ``NUMBER-0``. See ``Sharing``."""
        return f"{self.prefix}:shared"

    @property
    def plans(self) -> str:
        """Hash: step -> its plan, until the step is committed."""
        return f"{self.prefix}:plans"

    @property
    def lineage(self) -> str:
        """Hash: committed step -> the groups it trained and their versions."""
        return f"{self.prefix}:lineage"

    @property
    def state(self) -> str:
        """Hash: next_group_id, taken_through, published_version, trainer_incarnation, trainer_owner, what was rolled
        back last."""
        return f"{self.prefix}:state"

    @property
    def ends(self) -> str:
        """The channel that announces groups which ended other than in a plan. No key: nothing is kept of it."""
        return f"{self.prefix}:ends"

    def all(self) -> list[str]:
        """List every key of the lane but those of single claims and letters, which end by themselves."""
        streams = [*(self.stream(hop) for hop in HopName), self.shared]
        hashes = [self.ledger, self.consumed, self.outstanding, self.handed_over, self.plans, self.lineage, self.state]
        return [*streams, *hashes]


TOO_MANY_DELIVERIES = "too_many_deliveries"
STALE = "stale"
"""Why a group is dropped whose tokens are too old to be trained."""
REDUNDANT = "redundant"
"""The same, where more groups are issued than are trained: others were finished first."""
MAX_LOST_BY_THE_LIVING = 16
"""An entry delivered so many times as often as may be is given up whoever lost it, since it may itself be what makes
those who work on it late."""
HANDED_OVER = "handed over"
OF_FLEET = "@"
"""In the names of consumers that are registered with a gateway."""
FENCED = "a later trainer took over this experiment"


class Resolution(StrEnum):
    """How a group ends other than by travelling on."""

    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A stream entry held under a lease.

    Attributes:
        hop: the stream it was claimed from.
        entry_id: its id in that stream.
        header: the description of its payload.
        payload: msgpack, decoded by ``task`` or ``group``; of a group all but its grades.
        deliveries: how often the entry was delivered, this time included; 0 for a replayed one, which has no holder.
        consumer: the claiming process.
        grades: msgpack, decoded by ``group``; empty of a task.
        token: random; names this very claim, so that repeating a forward whose answer was lost is safe.
    """

    hop: HopName
    entry_id: str
    header: EntryHeader
    payload: bytes
    deliveries: int
    consumer: str
    grades: bytes = b""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _decoded: list[Group] = field(default_factory=list, init=False, repr=False)

    def task(self) -> Task:
        """Decode the task; from a later hop, the task of the group.

        Raises:
            ValueError: the payload has another schema.
        """
        return decode_task(self.payload) if self.hop is HopName.TASKS else self.group().task

    def partials(self) -> Partials:
        """Decode what was sampled of the task before it was handed over; empty for a fresh one, and at later hops."""
        return decode_partials(self.payload) if self.hop is HopName.TASKS else ()

    def group(self) -> Group:
        """Decode the group; again the same one when asked again.

        Raises:
            ValueError: the payload has another schema, or is a task.
        """
        if self.hop is HopName.TASKS:
            raise ValueError(f"entry {self.entry_id} of the hop {self.hop.value} is a task, not a group")
        if not self._decoded:
            self._decoded.append(decode_group(self.payload, self.grades))
        return self._decoded[0]

    def has_body_of(self, group: Group) -> bool:
        """Return, without reading an array, whether the payload is surely this group's too.

        It is if the group was made from ``group()`` by giving its trajectories other grades.
        """
        return bool(self._decoded) and group.has_body_of(self._decoded[0])


class Renewal:
    """What the renewal of some claims has found out so far."""

    def __init__(self) -> None:
        self.lost = Happening()
        """Set once any of the claims is held no more: the holder should stop its work."""
        self.lost_claims: list[Claim] = []


class Hop(Protocol):
    """One stream of a lane, as one process sees it. Every call may raise ``Unavailable`` after its deadline."""

    name: HopName
    consumer: str
    lease_seconds: float

    async def claim(self, count: int = 1, *, wait_seconds: float) -> list[Claim]:
        """Claim up to ``count`` entries, waiting up to ``wait_seconds`` for the first.

        Entries that were handed back, or whose holder's lease ended, come first; both are seen within half a second
        while waiting. Empty when nothing came.

        Raises:
            ClaimLost: a trainer's hop, after a later trainer took over.
        """
        ...

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Restart the leases, and return those claims that are held no more."""
        ...

    def renewing(self, *claims: Claim) -> AbstractAsyncContextManager[Renewal]:
        """Renew in the background at a third of the lease, while the block runs."""
        ...

    async def forward(self, claim: Claim, group: Group) -> bool:
        """Append the result to the next stream and remove the entry; False if the claim was lost.

        Of a group that differs from ``claim.group()`` in its grades alone, only these are encoded: the rest continues
        as it came. So do not change what is reached through a decoded group in place, such as its task's metadata.

        Raises:
            ValueError: the last hop has no next stream, or the group is not the claimed one.
        """
        ...

    async def forward_many(self, results: Sequence[tuple[Claim, Group]]) -> list[bool]:
        """Forward several, in few round trips; each stands alone."""
        ...

    async def resolve(self, claim: Claim, resolution: Resolution, reason: str) -> bool:
        """End the group's way, counted under the resolution and its reason; False if the claim was lost."""
        ...

    async def resolve_many(self, claims: Sequence[Claim], resolution: Resolution, reason: str) -> list[bool]:
        """Resolve several under one reason, in few round trips; each stands alone."""
        ...

    async def hand_back(self, claim: Claim) -> bool:
        """Give the claim up at once, so that anyone claims the entry next; this delivery does not count."""
        ...

    async def hand_over(self, claim: Claim, partials: Partials) -> bool:
        """Give a task's claim up with what was sampled of it; False if the claim was lost, and the tokens with it.

        The task keeps its place and its age, so it is claimed before fresh ones, by anyone, who continues from the
        partials; this delivery does not count. Members that do not fit ``max_partial_bytes`` are left out.

        Raises:
            ValueError: this is not the first hop, or there is not one partial (or None) for each member.
        """
        ...


def consumer_name(service_id: str) -> str:
    """Make a consumer name that no other process, and no later incarnation of this one, has."""
    return f"{service_id}-{secrets.token_hex(6)}"


def holder_name(kind: str, pid: int, incarnation: str) -> str:
    """Name a process of the fleet as a claimer, so that the gateway knows what it holds: for ``consumer_name``."""
    return f"{kind}-{pid}{OF_FLEET}{incarnation}"


def holder_of(consumer: str) -> str | None:
    """Find the name that ``holder_name`` gave in a consumer's; None if it is not a process of the fleet."""
    holder = consumer.rpartition("-")[0]
    return holder if OF_FLEET in holder else None


def counter_of(resolution: Resolution, reason: str) -> str:
    """Name the ledger's counter for a resolution.

    Raises:
        ValueError: the reason is empty or holds a colon.
    """
    if not reason or ":" in reason:
        raise ValueError(f"a reason is a short phrase without a colon, got {reason!r}")
    return resolution.value if resolution is Resolution.TRAINED else f"{resolution.value}:{reason}"


def check_hop(claim: Claim, hop: HopName) -> Claim:
    """Check that a claim is used at the hop that it was claimed from, and return it.

    Raises:
        ValueError: it is another hop's.
    """
    if claim.hop is not hop:
        raise ValueError(f"a claim of the hop {claim.hop.value} cannot end at the hop {hop.value}")
    return claim


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What becomes of a claimed entry in the next stream.

    Attributes:
        destination: the next stream.
        header: describes the group.
        body: the entry's payload; the claimed entry's where that is the group's too.
        grades: of the trajectories.
    """

    destination: HopName
    header: EntryHeader
    body: bytes
    grades: bytes


def forwarded(claim: Claim, group: Group, hop: HopName) -> Forwarded:
    """Make the entry that carries a claim's result on.

    Raises:
        ValueError: the last hop has no next stream, the claim is another hop's, or the group is not the claimed one.
    """
    destination = check_hop(claim, hop).hop.next
    if destination is None:
        raise ValueError(f"nothing follows the hop {claim.hop.value}: plan or resolve its claims")
    if group.task.group_id != claim.header.group_id:
        raise ValueError(f"claim of group {claim.header.group_id} cannot forward group {group.task.group_id}")
    if claim.has_body_of(group):
        return Forwarded(destination, graded_header(group, claim.header), claim.payload, encode_grades(group))
    return Forwarded(destination, group_header(group), encode_body(group), encode_grades(group))


def handed_over(claim: Claim, hop: HopName, partials: Partials, max_bytes: int) -> tuple[EntryHeader, bytes]:
    """Make what takes the place of a handed-over entry's content.

    Raises:
        ValueError: see ``Hop.hand_over``.
    """
    if check_hop(claim, hop).hop is not HopName.TASKS:
        raise ValueError(f"only tasks are handed over, this is the hop {hop.value}")
    task = claim.task()
    if len(partials) != task.group_size:
        raise ValueError(f"{len(partials)} partials do not go with a group of {task.group_size}")
    kept = within(partials, max_bytes)
    return task_header(task, claim.header.created_at, partials=kept), encode_task(task, kept)


@asynccontextmanager
async def renewing(hop: Hop, claims: Sequence[Claim]) -> AsyncIterator[Renewal]:
    """Renew ``claims`` at a third of the hop's lease while the block runs.

    While the server does not answer, the claims count as held, however long: it cannot give them to another consumer
    meanwhile, and only its answer says whether they were lost.
    """
    renewal = Renewal()
    tasks: list[asyncio.Task[None]] = []

    def begin() -> None:
        tasks.append(asyncio.create_task(_keep_renewing(hop, list(claims), renewal), name=f"renew {hop.name.value}"))

    # Most work ends long before: a timer costs it less than a task.
    first = asyncio.get_running_loop().call_later(hop.lease_seconds / 3, begin)
    try:
        yield renewal
    finally:
        first.cancel()
        for task in tasks:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _keep_renewing(hop: Hop, held: list[Claim], renewal: Renewal) -> None:
    while held:
        lost: list[Claim] = []
        try:
            lost = await hop.renew(held)
        except Unavailable as error:
            log.warning("claims cannot be renewed now", extra={"hop": hop.name.value, "error": error.detail})
        except Exception:
            # This task is not awaited before the block ends: set it now, so that the holder stops.
            log.exception("renewal ended", extra={"hop": hop.name.value})
            lost = held
        if lost:
            log.warning("claims lost", extra={"hop": hop.name.value, "entries": [each.entry_id for each in lost]})
            renewal.lost_claims.extend(lost)
            renewal.lost.set()
            held = [claim for claim in held if claim not in lost]
        await asyncio.sleep(hop.lease_seconds / 3)


class StreamsConfig(Config):
    """Leases, deliveries and patience of the data plane."""

    lease_seconds: float = Field(60.0, gt=0)
    """A claim that is not renewed for this long is taken over. Holders renew at a third of it."""
    max_deliveries: int = Field(16, ge=1)
    """An entry delivered this often and still not forwarded is resolved as failed: too_many_deliveries."""
    deadline_seconds: float = Field(30.0, gt=0)
    """How long a call keeps trying while the server does not answer, before it raises Unavailable."""
    max_partial_bytes: int = Field(16 * 1024**2, ge=0)
    """Most tokens, in bytes, that a task is handed over with; members beyond are sampled afresh."""
