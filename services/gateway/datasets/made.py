"""What makes the groups of an experiment that need no rollout: of rows that hold answers, or of a dump.

Groups of a dump are trained as they were kept: the same tokens, log-probabilities, rewards and task.
What is new is the id, which counts the groups that this experiment has issued, and so the place in the dump: a
restarted gateway continues exactly where it was. ``metadata`` says which group of which file it was.

The trainer asks for the held-out rows of an experiment on finished answers, and computes their loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import FinishedGroups
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, NotFound, Unavailable
from flotilla.shared.locations.allowed import Places
from flotilla.shared.samples.dump import Dump, dump_at
from flotilla.shared.schemas.held_out import HeldOutAnswer, HeldOutPage
from flotilla.shared.schemas.trajectory import GradeStatus, Group

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


class GroupMaker(Protocol):
    """Makes groups. Its calls block."""

    def groups(
        self, dataset: Dataset, ids: Sequence[int], *, rows: Sequence[int] | None = None, issued_at: float = 0.0
    ) -> list[Group]:
        """Make the groups of these ids; ``rows`` overrides the dataset's order.

        Raises:
            DataError: one cannot be made, or none ever can.
        """

    def close(self) -> None:
        """Release what is held."""


def open_maker(spec: ExperimentSpec, places: Places | None = None) -> GroupMaker | None:
    """Make what an experiment needs; None where rollouts answer its rows. Nothing is read yet.

    Args:
        places: where a dump may be; None: anywhere.
    """
    if spec.data.dump is not None:
        return DumpedGroups(Path(spec.data.dump), None if places is None else places.check_file)
    return None if spec.finished_job is None else FinishedGroups(spec)


PAGE_ROWS = 128


class HeldOutRows:
    """What one experiment has of them while it is at work."""

    def __init__(self) -> None:
        self._source: tuple[GroupMaker, Dataset | None] | None = None

    def open(self, groups: GroupMaker, dataset: Dataset | None) -> None:
        """Give out the rows of a dataset; of None there are none."""
        self._source = groups, dataset

    def close(self) -> None:
        """Give nothing out any more."""
        self._source = None

    def page(self, first: int) -> HeldOutPage:
        """Read and render the rows from the one numbered ``first`` on; blocks.

        Raises:
            Unavailable: the datasets are not loaded yet.
            NotFound: there are no such rows.
        """
        if self._source is None:
            raise Unavailable("the experiment's datasets are not loaded yet")
        groups, dataset = self._source
        if dataset is None or first >= len(dataset.rows):
            raise NotFound(f"the experiment has no held-out row {first}")
        end = min(first + PAGE_ROWS, len(dataset.rows))
        made = groups.groups(dataset, range(first, end), rows=range(first, end))
        rows = [_answers(group) for group in made]
        return HeldOutPage(rows=tuple(filter(None, rows)), next=end if end < len(dataset.rows) else None)


def _answers(group: Group) -> tuple[HeldOutAnswer, ...]:
    return tuple(
        HeldOutAnswer(token_ids=t.token_ids.tolist(), loss_mask=t.loss_mask.tolist(), reward=t.reward or 0.0)
        for t in group.trajectories
        if t.status is GradeStatus.SCORED
    )
