"""Names of everything that one experiment keeps in Redis.

All keys of an experiment have the same hash tag, so that its scripts may touch them together on a cluster.
"""

from dataclasses import dataclass
from enum import StrEnum

from flotilla.shared.schemas.task import Lane

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
        """The short-lived key that says how the holder of the claim with this token ended it."""
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
    def plans(self) -> str:
        """Hash: step -> its plan, until the step is committed."""
        return f"{self.prefix}:plans"

    @property
    def lineage(self) -> str:
        """Hash: committed step -> the groups it trained and their versions."""
        return f"{self.prefix}:lineage"

    @property
    def state(self) -> str:
        """Hash: next_group_id, published_version, trainer_incarnation, trainer_owner, what was rolled back last."""
        return f"{self.prefix}:state"

    def all(self) -> list[str]:
        """List every key of the lane but those of single claims and letters, which end by themselves."""
        streams = [self.stream(hop) for hop in HopName]
        hashes = [self.ledger, self.consumed, self.outstanding, self.handed_over, self.plans, self.lineage, self.state]
        return [*streams, *hashes]
