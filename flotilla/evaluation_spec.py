"""What measures a model: an experiment's spec without its training."""

from pathlib import Path
from typing import Any

from flotilla.shared.checkpoints.folders import CHECKPOINTS, MODEL, complete
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.data import FROM
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, ModelError
from flotilla.shared.models.hub import ADAPTER_CONFIG

KEPT = ("name", "seed", "model", "rollout", "reward", "samples", "tracking", "resources")
"""Sections for how problems are answered, graded and recorded."""
WHERE_ROWS_ARE = ("path", "sources", "dump", FROM, "max_rows")
EVERY_EXPERIMENT = f"fleet/experiments/*/{CHECKPOINTS}"


LONGEST_SECONDS = 7 * 86400.0
"""That answering all rows of a dump may take."""
ABOUT_ANSWERS = ("max_new_tokens", "greedy", "temperature", "top_k", "top_p", "group_size")
"""Of an evaluation: how a model answers."""


def evaluation_of(
    spec: ExperimentSpec, *, model: Path | None = None, rows: Path | None = None, answers: str | None = None
) -> ExperimentSpec:
    """Make a spec that answers and grades held-out problems as an experiment's evaluations do.

    Args:
        spec: of the experiment, with or without an evaluation.
        model: what answers in place of ``model.path``: as ``model_at`` takes it.
        rows: what is answered in place of the rows that ``evaluation`` names; with the columns that ``data`` names.
        answers: column of answers that are graded in place of a model's.

    Raises:
        InvalidSpec: no rows are named.
        ModelError: there is no model.
    """
    if spec.evaluation is None and rows is None:
        raise InvalidSpec("the file has no evaluation section that names held-out rows: name them with --rows FILE")
    document = spec.model_dump(mode="json")
    evaluation: dict[str, Any] = {**(document["evaluation"] or {}), "every_versions": None}
    if rows is not None:
        evaluation |= {"path": str(rows.resolve()), "sets": None, "max_rows": None}
    columns = {key: value for key, value in document["data"].items() if key not in WHERE_ROWS_ARE}
    made = {section: document[section] for section in KEPT}
    made["model"] = {**made["model"], "lora": None}
    if model is not None:
        made["model"] |= {"path": str(model_at(model)), "revision": None}
    job: dict[str, Any] = {"kind": "evaluation"}
    if answers is not None:
        job["response_column"] = answers
        made = {section: value for section, value in made.items() if section not in {"rollout", "resources"}}
        columns = {key: value for key, value in columns.items() if key not in {"max_prompt_tokens", "overlong"}}
        evaluation = {key: value for key, value in evaluation.items() if key not in ABOUT_ANSWERS}
    return validate_spec({**made, "job": job, "data": columns, "evaluation": evaluation})


def rollouts_of(spec: ExperimentSpec, *, model: Path | None = None) -> ExperimentSpec:
    """Make a spec that answers each training row once, as training samples it, and grades the answers: a dump.

    Args:
        spec: of the experiment.
        model: what answers in place of ``model.path``: as ``model_at`` takes it.

    Raises:
        InvalidSpec: there are no rows to answer.
        ModelError: there is no model.
    """
    data = spec.data
    if spec.finished_job is not None or data.holds_groups:
        raise InvalidSpec("there is nothing to sample: the rows hold answers, or data.dump or data.from holds groups")
    if data.sources is not None and data.max_rows is not None:
        raise InvalidSpec("data.max_rows counts the rows of all sources together: set max_rows of each source instead")
    evaluation: dict[str, Any] = {"greedy": False, "group_size": spec.rollout.group_size}
    if data.path is not None:
        evaluation |= {"path": data.path, "max_rows": data.max_rows}
    else:
        sources = [source.model_dump(mode="json", exclude={"weight"}) for source in data.all_sources]
        evaluation["sets"] = [{"name": f"source-{number}", **source} for number, source in enumerate(sources)]
    document = spec.model_dump(mode="json") | {"evaluation": evaluation | {"deadline_seconds": LONGEST_SECONDS}}
    return evaluation_of(validate_spec(document), model=model)


def model_at(path: Path, argument: str = "--model", *, may_be_adapter: bool = False) -> Path:
    """Find the model that a path means: its own directory, a checkpoint's, or that of the newest whole checkpoint of an
    experiment or of a run.

    Raises:
        ModelError: there is none, or several experiments are there, or it is an adapter where that is not meant.
    """
    found = _model_at(path, argument)
    if not may_be_adapter and (found / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{argument}: {found} has an adapter without the weights that it is added to: write both as one model with "
            f"flotilla export {path} DIRECTORY, and name that",
            path=str(path),
        )
    return found


def _model_at(path: Path, argument: str) -> Path:
    if (path / "config.json").is_file():
        return path.resolve()
    if (path / MODEL / "config.json").is_file():
        return (path / MODEL).resolve()
    places = [each for each in (path, path / CHECKPOINTS, *sorted(path.glob(EVERY_EXPERIMENT))) if each.is_dir()]
    newest = [stored for stored in (next(complete(each), None) for each in places) if stored is not None]
    if not newest:
        raise ModelError(f"{argument}: there is neither a model nor a checkpoint in {path}", path=str(path))
    if len(newest) > 1:
        several = ", ".join(str(stored.path) for stored in newest)
        raise ModelError(f"{argument}: several experiments are in {path}, choose one: {several}", path=str(path))
    return (newest[0].path / MODEL).resolve()
