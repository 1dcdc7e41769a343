"""Puts made rows in the place of a spec's own, source by source."""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from flotilla.shared.config.sections.data import RowsConfig, is_data_file
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.trial_run.edits import Document, Edits
from flotilla.trial_run.made_rows import NUM_ROWS, as_lines, data_sources_of, made_rows

WHY = f"{NUM_ROWS} made rows of the same columns"
FEW = 2
PLACES = ("path", "more_paths", "hub", "custom", "options", "revision", "subset", "split", "max_rows")


def replace_rows(edits: Edits, spec: ExperimentSpec, files: Mapping[str, str], made: dict[str, str]) -> None:
    """Write rows for training, evaluation and held-out loss.

    Args:
        files: that the import makes; rows among them stay, the first few of each data source.
        made: files of the trial, to which they are added.
    """
    if spec.data.path is not None:
        edits.set("data.path", _file("rows.jsonl", spec, RowsConfig(path=spec.data.path), files, made), WHY)
    for number, source in enumerate(spec.data.sources or ()):
        _replace(edits, f"data.sources.{number}", f"rows-{number}.jsonl", spec, source, files, made)
    edits.set("data.max_rows", None, WHY)
    if not spec.trains:  # an evaluation's rows are those of both sections
        edits.set("evaluation.path", edits.at("data.path"), WHY)
        for number, _ in enumerate(spec.data.sources or ()):
            _replace_by(edits, f"evaluation.sets.{number}", edits.at(f"data.sources.{number}.path"), WHY)
        return
    if spec.evaluation is not None and spec.evaluation.path is not None:
        rows = RowsConfig(path=spec.evaluation.path)
        edits.set("evaluation.path", _file("held-out.jsonl", spec, rows, files, made, FEW), "made rows, too")
        edits.set("evaluation.max_rows", None, "made rows, too")
    for number, each in enumerate((spec.evaluation and spec.evaluation.sets) or ()):
        _replace(edits, f"evaluation.sets.{number}", f"held-out-{number}.jsonl", spec, each, files, made, FEW)
    held_out = spec.finished_job.held_out if spec.finished_job is not None else None
    if held_out is not None:
        _replace(edits, "job.held_out", "held-out-loss.jsonl", spec, held_out, files, made, FEW)


def _replace(
    edits: Edits,
    field: str,
    name: str,
    spec: ExperimentSpec,
    rows: RowsConfig,
    files: Mapping[str, str],
    made: dict[str, str],
    num_rows: int = NUM_ROWS,
) -> None:
    """Write a file, and name it in the place of a source."""
    path = _file(name, spec, rows, files, made, num_rows)
    _replace_by(edits, field, path, WHY if num_rows == NUM_ROWS else "made rows, too")


def _replace_by(edits: Edits, field: str, path: str, why: str) -> None:
    """Name a file in the place of a source; weights, columns and data sources stay."""
    before = edits.at(field) or {}
    edits.set(f"{field}.path", path, why)
    for key in PLACES[1:]:
        if key in before:
            edits.set(f"{field}.{key}", [] if key == "more_paths" else None, why)


def _file(
    name: str,
    spec: ExperimentSpec,
    rows: RowsConfig,
    files: Mapping[str, str],
    made: dict[str, str],
    num_rows: int = NUM_ROWS,
) -> str:
    written = files.get(PurePosixPath(rows.path or "").name) if rows.path and is_data_file(rows.path) else None
    if written is not None:
        made[name] = as_lines(_first_of_each(written, spec.data.data_source_column, num_rows))
        return name
    components = spec.reward.components
    sources = rows.only_data_sources or (rows.data_source,)
    named = [each for each in sources if each is not None] or data_sources_of(rows.location(), components)
    found_rows = [_renamed(row, spec, rows) for row in made_rows(spec, named, num_rows=max(num_rows, len(named)))]
    made[name] = as_lines(found_rows)
    return name


def _renamed(row: Document, spec: ExperimentSpec, rows: RowsConfig) -> Document:
    """Call columns as a source does."""
    usual = {
        "prompt": spec.data.prompt_column,
        "label": spec.data.label_column,
        "data_source": spec.data.data_source_column,
    }
    for what, own in rows.columns.items():
        if usual[what] in row:
            row[own] = row.pop(str(usual[what]))
    return row


def _first_of_each(text: str, column: str | None, num_rows: int) -> list[Document]:
    """Take the first rows of each data source in turn."""
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    by_source: dict[str, list[Document]] = {}
    for row in rows:
        by_source.setdefault(str(row.get(column or "")), []).append(row)
    turns = max(map(len, by_source.values()), default=0)
    found = [each[turn] for turn in range(turns) for each in by_source.values() if turn < len(each)]
    return found[: max(num_rows, len(by_source))]
