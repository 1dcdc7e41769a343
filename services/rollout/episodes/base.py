"""What answers tasks: the fleet's own episodes, or those that agents from outside drive."""

from typing import Protocol

from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.partials import Partials


class Episodes(Protocol):
    """Makes the group of a task."""

    async def run(self, task: Task, partials: Partials = (), serving: int = 0, *, delivery: str = "") -> Group:
        """Answer a task; after ``interrupt`` unfinished members are aborted, with the tokens that can be gone on from.

        Args:
            task: what to answer.
            partials: what its members have already.
            serving: the version that serves now.
            delivery: names this delivery of the task.

        Raises:
            InvalidRequest: the task cannot be answered.
            EpisodeFailed: the group fails; its code is the reason.
            WorkerDied: the engine's process ended.
        """

    async def interrupt(self) -> None:
        """End what is under way: each ``run`` returns with what it has."""
