"""Everything that a spec names, opened as the creation of an experiment does, with all that is wrong at once.

For people who want to know before there is a gateway. What creation checks is ``checks.check``, which stops at the
first thing; here each of the same checks is made, then those that rollouts and trainer make when they start (model
files, tokenizer, template), and what was read is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.services.gateway.datasets.dataset import Dataset, Part
from flotilla.services.gateway.preflight import checks, models
from flotilla.services.gateway.tracking.opening import check_trackers
from flotilla.services.gateway.uploads.remote import check_protocol
from flotilla.shared.config.load.rule_effects import check_rules
from flotilla.shared.config.sections.data import RowsConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, Scalar
from flotilla.shared.models.hub import check_directory


@dataclass(frozen=True, slots=True)
class Rows:
    """What was read of one source.

    Attributes:
        field: its section of the spec.
        name: of a held-out set.
        place: where its rows are from.
        num_rows: that would be used.
        columns: that any of them has, after renaming.
    """

    field: str
    name: str | None
    place: str
    num_rows: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What opening everything gave.

    Attributes:
        rows: per source that could be read.
        errors: one entry per thing that is wrong: path, value, what is allowed.
        datasets: that could be read, by their section.
        has_model: whether nothing is wrong with the model's files.
    """

    rows: tuple[Rows, ...]
    errors: tuple[dict[str, Scalar], ...]
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    has_model: bool = False


def inspect(spec: ExperimentSpec) -> Inspection:
    """Open model, graders, trackers' packages and data; blocks, downloads, runs the code of a custom dataset."""
    rows: list[Rows] = []
    errors: list[dict[str, Scalar]] = []
    datasets: dict[str, Dataset] = {}

    def attempt(field: str, work: Callable[[], None]) -> bool:
        try:
            work()
        except FlotillaError as error:
            errors.extend(error.errors or [entry_of(field, error)])
            return False
        return True

    def check_model() -> None:
        models.check_model(spec)
        if not spec.model.is_hub_name:
            # Of a hub's model only config and tokenizer are here yet.
            check_directory(Path(spec.model.path))

    def read_training() -> None:
        if spec.data.subscribes_to is not None:
            return
        datasets["data"] = checks.train_dataset(spec)
        rows.extend(_rows_of(datasets["data"], spec.data.all_sources, "data", "sources"))

    def read_held_out() -> None:
        held_out = checks.evaluation_dataset(spec)
        if held_out is not None and spec.evaluation is not None:
            datasets["evaluation"] = held_out
            rows.extend(_rows_of(held_out, spec.evaluation.all_sets, "evaluation", "sets"))

    attempt("", lambda: checks.check_paths(spec))
    attempt("rules", lambda: check_rules(spec))
    has_model = attempt("model.path", check_model)
    attempt("reward.components", lambda: checks.check_functions(spec))
    attempt("tracking.trackers", lambda: check_trackers(spec))
    attempt("checkpoint.upload_to", lambda: check_protocol(spec))
    if spec.trains:
        attempt("data", read_training)
    attempt("evaluation", read_held_out)
    return Inspection(tuple(rows), tuple(errors), datasets, has_model)


def _rows_of(dataset: Dataset, sources: Sequence[RowsConfig], section: str, several: str) -> list[Rows]:
    # Training rows that ``max_rows`` has cut have no parts any more: they are reported as one.
    parts = dataset.parts or (Part(0, len(dataset.rows)),)
    if len(parts) != len(sources):
        location = ", ".join(source.location() for source in sources)
        return [Rows(section, None, location, len(dataset.rows), _columns(dataset, parts[0]))]
    is_plain = len(parts) == 1
    return [
        Rows(
            section if is_plain else f"{section}.{several}.{number}",
            part.name,
            source.location(),
            part.num_rows,
            _columns(dataset, part),
        )
        for number, (part, source) in enumerate(zip(parts, sources, strict=True))
    ]


def _columns(dataset: Dataset, part: Part) -> tuple[str, ...]:
    rows = dataset.rows[part.start : part.start + part.num_rows]
    return tuple(sorted({str(name) for row in rows for name in row}))


def entry_of(field: str, error: FlotillaError) -> dict[str, Scalar]:
    """Write an error as an entry: path, value, what is allowed; ``field`` where the error names none."""
    path = error.context.get("field", field)
    return {"path": path, "value": error.context.get("path"), "allowed": error.detail.removeprefix(f"{path}: ")}
