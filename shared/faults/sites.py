"""Where a fault can happen, and which kinds of fault each place knows."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    """The process ends at once by SIGKILL."""
    STALL = "stall"
    """The whole process stands still for ``seconds``, its leases and heartbeats included."""
    SLOW = "slow"
    """The operation takes ``seconds`` longer; what else the process does continues where it can."""
    REFUSE = "refuse"
    """The operation fails as if the other side were not there; afterwards: as if its answer had been lost."""
    HALF_OPEN = "half_open"
    """The request is accepted and never answered."""
    PARTIAL = "partial"
    """After ``slices`` slices the broadcast goes no further: the process stays and is silent."""
    DUPLICATE = "duplicate"
    """The operation is done twice, as if its first answer had been lost."""
    REORDER = "reorder"
    """Entries come in another order; with ``seconds``, one of them that much later, its lease running."""
    FLIP = "flip"
    """One bit of one weight is another."""
    HALF = "half"
    """One half of the tensors is zeros."""
    KEEP = "keep"
    """What is replaced stays as it was."""
    DISK_FULL = "disk_full"
    """The disk has no room (ENOSPC)."""
    SKEW = "skew"
    """From then on the wall clock is off by ``seconds``."""


class Site(StrEnum):
    """A named place in the code."""

    CLAIM = "streams.claim"
    DELIVERY = "streams.delivery"
    FORWARD = "streams.forward"
    RESOLVE = "streams.resolve"
    ISSUE = "streams.issue"
    RENEW = "streams.renew"
    HAND_BACK = "streams.hand_back"
    HAND_OVER = "streams.hand_over"
    PLAN = "streams.plan"
    COMMIT = "streams.commit"
    CLIENT_CALL = "client.call"
    HTTP_REQUEST = "http.request"
    WEIGHTS_SEND = "weights.send"
    WEIGHTS_RECEIVE = "weights.receive"
    WEIGHTS_IMAGE = "weights.image"
    CHECKPOINT_COPY = "checkpoint.copy"
    CHECKPOINT_FILE = "checkpoint.file"
    CHECKPOINT_WRITE = "checkpoint.write"
    ENGINE_STEP = "engine.step"
    ENGINE_READ = "engine.read"
    ENGINE_SWITCH = "engine.switch"
    REWARD_SCORE = "reward.score"
    TRAINER_STEP = "trainer.step"
    TRAINER_SNAPSHOT = "trainer.snapshot"
    CLOCK = "clock.now"


@dataclass(frozen=True, slots=True)
class Place:
    """What a site is.

    Attributes:
        what: one phrase.
        kinds: the faults that it knows.
        has_after: whether ``phase=after`` has a meaning: the operation was done, and the fault follows it.
        has_path: whether requests there have a path, which ``path`` may choose by its beginning.
        has_slices: whether it is reached once for each slice of an image.
    """

    what: str
    kinds: frozenset[Kind]
    has_after: bool = False
    has_path: bool = False
    has_slices: bool = False


_DELAYS = frozenset({Kind.KILL, Kind.STALL, Kind.SLOW})
_REPEATED = _DELAYS | {Kind.REFUSE, Kind.DUPLICATE}

PLACES: Mapping[Site, Place] = MappingProxyType(
    {
        Site.CLAIM: Place("entries of a stream are claimed", _DELAYS | {Kind.REFUSE}),
        Site.DELIVERY: Place("claimed entries are given to whom claimed them", frozenset({Kind.REORDER})),
        Site.FORWARD: Place("a result is forwarded to the next stream", _REPEATED, has_after=True),
        Site.RESOLVE: Place("a group ends as filtered, dropped or failed", _REPEATED, has_after=True),
        Site.ISSUE: Place("tasks are issued", _REPEATED, has_after=True),
        Site.RENEW: Place("claims are renewed", _REPEATED, has_after=True),
        Site.HAND_BACK: Place("a claim is given up", _REPEATED, has_after=True),
        Site.HAND_OVER: Place("a task is given up with its tokens", _REPEATED, has_after=True),
        Site.PLAN: Place("the plan of a step is written", _REPEATED, has_after=True),
        Site.COMMIT: Place("the plans that a checkpoint contains are resolved", _REPEATED, has_after=True),
        Site.CLIENT_CALL: Place("a service calls the gateway", _REPEATED, has_after=True, has_path=True),
        Site.HTTP_REQUEST: Place(
            "a request arrives at a service", _DELAYS | {Kind.REFUSE, Kind.HALF_OPEN}, has_path=True
        ),
        Site.WEIGHTS_SEND: Place("a slice of an image is sent", _DELAYS | {Kind.PARTIAL}, has_slices=True),
        Site.WEIGHTS_RECEIVE: Place("a slice of an image is received", _DELAYS | {Kind.PARTIAL}, has_slices=True),
        Site.WEIGHTS_IMAGE: Place("room for a weight image is reserved", frozenset({Kind.DISK_FULL})),
        Site.CHECKPOINT_COPY: Place("a rank has copied its part of a checkpoint into memory", _DELAYS),
        Site.CHECKPOINT_FILE: Place("one file of a copied checkpoint is on the disk", _DELAYS | {Kind.DISK_FULL}),
        Site.CHECKPOINT_WRITE: Place("a checkpoint is written", _DELAYS | {Kind.DISK_FULL}),
        Site.ENGINE_STEP: Place("the embedded engine makes a step", _DELAYS),
        Site.ENGINE_READ: Place("the embedded engine reads a weight image", frozenset({Kind.FLIP, Kind.HALF})),
        Site.ENGINE_SWITCH: Place("the embedded engine puts other weights in place", frozenset({Kind.KEEP})),
        Site.REWARD_SCORE: Place("a group's samples are scored", _DELAYS | {Kind.REFUSE}),
        Site.TRAINER_STEP: Place("a step is computed", _DELAYS),
        Site.TRAINER_SNAPSHOT: Place("a rank has written its part of an image", _DELAYS),
        Site.CLOCK: Place("the wall clock is read", frozenset({Kind.SKEW})),
    }
)

VARIABLE = "FLOTILLA_FAULTS"
PROCESSES = (
    "gateway",
    "rollout",
    "engine",
    "reward",
    "sandbox",
    "trainer",
    "trainer-worker",
    "trainer-follower",
    "weights",
)
"""Names of processes: the services, the worker processes inside them, and the members of weight groups."""
