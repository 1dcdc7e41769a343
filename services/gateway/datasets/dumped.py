"""Groups of a dump, to be trained as they were kept: the same tokens, log-probabilities, rewards and task.

What is new is the id, which counts the groups that this experiment has issued, and so the place in the dump: a
restarted gateway goes on exactly where it was. ``metadata`` says which group of which file it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.shared.errors import DataError
from flotilla.shared.samples.dump import Dump, dump_at
from flotilla.shared.schemas.trajectory import Group

FROM_DUMP: Final = "flotilla_dump"
"""Key of a task's metadata: file and id of the group that was kept."""


class DumpedGroups:
    """Makes the groups of a dump. Its calls block, and are made one at a time.

    Args:
        path: as ``data.dump`` has it.
        check: see ``dump_at``.
    """

    def __init__(self, path: Path, check: Callable[[str], None] | None = None) -> None:
        self._path, self._check = path, check
        self._dump: Dump | None = None

    def groups(
        self, dataset: Dataset, ids: Sequence[int], *, rows: Sequence[int] | None = None, issued_at: float = 0.0
    ) -> list[Group]:
        """Make the groups of these ids.

        Raises:
            DataError: the dump cannot be read, may not be any more, or is not the one that the dataset was made of.
        """
        if self._dump is None:
            self._dump = dump_at(self._path, self._check)
        dump = self._dump
        most = dataset.config.max_rows
        if (len(dump) if most is None else min(most, len(dump))) != len(dataset.rows):
            raise DataError(
                f"data.dump: {self._path} has {len(dump)} groups now, and had {len(dataset.rows)} when the experiment "
                "began to issue them: train from the samples of a run that is over",
                field="data.dump",
            )
        chosen = [dataset.row_of(group_id) for group_id in ids] if rows is None else rows
        return [self._issued(dump, group_id, index, issued_at) for group_id, index in zip(ids, chosen, strict=True)]

    def close(self) -> None:
        """Forget what was read."""
        self._dump = None

    def _issued(self, dump: Dump, group_id: int, index: int, issued_at: float) -> Group:
        file, _ = dump.place_of(index)
        group = dump.group(index)
        was = group.task
        metadata = {**was.metadata, FROM_DUMP: {"file": file.name, "group_id": was.group_id}}
        task = replace(
            was, group_id=group_id, metadata=metadata, min_version=0, pinned_version=None, issued_at=issued_at
        )
        return replace(group, task=task)
