"""Who still needs what an experiment left: forks that began from it, and specs that name it or its files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.gateway.records.spec_texts import named_in, parts_below
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.samples.folder import SAMPLES
from flotilla.shared.schemas.retention import Part

FOLDERS: Mapping[str, Part] = {CHECKPOINTS: Part.CHECKPOINTS, SAMPLES: Part.SAMPLES}
"""Folders of an experiment's directory that are a part of their own; all else are its logs."""


@dataclass(frozen=True, slots=True)
class Reference:
    """That one experiment needs something of another.

    Attributes:
        by, to: ids of experiments.
        part: that is needed; the run, where all of it is.
        words: such as ``b-2 began from its step 4``.
    """

    by: str
    to: str
    part: Part
    words: str

    def protects(self, part: Part) -> bool:
        """Whether a part must stay for it: a run goes with all of its parts."""
        return Part.RUN in {part, self.part} or part is self.part


def references(records: Sequence[ExperimentRecord], experiments: Path) -> Iterator[Reference]:
    """Find what experiments need of each other; looks at links on the disk, and blocks.

    Args:
        records: of all experiments, in any state: one that has ended may be resumed.
        experiments: the folder of their directories.
    """
    known = {record.id for record in records}
    root = os.path.realpath(experiments)
    for record in records:
        found = [*_of_origin(record), *_of_spec(record, root)]
        yield from (each for each in found if each.to in known and each.to != record.id)


def _of_origin(record: ExperimentRecord) -> Iterator[Reference]:
    if record.origin is not None:
        words = f"{record.id} began from its step {record.origin['step']}"
        yield Reference(record.id, str(record.origin["experiment_id"]), Part.CHECKPOINTS, words)


def _of_spec(record: ExperimentRecord, root: str) -> Iterator[Reference]:
    for key, text in named_in(record.spec):
        if not text.startswith("/"):
            yield Reference(record.id, text, Part.CHECKPOINTS, f"{key} of {record.id} names it")
        elif parts := parts_below(text, root):
            part = FOLDERS.get(parts[1], Part.LOGS) if len(parts) > 1 else Part.RUN
            yield Reference(record.id, parts[0], part, f"{key} of {record.id} names {text}")
