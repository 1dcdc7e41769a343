"""Loads what a spec's ``data`` and ``evaluation`` name, and checks that every row can become a task."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from services.gateway.datasets.columns import ABSENT, Row, columns_of, messages_of, value_at, with_columns_of
from services.gateway.datasets.dataset import Dataset, Part
from services.gateway.datasets.locations import files_of
from services.gateway.datasets.mixture import Mixture
from services.gateway.datasets.row_readers import read_rows
from shared.config.data import DataConfig, RowsConfig
from shared.config.evaluation import EvaluationConfig, HeldOutConfig
from shared.custom_code import describe, load_callable
from shared.errors import DataError, InvalidSpec

WHAT = "custom dataset"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows of one source.

    Attributes:
        rows: at least one, with the columns that ``data`` names.
        location: where they are from, for messages.
        name: of a held-out set.
    """

    rows: Sequence[Row]
    location: str
    name: str | None = None


def load_training(config: DataConfig, *, seed: int) -> Dataset:
    """Load the training rows.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    sources = config.all_sources
    is_plain = config.path is not None
    found = [
        load_rows(source, config, "data" if is_plain else f"data.sources.{number}", most=config.max_rows)
        for number, source in enumerate(sources)
    ]
    weights = [source.weight for source in sources if source.weight is not None]
    dataset = joined(found, config, seed, weights)
    return dataset if config.max_rows is None else Dataset(dataset.rows[: config.max_rows], config, seed)


def load_evaluation(evaluation: EvaluationConfig, config: DataConfig, *, seed: int) -> Dataset:
    """Load the held-out rows; each set is a part.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    is_plain = evaluation.path is not None
    found = [
        load_rows(each, config, "evaluation" if is_plain else f"evaluation.sets.{number}")
        for number, each in enumerate(evaluation.all_sets)
    ]
    return joined(found, config, seed, ())


def joined(found: Sequence[Loaded], config: DataConfig, seed: int, weights: Sequence[float]) -> Dataset:
    """Put the rows of several sources together."""
    starts = accumulate((len(each.rows) for each in found), initial=0)
    parts = tuple(Part(start, len(each.rows), each.name) for start, each in zip(starts, found, strict=False))
    rows = [row for each in found for row in each.rows]
    return Dataset(rows, config, seed, parts, Mixture(weights) if weights else None)


def load_rows(source: RowsConfig, config: DataConfig, field: str, *, most: int | None = None) -> Loaded:
    """Load the rows of one source.

    Args:
        source: where they are.
        config: which columns mean what.
        field: the section of the spec, for messages.
        most: no more than this many are needed.

    Raises:
        DataError: they cannot be read, there are none, or a column is missing; the detail says which there are.
        InvalidSpec: the custom class cannot be loaded.
    """
    location = source.location()
    limits = [limit for limit in (source.max_rows, most) if limit is not None]
    limit = min(limits) if limits else None
    # Which rows are taken is only known once their data sources are.
    try:
        read = _read(source, None if source.only_data_sources else limit, field)
    except DataError as error:
        raise DataError(f"{field}: {error.detail}", path=error.context.get("path", location)) from error
    rows: list[Row] = [with_columns_of(row, config, source) for row in read]
    if not rows:
        raise DataError(f"{field}: {location} has no rows", path=location)
    _check_columns(rows, source, config, location, field, sorted({name for row in read for name in row}))
    if source.only_data_sources is not None:
        rows = _only(rows, source.only_data_sources, str(config.data_source_column), location, field)[:limit]
    for number, row in enumerate(rows):
        try:
            messages_of(value_at(row, config.prompt_column), config, number)
        except DataError as error:
            raise DataError(f"{field}: {location}: {error.detail}", path=location, row=number) from error
    return Loaded(rows, location, source.name if isinstance(source, HeldOutConfig) else None)


def _read(source: RowsConfig, limit: int | None, field: str) -> list[Row]:
    if source.custom is not None:
        return _custom_rows(source.custom, source.options or {}, limit, field)
    rows: list[Row] = []
    for path in files_of(source):
        if limit is None or len(rows) < limit:
            rows += read_rows(path, None if limit is None else limit - len(rows))
    return rows


def _check_columns(
    rows: Sequence[Row], source: RowsConfig, config: DataConfig, location: str, field: str, present: Sequence[str]
) -> None:
    for what, column in columns_of(config).items():
        missing = [number for number, row in enumerate(rows) if column and value_at(row, column) is ABSENT]
        if column is None or not missing:
            continue
        wanted = source.columns.get(what, column)  # type: ignore[call-overload]  # a plain str is no Literal
        by = f"{field}.columns.{what}" if what in source.columns else f"data.{what}_column"
        which = location if len(missing) == len(rows) else f"row {missing[0]} of {location}"
        where = f"{which} has no column"
        raise DataError(
            f"{where} {wanted!r}, which {by} names; columns there: {', '.join(present)}",
            path=location,
            field=by,
            columns=", ".join(present),
        )


def _only(rows: Sequence[Row], wanted: Sequence[str], column: str, location: str, field: str) -> list[Row]:
    sources = [str(value_at(row, column)) for row in rows]
    there = sorted(set(sources))
    absent = [name for name in wanted if name not in there]
    if absent:
        raise DataError(
            f"{field}.only_data_sources: {location} has no row of {absent[0]!r}; data sources there: "
            f"{', '.join(there[:20])}",
            path=location,
        )
    return [row for row, name in zip(rows, sources, strict=True) if name in wanted]


def _custom_rows(reference: str, options: dict[str, Any], limit: int | None, field: str) -> list[Row]:
    """Read all rows of the user's class: it is asked once, in order, so what it computes cannot change meanwhile."""
    make = load_callable(reference, what=WHAT, kind="class", accepts=inspect.isclass)
    path = Path(reference.rpartition(":")[0]).expanduser().resolve()
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise InvalidSpec(f"{WHAT} {reference!r}: {field}.options do not fit its constructor: {error}") from error
    try:
        return [_checked(row, number, reference) for number, row in enumerate(_iterate(make(**options), limit))]
    except DataError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise DataError(f"{WHAT} {reference!r} failed: {describe(error, path)}", path=reference) from error


def _iterate(dataset: Any, limit: int | None) -> Iterator[Any]:
    for name in ("__len__", "__getitem__"):
        if not hasattr(dataset, name):
            raise TypeError(f"it has no {name}")
    num_rows = len(dataset)
    return (dataset[index] for index in range(num_rows if limit is None else min(limit, num_rows)))


def _checked(row: Any, number: int, reference: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"row {number} of {WHAT} {reference!r} is {type(row).__name__}, not a dict", path=reference)
    return row
