"""How long the admission budget held the feeder, by version: the price of the bound on lag, in seconds.

How many groups may be issued now: the admission budget, and the groups still to be trained. Pure.

The budget bounds how far generation runs ahead; the groups still to be trained bound the end, so that the last steps do
not sample groups that are never trained. A group that is filtered, dropped or failed is replaced, since neither bound
counts it.

Redundant groups are issued beyond both, so that a step need not wait for its slowest: while few are being sampled, and
those that are finished do not fill the budget yet.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from flotilla.shared.errors import DataError
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.plans import ENDED_BEFORE


def groups_left(ledger: Ledger, *, steps: int, groups_per_step: int) -> int:
    """Count the groups that must still be issued so that every step can be filled.

    Args:
        ledger: the train lane.
        steps: steps that this experiment trains itself, from its own beginning to its end.
        groups_per_step: R, groups that one step trains.
    """
    return max(0, steps * groups_per_step - ledger.planned - ledger.trained - ledger.outstanding)


def budget_left(ledger: Ledger, *, budget: int) -> int:
    """Count the groups that the admission budget still admits.

    Args:
        ledger: the train lane.
        budget: R * T * (1 + eta), bound on outstanding + consumed since the last publication.
    """
    return max(0, budget - ledger.outstanding - ledger.consumed_since_publication)


def redundant_left(ledger: Ledger, *, budget: int, steps: int, groups_per_step: int, redundant: int) -> int:
    """Count the groups that may be issued beyond the budget.

    Args:
        ledger: the train lane.
        budget: R * T * (1 + eta).
        steps: steps that this experiment trains itself.
        groups_per_step: R.
        redundant: so many groups are being sampled as long as some are needed.

    Source: ROLL, ``is_use_additional_prompts`` and ``max_additional_running_prompts``.
    """
    sampled = ledger.waiting.tasks + ledger.claimed.tasks
    finished = ledger.outstanding - sampled
    untrained = steps * groups_per_step - ledger.planned - ledger.trained
    needed = min(budget - ledger.consumed_since_publication, untrained)
    return max(0, redundant - sampled) if finished < needed else 0


def admitted(ledger: Ledger, *, budget: int, steps: int, groups_per_step: int, redundant: int = 0) -> int:
    """Count the groups that may be issued now."""
    left = groups_left(ledger, steps=steps, groups_per_step=groups_per_step)
    within = min(left, budget_left(ledger, budget=budget))
    return within or redundant_left(
        ledger, budget=budget, steps=steps, groups_per_step=groups_per_step, redundant=redundant
    )


def check_taken(ledger: Ledger, num_rows: int) -> None:
    """Check that something is trained of groups that need no rollout: those refused once are refused in each epoch.

    Args:
        ledger: the train lane.
        num_rows: of an epoch.

    Raises:
        DataError: a whole epoch was refused; the detail has the reasons.
    """
    refused = Counter[str]()
    for reasons in (ledger.filtered, ledger.dropped, ledger.failed):
        refused.update(reasons)
    del refused[ENDED_BEFORE]  # says nothing of the group
    if not ledger.planned and not ledger.trained and refused.total() >= num_rows:
        said = ", ".join(f"{reason} {count}" for reason, count in refused.most_common())
        raise DataError(f"none of {num_rows} groups could be trained: {said}")


ADMISSION_WAIT: Final = "admission/wait_seconds"


class AdmissionWait:
    """Adds up the time between two readings, where at the first one tasks were left to issue and the budget was full.

    Kept in the store every second: the next gateway continues with it. The time between two gateways counts with
    neither.

    Attributes:
        total_seconds: over all versions since this gateway began.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._seconds = 0.0
        self.total_seconds = 0.0
        self._held_since: float | None = None

    def look(self, version: int, now: float) -> tuple[int, float] | None:
        """Record that the feeder looks again, whatever it will find.

        Args:
            version: that is current.
            now: seconds of a monotonic clock.

        Returns:
            When another version was current at the last look: that version, and the seconds that its budget held the
            feeder. The time up to this look counts with it.
        """
        if self._held_since is not None:
            self._seconds += now - self._held_since
            self.total_seconds += now - self._held_since
            self._held_since = None
        if version == self._version:
            return None
        ended = None if self._version is None else (self._version, self._seconds)
        self._version, self._seconds = version, 0.0
        return ended

    def to_window(self) -> dict[str, Any]:
        """Describe the version whose time has not ended, for ``restore``."""
        return {"version": self._version, "seconds": self._seconds}

    def restore(self, window: Mapping[str, Any]) -> None:
        """Continue where an earlier gateway was, unless this has begun."""
        if self._version is None and window:
            self._version, self._seconds = window["version"], window["seconds"]

    def hold(self, now: float) -> None:
        """Record that the budget admits nothing, up to the next look."""
        self._held_since = now

    def release(self) -> None:
        """Forget that the budget held: something else does now."""
        self._held_since = None
