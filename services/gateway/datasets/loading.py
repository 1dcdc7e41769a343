"""Loads what a spec's ``data`` and ``evaluation`` name, and checks that every row can become a task."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

from flotilla.services.gateway.datasets.columns import ABSENT, Row, columns_of, prompt_of, value_at, with_columns_of
from flotilla.services.gateway.datasets.custom import rows_of_child
from flotilla.services.gateway.datasets.dataset import Dataset, Part
from flotilla.services.gateway.datasets.illustrated import ImageFolder, illustrated
from flotilla.services.gateway.datasets.locations import files_of
from flotilla.services.gateway.datasets.mixture import Mixture
from flotilla.services.gateway.datasets.row_readers import read_rows
from flotilla.shared.config.sections.data import DataConfig, RowsConfig, is_url
from flotilla.shared.config.sections.evaluation import EvaluationConfig, HeldOutConfig
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.errors import DataError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.samples.dump import check_place, dump_at
from flotilla.shared.schemas.sample_kinds import SampleKind

CHANGES_REWARDS = ("shaping", "sample_mask", "filter_zero_spread", "group_filter")
"""Of the section ``reward``: what is done between grading and training."""


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


def check_dumps(paths: Iterable[str], places: Places) -> None:
    """Check that dumps are where they may be, without reading them.

    Raises:
        DataError: one is not, or several experiments are in its place.
    """
    for path in paths:
        check_place(Path(path), places.check_file)


def load_dump(config: DataConfig, reward: RewardConfig, *, seed: int, places: Places | None = None) -> Dataset:
    """Find the groups of a dump; each is a row that says where it is, and they are issued in the dump's order.

    Args:
        reward: of the experiment, which grades none of them.
        places: where the dump may be; None: anywhere.

    Raises:
        DataError: it cannot be read, holds nothing that can be trained, or what training was to see of its rewards is
            not in it.
    """
    assert config.dump is not None
    dump = dump_at(Path(config.dump), None if places is None else places.check_file)
    changes = [name for name in CHANGES_REWARDS if getattr(reward, name)]
    if changes and any(file.kind is SampleKind.EVALUATION for file in dump.files):
        raise DataError(
            f"data.dump: {config.dump} holds answers with the rewards that graders gave, and "
            f"reward.{changes[0]} changes what the trainer sees of them, which is done where answers are sampled to be "
            "trained: leave it out",
            field="data.dump",
        )
    found = ({"file": file.name, "group": place} for file in dump.files for place in range(file.num_groups))
    return Dataset(list(islice(found, config.max_rows)), config.model_copy(update={"shuffle": False}), seed)


def load_training(config: DataConfig, *, seed: int, places: Places | None = None, needs_labels: bool = True) -> Dataset:
    """Load the training rows.

    Args:
        places: where they may be; None: anywhere.
        needs_labels: a row without a label is refused.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    sources = config.all_sources
    is_plain = config.path is not None
    found = [
        load_rows(
            source,
            config,
            "data" if is_plain else f"data.sources.{number}",
            most=config.max_rows,
            places=places,
            needs_labels=needs_labels,
        )
        for number, source in enumerate(sources)
    ]
    weights = [source.weight for source in sources if source.weight is not None]
    dataset = joined(found, config, seed, weights)
    more = config.input_column
    if more is not None and all(value_at(row, more) is ABSENT for row in dataset.rows):
        present = ", ".join(sorted({name for row in dataset.rows for name in row}))
        raise DataError(f"data: no row has a column {more!r}, which data.input_column names; columns there: {present}")
    return dataset if config.max_rows is None else Dataset(dataset.rows[: config.max_rows], config, seed)


def load_evaluation(
    evaluation: EvaluationConfig,
    config: DataConfig,
    *,
    seed: int,
    places: Places | None = None,
    needs_labels: bool = True,
) -> Dataset:
    """Load the held-out rows; each set is a part.

    Args:
        places: as for the training rows.
        needs_labels: likewise.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    is_plain = evaluation.path is not None
    found = [
        load_rows(
            each,
            config,
            "evaluation" if is_plain else f"evaluation.sets.{number}",
            places=places,
            needs_labels=needs_labels,
        )
        for number, each in enumerate(evaluation.all_sets)
    ]
    return joined(found, config, seed, ())


def joined(found: Sequence[Loaded], config: DataConfig, seed: int, weights: Sequence[float]) -> Dataset:
    """Put the rows of several sources together."""
    starts = accumulate((len(each.rows) for each in found), initial=0)
    parts = tuple(Part(start, len(each.rows), each.name) for start, each in zip(starts, found, strict=False))
    rows = [row for each in found for row in each.rows]
    return Dataset(rows, config, seed, parts, Mixture(weights) if weights else None)


def load_rows(
    source: RowsConfig,
    config: DataConfig,
    field: str,
    *,
    most: int | None = None,
    places: Places | None = None,
    needs_labels: bool = True,
) -> Loaded:
    """Load the rows of one source.

    Args:
        source: where they are.
        config: which columns mean what.
        field: the section of the spec, for messages.
        most: no more than this many are needed.
        places: where they may be; None: anywhere.
        needs_labels: a row without a label is refused.

    Raises:
        DataError: they cannot be read, there are none, or a column is missing; the detail says which there are.
        InvalidSpec: the custom class cannot be loaded.
    """
    location = source.location()
    limits = [limit for limit in (source.max_rows, most) if limit is not None]
    limit = min(limits) if limits else None
    # Which rows are taken is only known once their data sources are.
    try:
        read = _read(source, None if source.only_data_sources else limit, field, places, config.images)
    except DataError as error:
        raise DataError(f"{field}: {error.detail}", path=error.context.get("path", location)) from error
    rows: list[Row] = [with_columns_of(row, config, source) for row in read]
    if config.images is not None:
        try:
            rows = [illustrated(row, config, config.images, number) for number, row in enumerate(rows)]
        except DataError as error:
            raise DataError(f"{field}: {location}: {error.detail}", path=location) from error
    if not rows:
        raise DataError(f"{field}: {location} has no rows", path=location)
    needed = columns_of(config)
    if not needs_labels and "label" not in source.columns:
        del needed["label"]
    _check_columns(rows, source, needed, location, field, sorted({name for row in read for name in row}))
    if source.only_data_sources is not None:
        rows = _only(rows, source.only_data_sources, str(config.data_source_column), location, field)[:limit]
    for number, row in enumerate(rows):
        try:
            prompt_of(row, config, number)
        except DataError as error:
            raise DataError(f"{field}: {location}: {error.detail}", path=location, row=number) from error
    return Loaded(rows, location, source.name if isinstance(source, HeldOutConfig) else None)


def _read(
    source: RowsConfig, limit: int | None, field: str, places: Places | None, images: ImagesConfig | None
) -> list[Row]:
    if source.custom is not None:
        if places is not None:
            places.check_code(source.custom, f"{field}.custom")
        made = rows_of_child(source.custom, source.options or {}, limit, field)
        return made if images is None else _with_images(made, ImageFolder(images, None, places))
    rows: list[Row] = []
    each_place = [source, *(source.model_copy(update={"path": path}) for path in source.more_paths)]
    for path in (path for place in each_place for path in files_of(place, places)):
        if limit is None or len(rows) < limit:
            found = read_rows(path, None if limit is None else limit - len(rows), places)
            if images is not None:
                found = _with_images(found, ImageFolder(images, None if is_url(path) else Path(path).parent, places))
            rows += found
    return rows


def _with_images(rows: Sequence[Row], folder: ImageFolder) -> list[Row]:
    return [folder.with_images(row, number) for number, row in enumerate(rows)]


def _check_columns(
    rows: Sequence[Row],
    source: RowsConfig,
    columns: Mapping[str, str | None],
    location: str,
    field: str,
    present: Sequence[str],
) -> None:
    for what, column in columns.items():
        missing = [number for number, row in enumerate(rows) if column and value_at(row, column) is ABSENT]
        if column is None or not missing:
            continue
        wanted = source.columns.get(what, column)  # type: ignore[call-overload]  # a plain str is no Literal
        by = f"{field}.columns.{what}" if what in source.columns else f"data.{what}_column"
        which = location if len(missing) == len(rows) else f"row {missing[0]} of {location}"
        where = f"{which} has no column"
        way = "" if what != "label" else "; where no grader needs a label, `label_column: null` in `data` says so"
        raise DataError(
            f"{where} {wanted!r}, which {by} names; columns there: {', '.join(present)}{way}",
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
