"""The ledger: where every issued group is, in exact integers.

Counters change only inside the scripts that move the entries; what waits or is claimed is read from the streams in
the same instant. So the balance is a check of one against the other, not an identity.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, computed_field

from flotilla.shared.schemas.wire import Described
from flotilla.shared.streams.hop import HopName

REASONED = ("filtered", "dropped", "failed")
LENGTH = "length"
"""Kind of the counters of a length histogram, such as ``length:dropped:stale:256``."""


class HopCounts(BaseModel):
    """One number for each hop, in groups."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: int = 0
    generated: int = 0
    scored: int = 0

    @property
    def total(self) -> int:
        """Sum over the hops."""
        return self.tasks + self.generated + self.scored


class TokenCounts(BaseModel):
    """Tokens of answers, as far as their groups have come; those of a group that was issued finished count from there,
    as if it had come that way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generated: int = 0
    scored: int = 0
    trained: int = 0


class Outstanding(BaseModel):
    """Outstanding groups whose oldest tokens, or whose issue, are of one policy version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    groups: int
    first_group: int
    """The one that was issued first."""
    oldest_seconds: float | None = None
    """How long ago that was; null if the answering gateway did not issue it, and in the data plane's own."""


class Ledger(Described):
    """A snapshot of one lane, taken atomically. All numbers are groups unless said otherwise."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    issued: int = 0
    waiting: HopCounts = HopCounts()
    """In a stream, not claimed or handed back."""
    claimed: HopCounts = HopCounts()
    """Held by a service. Planned groups are not among them."""
    planned: int = 0
    """Consumed by a step whose checkpoint is pending."""
    trained: int = 0
    """In a durable checkpoint; in the evaluation lane: its result is recorded."""
    filtered: dict[str, int] = Field(default_factory=dict)
    dropped: dict[str, int] = Field(default_factory=dict)
    failed: dict[str, int] = Field(default_factory=dict)
    outstanding: int = 0
    """Issued, and neither planned nor resolved: what the admission budget bounds."""
    by_version: tuple[Outstanding, ...] = ()
    """The same groups by policy version, oldest first."""
    consumed_since_publication: int = 0
    """Planned under a version that no publication has followed yet."""
    tokens: TokenCounts = TokenCounts()
    lengths: dict[str, dict[str, dict[int, int]]] = Field(default_factory=dict)
    """For what was filtered, dropped or failed: reason -> most tokens -> groups. A group counts at the lowest power of
    two that is not below the number of tokens sampled of it, in all members; at 0 if none was, or none had arrived."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def balanced(self) -> bool:
        """Whether every issued group is in exactly one place, and the budget's count agrees with the streams."""
        resolved = self.trained + sum(sum(getattr(self, kind).values()) for kind in REASONED)
        travelling = self.waiting.total + self.claimed.total
        counts = (*_values(self.waiting), *_values(self.claimed), self.planned, resolved)
        return (
            min(counts) >= 0 and self.issued == travelling + self.planned + resolved and self.outstanding == travelling
        )

    @classmethod
    def from_counters(
        cls,
        counters: Mapping[str, int],
        depths: Mapping[HopName, tuple[int, int]],
        *,
        outstanding: Mapping[int, int],
        consumed: int,
    ) -> "Ledger":
        """Build a snapshot.

        Args:
            counters: the ledger hash; reasons are fields such as ``failed:timeout``.
            depths: for each hop, entries that wait and entries that are claimed.
            outstanding: the outstanding groups, with the policy version of each.
            consumed: groups planned since the last publication.
        """
        reasons: dict[str, dict[str, int]] = {kind: {} for kind in REASONED}
        lengths: dict[str, dict[str, dict[int, int]]] = {}
        for name, value in counters.items():
            kind, colon, reason = name.partition(":")
            if colon and kind in reasons:
                reasons[kind][reason] = value
            elif kind == LENGTH:
                ended_as, reason, bucket = reason.split(":")
                lengths.setdefault(ended_as, {}).setdefault(reason, {})[int(bucket)] = value
        groups_of: dict[int, list[int]] = {}
        for group, version in outstanding.items():
            groups_of.setdefault(version, []).append(group)
        by_version = tuple(
            Outstanding(version=version, groups=len(groups), first_group=min(groups))
            for version, groups in sorted(groups_of.items())
        )
        for histogram in (each for kind in lengths.values() for each in kind.values()):
            in_order = sorted(histogram.items())
            histogram.clear()
            histogram.update(in_order)
        return cls(
            issued=counters.get("issued", 0),
            waiting=HopCounts(**{hop.value: waiting for hop, (waiting, _) in depths.items()}),
            claimed=HopCounts(**{hop.value: claimed for hop, (_, claimed) in depths.items()}),
            planned=counters.get("planned", 0),
            trained=counters.get("trained", 0),
            outstanding=len(outstanding),
            by_version=by_version,
            consumed_since_publication=consumed,
            tokens=TokenCounts(**{name: counters.get(f"tokens:{name}", 0) for name in TokenCounts.model_fields}),
            lengths=lengths,
            **reasons,
        )


def token_counters(hop: HopName) -> tuple[str, ...]:
    """Name the counters of the tokens that have come to a hop."""
    return {HopName.TASKS: (), HopName.GENERATED: ("tokens:generated",)}.get(hop, ("tokens:generated", "tokens:scored"))


def length_field(counter: str, tokens: int) -> str:
    """Name the counter of a group's length, given the counter of its end; the scripts name it alike."""
    bucket = 1 << (tokens - 1).bit_length() if tokens else 0
    return f"{LENGTH}:{counter}:{bucket}"


def _values(counts: HopCounts) -> tuple[int, int, int]:
    return counts.tasks, counts.generated, counts.scored
