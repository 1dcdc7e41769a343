"""Datasets: rows, the order in which an experiment issues them, and the task of each.

Group ``g`` answers row ``order(epoch)[g mod N]`` of epoch ``g div N``; of several weighted sources, the one whose turn
it is does so with the groups that it has had. The order depends on seed, epoch and the number of rows alone, so the
cursor of a dataset is the group id: a restarted gateway continues exactly where it was, and there is no state to lose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla.services.gateway.datasets.columns import ABSENT, Row, plain, prompt_of, text_of, value_at
from flotilla.services.gateway.datasets.curriculum import Curriculum
from flotilla.services.gateway.datasets.illustrated import images_of
from flotilla.services.gateway.datasets.mixture import ChangedMixture, Mixture
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.schemas.task import Task, sample_seed

QUICK_ROWS = 20_000
"""So many are put in order in about a millisecond."""


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows that come from one source.

    Attributes:
        start: index of the first row.
        num_rows: at least one.
        name: of a held-out set; None for training rows.
    """

    start: int
    num_rows: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows that tasks are made from.

    Attributes:
        rows: at least one.
        config: which columns mean what.
        seed: of the order and of every sample.
        parts: where the rows of each source are; empty for one source.
        mixture: whose turn it is among the parts; None where all rows count alike.
        curriculum: draws the rows instead, where there is one; it is asked in the order of the groups.
    """

    rows: Sequence[Row]
    config: DataConfig
    seed: int
    parts: tuple[Part, ...] = ()
    mixture: Mixture | ChangedMixture | None = None
    curriculum: Curriculum | None = None

    @property
    def is_quick(self) -> bool:
        """Whether a few tasks are made at once: rows and their order are in memory, or made in a millisecond."""
        is_plain = self.curriculum is None and self.mixture is None and self.config.images is None
        return is_plain and isinstance(self.rows, list) and len(self.rows) <= QUICK_ROWS

    def row_of(self, group_id: int) -> int:
        """Find the row that a group answers."""
        if self.curriculum is not None:
            return self.curriculum.row(group_id)
        if self.mixture is None:
            return self._row_in(Part(0, len(self.rows)), group_id, self.seed)
        turn = self.mixture.turn(group_id)
        seed = sample_seed(self.seed, turn.source)
        return self._row_in(self.parts[turn.source], turn.number, seed)

    def _row_in(self, part: Part, number: int, seed: int) -> int:
        epoch, position = divmod(number, part.num_rows)
        if not self.config.shuffle:
            return part.start + position
        return part.start + int(order_of_epoch(seed, epoch, part.num_rows)[position])

    def task(
        self,
        group_id: int,
        *,
        group_size: int,
        row: int | None = None,
        min_version: int = 0,
        pinned_version: int | None = None,
        greedy: bool = False,
        issued_at: float = 0.0,
    ) -> Task:
        """Make the task of a group; ``row`` overrides the order (evaluation)."""
        row = self.row_of(group_id) if row is None else row
        values, config = self.rows[row], self.config
        label = self._value(values, config.label_column)
        source = self._value(values, config.data_source_column)
        images = config.images
        used = {config.prompt_column, config.input_column, config.label_column, config.data_source_column}
        used |= set() if images is None else {images.column}
        return Task(
            group_id=group_id,
            row=row,
            messages=prompt_of(values, config, row),
            group_size=group_size,
            seed=sample_seed(self.seed, group_id),
            label=None if label is None else text_of(label),
            data_source=None if source is None else str(source),
            metadata={name: plain(value) for name, value in values.items() if name not in used},
            min_version=min_version,
            pinned_version=pinned_version,
            greedy=greedy,
            issued_at=issued_at,
            images=images_of(values, config),
        )

    @staticmethod
    def _value(row: Row, column: str | None) -> Any:
        value = value_at(row, column) if column is not None else None
        return None if value is ABSENT else value


@lru_cache(maxsize=32)
def order_of_epoch(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Permute the rows of one epoch, the same on every machine and with every version of NumPy.

    Rows are sorted by SplitMix64 of (seed, epoch, row); equal keys keep the file's order.

    Returns:
        [num_rows] int64, each row once.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    start = np.uint64(sample_seed(sample_seed(seed, epoch), 0))
    with np.errstate(over="ignore"):
        state = start + (np.arange(num_rows, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    order: npt.NDArray[np.int64] = np.argsort(state ^ (state >> np.uint64(31)), kind="stable")
    return order
