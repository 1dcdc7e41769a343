"""What still refers to an experiment's data: forks that began from it, and specs that name it or its files."""

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from flotilla.services.gateway.records.spec_texts import SIGNS, is_place, local_paths, named_in, reached
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.samples.folder import SAMPLES
from flotilla.shared.schemas.retention import Part

FOLDERS: Mapping[str, Part] = {CHECKPOINTS: Part.CHECKPOINTS, SAMPLES: Part.SAMPLES}
"""Folders of an experiment's directory that are a part of their own; all else but ``KEPT`` are its logs."""
KEPT: Final = frozenset({"receipts", "unsent_metrics.jsonl"})
"""In an experiment's directory: signed receipts, and metrics that the trainer sends once it continues. They go with the
run alone."""
OF_PLACES: Mapping[str, Part] = {"dump": Part.SAMPLES, "resume_from": Part.CHECKPOINTS}
"""What is searched for in a folder above experiments, by the last part of the key; other keys may mean anything
there."""


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


def part_of(name: str) -> Part:
    """Find the part that a file or folder of an experiment's directory goes with."""
    return Part.RUN if name in KEPT else FOLDERS.get(name, Part.LOGS)


def references(records: Sequence[ExperimentRecord], experiments: Path) -> Iterator[Reference]:
    """Find what experiments need of each other; looks at links on the disk, and blocks.

    Args:
        records: of all experiments, in any state: one that has ended may be resumed.
        experiments: the folder of their directories.
    """
    known = {record.id for record in records}
    root = os.path.realpath(experiments)
    for record in records:
        found = [*_of_origin(record), *_of_spec(record, root, known)]
        yield from (each for each in dict.fromkeys(found) if each.to in known and each.to != record.id)


def _of_origin(record: ExperimentRecord) -> Iterator[Reference]:
    if record.origin is not None:
        words = f"{record.id} began from its step {record.origin['step']}"
        yield Reference(record.id, str(record.origin["experiment_id"]), Part.CHECKPOINTS, words)


def _of_spec(record: ExperimentRecord, root: str, known: Set[str]) -> Iterator[Reference]:
    for key, text in named_in(record.spec):
        paths = local_paths(key, text)
        if not paths:
            yield Reference(record.id, text, Part.CHECKPOINTS, f"{key} of {record.id} names it")
        found = [parts for path in paths for parts in reached(path, root, as_pattern=is_place(key))]
        for parts in (parts for parts in found if parts or is_place(key)):
            named = [each for each in known if not parts or fnmatchcase(each, parts[0]) or "**" in parts[0]]
            part = _part_of(parts, key)
            words = f"{key} of {record.id} names {text}"
            yield from (Reference(record.id, to, part, words) for to in sorted({*named, *parts[:1]}))


def _part_of(parts: Sequence[str], key: str) -> Part:
    """Find what is meant of an experiment; where any of it may be, all of it."""
    if not parts or "**" in parts[0]:
        return OF_PLACES.get(key.rpartition(".")[2], Part.RUN)
    if len(parts) < 2 or not SIGNS.isdisjoint(parts[1]):
        return Part.RUN
    return part_of(parts[1])
