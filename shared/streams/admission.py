"""The feeder's side: tasks are issued against a budget, in the order of their dense ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.sharing import SharedRead, Taken


class IssueOutcome(StrEnum):
    """How an issue ended."""

    ISSUED = "issued"
    BUDGET_FULL = "budget_full"
    STREAM_FULL = "stream_full"
    CURSOR_MOVED = "cursor_moved"


@dataclass(frozen=True, slots=True)
class IssueResult:
    """What became of some tasks.

    Attributes:
        outcome: ``issued`` if all were; ``budget_full`` if the budget ended first; ``stream_full`` if a stream
            takes more memory than it may; ``cursor_moved`` if the first task's id is not the next one, which is also
            the answer to a repeated issue.
        count: how many were issued, from the first on.
        next_group_id: the id that the next task must have.
    """

    outcome: IssueOutcome
    count: int
    next_group_id: int


class Admission(Protocol):
    """Issues tasks and knows what is outstanding. Every call may raise ``Unavailable``."""

    async def issue(self, task: Task, *, limit: int) -> IssueResult:
        """Issue one task while outstanding + consumed since the last publication < ``limit``.

        Nothing is issued while a stream takes more memory than its bound.
        """
        ...

    async def issue_many(self, tasks: Sequence[Task], *, limit: int) -> IssueResult:
        """Issue tasks with consecutive ids in one atomic step, as many as the budget admits.

        Raises:
            ValueError: the ids are not consecutive.
        """
        ...

    async def issue_groups(self, groups: Sequence[Group], *, hop: HopName, limit: int) -> IssueResult:
        """Issue finished groups with consecutive ids into a later stream, in one atomic step.

        As many as are admitted while fewer than ``limit`` are outstanding. What was consumed since the last publication
        does not count: what no policy sampled does not get old.

        Raises:
            ValueError: the ids are not consecutive, the hop is that of tasks, or a group for the trainer lacks a grade.
        """
        ...

    async def life(self) -> str:
        """Name the life of the server that has this experiment; see ``Sharing.life``."""
        ...

    async def take(self, read: SharedRead, *, limit: int, life: str = "") -> Taken:
        """Append groups that another experiment offers to the scored stream, under their ids, in one atomic step.

        As many as are admitted while fewer than ``limit`` are outstanding. Those that were taken before are left out,
        so that it may be repeated; numbers that are missing count as issued and dropped, ``trimmed``.

        Args:
            read: from the other experiment.
            limit: of what is outstanding.
            life: of the server, from before they were read; "": in any.

        Raises:
            Unavailable: also where that life is over.
        """
        ...

    async def taken_through(self) -> int:
        """Read up to which number groups were taken, or missed."""
        ...

    async def begin_taking(self, after: int, life: str = "") -> None:
        """Take, and miss, no group up to a number; without effect once a higher one was taken.

        Raises:
            Unavailable: also where the life of the server, from before the number was read, is over.
        """
        ...

    async def come_from(self, group_id: int) -> None:
        """Note that none of the other experiment's groups below an id comes any more; never a lower one than before."""
        ...

    async def next_group_id(self) -> int:
        """Read the feeder's cursor."""
        ...

    async def begin_at(self, group_id: int) -> None:
        """Let ids begin at ``group_id``; without effect once one was issued or another beginning recorded."""
        ...

    async def published(self, version: int) -> bool:
        """Record that ``version`` is committed; False, without effect, unless it is newer than the recorded one.

        Groups planned while an older version was trained no longer count as consumed since the last publication.
        """
        ...

    async def published_version(self) -> int | None:
        """Read the newest recorded version."""
        ...

    async def bound(self, stream_bytes: int | None) -> dict[HopName, int]:
        """Bound the server's memory that each stream may take, or lift the bound, and measure the streams.

        While a stream takes more, nothing is issued, and nothing is claimed that would be forwarded to it.

        Returns:
            The bytes that each stream takes, by the server's own estimate.
        """
        ...

    async def forget_consumers(self, idle_seconds: float) -> int:
        """Forget consumers that hold nothing and were silent for so long; returns how many."""
        ...

    async def follow_ends(self, ended: Callable[[int], None]) -> None:
        """Call ``ended`` with 0 once this hears of groups that end, then with the number of those that did.

        It ends when it is cancelled. What is planned has not ended. One whose notification is lost is in the ledger all
        the
        same: look there now and then.
        """
        ...

    async def outstanding_older_than(self, version: int) -> list[int]:
        """List, in ascending order, the ids of outstanding groups that were issued before ``version``."""
        ...


def check_consecutive(tasks: Sequence[Task]) -> None:
    """Check that ids follow one another.

    Raises:
        ValueError: they do not.
    """
    ids = [task.group_id for task in tasks]
    if ids and ids != list(range(ids[0], ids[0] + len(ids))):
        raise ValueError(f"tasks must have consecutive ids, got {ids}")


def check_finished(groups: Sequence[Group], hop: HopName) -> None:
    """Check that groups may be issued into a stream.

    Raises:
        ValueError: see ``Admission.issue_groups``.
    """
    check_consecutive([group.task for group in groups])
    if hop is HopName.TASKS:
        raise ValueError("finished groups are no tasks: issue them to be graded or to be trained")
    if hop is HopName.SCORED and any(t.status is GradeStatus.PENDING for each in groups for t in each.trajectories):
        raise ValueError("a group for the trainer has a trajectory without a grade: issue it to be graded")
