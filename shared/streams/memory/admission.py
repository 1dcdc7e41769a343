"""Admission in memory."""

from collections.abc import Sequence

from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.admission import IssueOutcome, IssueResult, check_consecutive, check_finished
from flotilla.shared.streams.codec import (
    EntryHeader,
    encode_body,
    encode_grades,
    encode_task,
    group_header,
    task_header,
)
from flotilla.shared.streams.keys import HopName
from flotilla.shared.streams.ledger import token_counters
from flotilla.shared.streams.memory.streams import MemoryStore


class MemoryAdmission:
    """Issues tasks; see ``Admission``."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def issue(self, task: Task, *, limit: int) -> IssueResult:
        """See ``Admission.issue``."""
        return await self.issue_many([task], limit=limit)

    async def issue_many(self, tasks: Sequence[Task], *, limit: int) -> IssueResult:
        """See ``Admission.issue_many``."""
        check_consecutive(tasks)
        entries = [(task_header(each), encode_task(each), b"") for each in tasks]
        return self._issue(tasks, entries, HopName.TASKS, limit - self._store.used())

    async def issue_groups(self, groups: Sequence[Group], *, hop: HopName, limit: int) -> IssueResult:
        """See ``Admission.issue_groups``."""
        check_finished(groups, hop)
        entries = [(group_header(each), encode_body(each), encode_grades(each)) for each in groups]
        return self._issue([each.task for each in groups], entries, hop, limit - len(self._store.outstanding))

    def _issue(
        self, tasks: Sequence[Task], entries: Sequence[tuple[EntryHeader, bytes, bytes]], hop: HopName, room: int
    ) -> IssueResult:
        store = self._store
        if tasks and tasks[0].group_id != store.next_group_id:
            return IssueResult(IssueOutcome.CURSOR_MOVED, 0, store.next_group_id)
        if tasks and any(map(store.is_full, HopName)):
            return IssueResult(IssueOutcome.STREAM_FULL, 0, store.next_group_id)
        admitted = tasks[: max(0, room)]
        for task, (header, payload, grades) in zip(admitted, entries, strict=False):
            store.streams[hop].append(header, payload, grades)
            store.outstanding[task.group_id] = task.min_version
            for counter in token_counters(hop):
                store.count(counter, header.token_count)
        store.next_group_id += len(admitted)
        store.count("issued", len(admitted))
        store.wake()
        outcome = IssueOutcome.ISSUED if len(admitted) == len(tasks) else IssueOutcome.BUDGET_FULL
        return IssueResult(outcome, len(admitted), store.next_group_id)

    async def next_group_id(self) -> int:
        """See ``Admission.next_group_id``."""
        return self._store.next_group_id

    async def begin_at(self, group_id: int) -> None:
        """See ``Admission.begin_at``."""
        self._store.next_group_id = self._store.next_group_id or group_id

    async def published(self, version: int) -> bool:
        """See ``Admission.published``."""
        recorded = self._store.published_version
        if recorded is not None and recorded >= version:
            return False
        self._store.published_version = version
        for trained in [each for each in self._store.consumed if each < version]:
            del self._store.consumed[trained]
        return True

    async def published_version(self) -> int | None:
        """See ``Admission.published_version``."""
        return self._store.published_version

    async def bound(self, stream_bytes: int | None) -> dict[HopName, int]:
        """See ``Admission.bound``."""
        self._store.stream_bytes = stream_bytes
        return {hop: stream.size_bytes() for hop, stream in self._store.streams.items()}

    async def forget_consumers(self, idle_seconds: float) -> int:
        """See ``Admission.forget_consumers``: here a consumer that holds nothing leaves nothing behind."""
        return 0

    async def outstanding_older_than(self, version: int) -> list[int]:
        """See ``Admission.outstanding_older_than``."""
        return sorted(group_id for group_id, issued_at in self._store.outstanding.items() if issued_at < version)
