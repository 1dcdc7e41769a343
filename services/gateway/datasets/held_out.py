"""The held-out rows of an experiment on finished answers: the trainer asks for them, and computes their loss."""

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.made import GroupMaker
from flotilla.shared.errors import NotFound, Unavailable
from flotilla.shared.schemas.held_out import HeldOutAnswer, HeldOutPage
from flotilla.shared.schemas.trajectory import GradeStatus, Group

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
