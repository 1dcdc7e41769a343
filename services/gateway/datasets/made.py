"""What makes the groups of an experiment that need no rollout: of rows that hold answers, or of a dump."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.dumped import DumpedGroups
from flotilla.services.gateway.datasets.finished import FinishedGroups
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.trajectory import Group


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
