"""Leaves rows out whose prompt is too long for the model, before any of them is issued."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flotilla.services.gateway.datasets.columns import prompt_of
from flotilla.services.gateway.datasets.dataset import Dataset, Part
from flotilla.services.gateway.datasets.illustrated import images_of
from flotilla.services.gateway.datasets.lengths import prompt_lengths
from flotilla.shared.config.sections.data import FilterOverlongConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.prompts import PromptTemplate

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Filtered:
    """A dataset without the rows that were too long.

    Attributes:
        dataset: the remaining rows: at least one of each part.
        num_rows: there were before.
        num_dropped: of these, left out.
    """

    dataset: Dataset
    num_rows: int
    num_dropped: int


def without_overlong(
    dataset: Dataset, spec: ExperimentSpec, what: str, *, stop: threading.Event | None = None
) -> Filtered:
    """Leave out the rows whose prompt has more than ``spec.max_prompt_tokens`` tokens, if the spec wants that.

    The same rows are left out each time, so the order of the others is the same after a restart.

    Args:
        dataset: all rows.
        spec: whose tokenizer, template and limit count.
        what: the dataset, for messages.
        stop: ends the count early.

    Raises:
        DataError: every row of a part is too long; or see ``prompt_lengths``.
        ModelError: the tokenizer cannot be loaded.
    """
    overlong, config = spec.data.overlong, spec.data
    num_rows = len(dataset.rows)
    if not isinstance(overlong, FilterOverlongConfig):
        return Filtered(dataset, num_rows, 0)
    prompts = [prompt_of(row, config, number) for number, row in enumerate(dataset.rows)]
    lengths = prompt_lengths(
        prompts,
        str(model_directory(spec.model)),
        PromptTemplate.of(config),
        workers=overlong.workers,
        stop=stop,
        images=config.images,
        images_of=lambda number: images_of(dataset.rows[number], config),
    )
    kept = kept_rows(dataset, lengths, spec.max_prompt_tokens, what)
    num_dropped = num_rows - len(kept.rows)
    log.info(
        "rows whose prompt is too long were left out",
        extra={"dataset": what, "dropped": num_dropped, "rows": num_rows, "max_prompt_tokens": spec.max_prompt_tokens},
    )
    return Filtered(kept, num_rows, num_dropped)


def kept_rows(dataset: Dataset, lengths: Sequence[int], limit: int, what: str) -> Dataset:
    """Keep the rows of at most ``limit`` tokens.

    Raises:
        DataError: a part would be empty; the detail has its number of rows and its shortest prompt.
    """
    parts = dataset.parts or (Part(0, len(dataset.rows)),)
    keep = [[row for row in range(p.start, p.start + p.num_rows) if lengths[row] <= limit] for p in parts]
    for number, (part, rows) in enumerate(zip(parts, keep, strict=True)):
        if not rows:
            name = part.name or (f"source {number}" if len(parts) > 1 else "dataset")
            shortest = min(lengths[part.start : part.start + part.num_rows])
            raise DataError(
                f"all {part.num_rows} rows of the {what} {name} have a prompt of more than {limit} tokens, the "
                f"shortest has {shortest}: raise data.max_prompt_tokens (and engine.context_tokens), or truncate",
                rows=part.num_rows,
                max_prompt_tokens=limit,
            )
    starts = accumulate((len(rows) for rows in keep), initial=0)
    left = tuple(
        replace(part, start=start, num_rows=len(rows)) for part, start, rows in zip(parts, starts, keep, strict=False)
    )
    return replace(dataset, rows=[dataset.rows[row] for rows in keep for row in rows], parts=left)
