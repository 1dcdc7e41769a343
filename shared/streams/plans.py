"""The trainer's side: a step's plan is written before it is trained, and committed with the checkpoint that holds it.

Planned entries stay in the scored stream under a reserved consumer, so a trainer that comes back from an older
checkpoint reads the very same groups again, in the same order. Only the latest incarnation of the trainer may claim,
plan and commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgpack

from flotilla.shared.errors import ClaimLost
from flotilla.shared.streams.hop import FENCED, Claim, Hop, Resolution

LOST_WITH_CHECKPOINT = "lost_with_checkpoint"
"""Why a group is dropped that only weights were trained with, or sampled by, which no surviving checkpoint leads to."""

ENDED_BEFORE = "ended_before"
"""Why a group is dropped that came again after it had ended, of which nobody knows any more whether it was trained."""

WORKERS_PER_EPOCH = 1_000_000
"""A trainer's incarnation is its epoch, how often a trainer was assigned, times this, and the number of its worker."""

RECENT_STEPS = 64
"""Steps whose plans a checkpoint keeps: far more than are made in the seconds that a server's log may lose."""
LINEAGE_STEPS = 50_000
"""Steps whose groups the data plane remembers: some 8 MB. Which groups earlier ones trained, the checkpoint knows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The groups of one step, in training order.

    Attributes:
        step: the optimiser step that trains them.
        version: the policy version that the step trains.
        group_ids: in order.
        entry_ids: their entries in the scored stream; empty once the step is committed.
        oldest_version, newest_version: policy versions that sampled a token of them.
        token_count: tokens of them all that the policy sampled.
        token_counts: the same of each group, in order.
        parent: the lineage that the step continues, see ``lineage.follow``; empty where it is not known.
    """

    step: int
    version: int
    group_ids: tuple[int, ...]
    entry_ids: tuple[str, ...]
    oldest_version: int
    newest_version: int
    token_count: int
    token_counts: tuple[int, ...]
    parent: str = ""

    @classmethod
    def of(cls, step: int, claims: Sequence[Claim], version: int, parent: str = "") -> "Plan":
        """Plan claims in their order.

        Raises:
            ValueError: there is none, a group appears twice, or one is not of the scored hop.
        """
        group_ids = tuple(claim.header.group_id for claim in claims)
        if not group_ids or len(set(group_ids)) != len(group_ids):
            raise ValueError(f"a plan holds at least one group, and none twice; got {list(group_ids)}")
        if any(claim.hop.next is not None for claim in claims):
            raise ValueError("only claims of the scored hop can be planned")
        return cls(
            step=step,
            version=version,
            group_ids=group_ids,
            entry_ids=tuple(claim.entry_id for claim in claims),
            oldest_version=min(claim.header.oldest_version for claim in claims),
            newest_version=max(claim.header.newest_version for claim in claims),
            token_count=sum(claim.header.token_count for claim in claims),
            token_counts=tuple(claim.header.token_count for claim in claims),
            parent=parent,
        )

    def to_bytes(self) -> bytes:
        """Encode it as a msgpack mapping."""
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "Plan":
        """Read what ``to_bytes`` made."""
        return cls.from_wire(msgpack.unpackb(encoded, use_list=False))

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Plan":
        """Make it of its fields, as a mapping; those that an earlier release did not know may be missing."""
        num, total = len(wire["group_ids"]), wire["token_count"]
        counts = wire.get("token_counts") or [total // num + (index < total % num) for index in range(num)]
        lists = {"group_ids": wire["group_ids"], "entry_ids": wire.get("entry_ids") or (), "token_counts": counts}
        return cls(**(dict(wire) | {name: tuple(values) for name, values in lists.items()}))


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What became of groups when a trainer took over.

    Attributes:
        waiting: they were planned, and wait in the scored stream again.
        lost: they were counted as trained, and end as dropped.
    """

    waiting: int
    lost: int


@dataclass(frozen=True, slots=True)
class Retained:
    """What the scored stream holds, and of it what only a checkpoint removes.

    Attributes:
        size_bytes: memory that the stream takes, by the server's own estimate.
        bound_bytes: more than this it may not take; None without a bound.
        entries: all that are in it.
        planned: of them, those of steps that are not committed.
    """

    size_bytes: int
    bound_bytes: int | None
    entries: int
    planned: int

    @property
    def is_stuck(self) -> bool:
        """Whether nothing more comes in, because of what only a checkpoint removes among others."""
        return self.planned > 0 and self.bound_bytes is not None and self.size_bytes > self.bound_bytes

    def is_crowded_by(self, count: int) -> bool:
        """Whether ``count`` more entries would not fit, and at least half of all that is here is planned."""
        if self.bound_bytes is None or 2 * self.planned < max(1, self.entries):
            return False
        return self.size_bytes * (self.entries + count) > self.bound_bytes * self.entries


def not_newer(incarnation: int | None, *, recorded: int) -> ClaimLost:
    """Make the error of a trainer whose number is not above the recorded one."""
    detail = f"{FENCED}: incarnation {incarnation} is not newer than {recorded}"
    return ClaimLost(detail, incarnation=incarnation, recorded=recorded)


class TrainerQueue(Protocol):
    """The scored hop for the one trainer of an experiment. Every call may raise ``Unavailable``."""

    @property
    def hop(self) -> Hop:
        """The scored hop. Claims of it last until a later trainer takes over: they need no renewal."""
        ...

    async def take_over(self, incarnation: int | None = None) -> int:
        """Become the trainer, and return the number of this incarnation.

        Whatever an earlier trainer had claimed and not planned waits again; its planned entries stay planned.
        Call it once, before anything else here.

        Args:
            incarnation: a number that rises from trainer to trainer; None for one more than the last.

        Raises:
            ClaimLost: a trainer with this number or a later one has taken over already; ``recorded`` in its context
                is that one's.
        """
        ...

    async def plan(self, step: int, claims: Sequence[Claim], version: int, parent: str = "") -> bool:
        """Write the plan of ``step``; True if it stands, also when this very plan stood already.

        False, without effect, if another plan of the step exists, or one of the claims is held no more.

        Args:
            version: the policy version that the step trains.
            parent: the lineage that the step continues.

        Raises:
            ClaimLost: a later trainer took over.
            ValueError: no claim, a group twice, or a claim of another hop.
        """
        ...

    async def load_plan(self, step: int) -> Plan | None:
        """Read the plan of a step that is not committed."""
        ...

    async def plans_from(self, step: int) -> list[Plan]:
        """Read the plans of this step and later ones that are not committed, in order of their steps."""
        ...

    async def replay(self, step: int) -> list[Claim]:
        """Read the entries of a step's plan again, in its order. They cannot be forwarded or resolved.

        Raises:
            NotFound: the step has no plan, or an entry of it is gone.
        """
        ...

    async def commit(self, steps: Sequence[int]) -> int:
        """Count the groups of these steps as trained and remove their entries: their checkpoint is durable.

        Steps without a plan, such as committed ones, are passed over. What remains is the lineage. Returns the
        number of steps committed by this call; after a repetition that followed a lost answer, it may be 0.

        Raises:
            ClaimLost: a later trainer took over.
        """
        ...

    async def abandon(self, steps: Sequence[int], resolution: Resolution, reason: str) -> int:
        """End the groups of plans that no checkpoint will ever contain; gives how many groups these were.

        Raises:
            ClaimLost: a later trainer took over.
        """
        ...

    async def record(self, plans: Sequence[Plan]) -> int:
        """Write the lineage of durable steps whose plans the server has forgotten; gives how many these were.

        It is for a server that came back from its log at an earlier state. A plan that stands is left to ``commit``.

        Raises:
            ClaimLost: a later trainer took over.
        """
        ...

    async def roll_back(self, step: int, given_up: Sequence[int]) -> RolledBack:
        """Drop what was trained after ``step``, that of the checkpoint that training continues from.

        The groups of the plans of steps ``given_up`` wait again. Groups of later committed steps do not count as
        trained any more, but as dropped; nor do they count as consumed. Repeating the call is safe, and
        returns what it gave up in all.

        Raises:
            ClaimLost: a later trainer took over.
        """
        ...

    async def retained(self) -> Retained:
        """Measure the scored stream."""
        ...

    async def lowest_open(self, *, are_taken: bool = False) -> int:
        """Find the lowest id of a group that is outstanding or planned, or else the next to come: no lower one does.

        But to a server that goes back to a state of before this call.

        Args:
            are_taken: whether the groups are another experiment's: then it is what ``Admission.come_from`` noted.
        """
        ...

    async def resolve_already_trained(self, claim: Claim) -> bool:
        """Count a group as trained that a durable checkpoint contains already, without training it.

        It appears when the server came back from its log at an earlier state. False if the claim was lost.
        """
        ...

    async def lineage(self, step: int) -> Plan | None:
        """Read what a committed step trained, without entry ids; of the last ``LINEAGE_STEPS`` steps."""
        ...
