"""What the gateway can check of a spec before anything starts: that its files are there and can be read."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from flotilla.services.gateway.datasets.columns import value_at
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import check_rows, check_written
from flotilla.services.gateway.datasets.loading import (
    check_dumps,
    joined,
    load_dump,
    load_evaluation,
    load_rows,
    load_training,
)
from flotilla.services.gateway.preflight.models import check_model, models_of, teachers_of_text
from flotilla.services.gateway.tracking.opening import check_trackers
from flotilla.services.gateway.uploads.remote import check_protocol
from flotilla.shared.config.sections.data import FROM, DataConfig, RowsConfig, is_url
from flotilla.shared.config.sections.job import JobConfig, SftConfig
from flotilla.shared.config.sections.judge import HostedModelConfig
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.sections.reward import Component, CustomConfig, RecordedRewardConfig, VerlDefaultConfig
from flotilla.shared.config.sections.tracking import JsonlTrackerConfig, TensorboardTrackerConfig
from flotilla.shared.config.sections.verl_sources import first_not_graded
from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.errors import DataError, InvalidSpec, Scalar
from flotilla.shared.locations.allowed import (
    Places,
    check_agents,
    check_episodes,
    checkpoint_urls_of,
    code_of,
    files_of,
    paths_of_agents,
    written_of,
)
from flotilla.shared.models.hub import COMMIT, fetch_small

SUBSCRIBED = f"data.{FROM}"


def paths_of(spec: ExperimentSpec) -> dict[str, str]:
    """List the local paths of a spec by their dotted field."""
    paths = {} if spec.model.is_hub_name else {"model.path": spec.model.path}
    for field, model in other_models(spec).items():
        if not model.is_hub_name:
            paths[field] = model.path
    if not spec.data.holds_groups:
        paths |= _paths_of_rows("data", "sources", spec.data.path, spec.data.sources)
    if spec.evaluation is not None:
        paths |= _paths_of_rows("evaluation", "sets", spec.evaluation.path, spec.evaluation.sets)
    if spec.finished_job is not None and spec.finished_job.held_out is not None:
        paths |= _paths_of_row("job.held_out", spec.finished_job.held_out)
    for where, component in spec.reward.graders.items():
        if isinstance(component, CustomConfig):
            paths[f"{where}.path"] = component.path.rpartition(":")[0]
        if isinstance(component, HostedModelConfig) and not component.model.is_hub_name:
            paths[f"{where}.path"] = component.path
    paths |= files_of(spec.rollout.episodes) | paths_of_agents(spec.rollout.agents) | _dumps_of(spec)
    for number, tracker in enumerate(spec.tracking.trackers):
        if isinstance(tracker, JsonlTrackerConfig | TensorboardTrackerConfig) and tracker.directory is not None:
            paths[f"tracking.trackers.{number}.directory"] = tracker.directory
    return paths


def _dumps_of(spec: ExperimentSpec) -> dict[str, str]:
    """List where samples of other runs are that a spec reads."""
    recorded, graders = getattr(spec.rollout.engine, "recorded", None), spec.reward.graders
    found = {"data.dump": spec.data.dump, "rollout.engine.recorded.dump": recorded and recorded.dump}
    found |= {f"{where}.dump": each.dump for where, each in graders.items() if isinstance(each, RecordedRewardConfig)}
    return {field: path for field, path in found.items() if path is not None}


def _paths_of_rows(section: str, name: str, path: str | None, several: Sequence[RowsConfig] | None) -> dict[str, str]:
    paths = {} if path is None or is_url(path) else {f"{section}.path": path}
    for number, rows in enumerate(several or ()):
        paths |= _paths_of_row(f"{section}.{name}.{number}", rows)
    return paths


def _paths_of_row(field: str, rows: RowsConfig) -> dict[str, str]:
    paths = {f"{field}.path": rows.path, f"{field}.custom": rows.custom and rows.custom.rpartition(":")[0]}
    paths |= {f"{field}.more_paths.{number}": each for number, each in enumerate(rows.more_paths)}
    return {name: each for name, each in paths.items() if each is not None and not is_url(each)}


def check_paths(spec: ExperimentSpec) -> None:
    """Refuse relative paths: over HTTP there is no folder that they could be relative to.

    Raises:
        InvalidSpec: one entry per relative path.
    """
    entries: list[dict[str, Scalar]] = [
        {"path": field, "value": path, "allowed": "an absolute path: a request has no folder of its own"}
        for field, path in paths_of(spec).items()
        if not Path(path).is_absolute()
    ]
    if entries:
        raise InvalidSpec("; ".join(f"{entry['path']}: {entry['allowed']}" for entry in entries), errors=entries)


def check_code(spec: ExperimentSpec, places: Places) -> None:
    """Refuse code and dumps that are where the operator allows none, and trackers that write elsewhere than they may.

    Raises:
        InvalidSpec, DataError: naming the file and what to set.
    """
    document = spec.model_dump(mode="json")
    for field, reference in code_of(document).items():
        places.check_code(reference, field)
    check_episodes(spec.rollout.episodes, places)
    check_agents(spec.rollout.agents, places)
    for field, path in written_of(document).items():
        places.check_written(path, field)
    for field, url in checkpoint_urls_of(document).items():
        places.check_checkpoint_url(url, field)
    check_dumps(_dumps_of(spec).values(), places)


def pinned(spec: ExperimentSpec) -> ExperimentSpec:
    """Replace revisions of the hub's models by commits, so that every service loads the same files at any time.

    Raises:
        ModelError: there is no such model or revision, the hub refuses it or cannot be reached.
    """
    reward = spec.reward.model_copy(update={"components": _of_commits(spec.reward.components)})
    if (audit := reward.audit) is not None:
        audit = audit.model_copy(update={"components": _of_commits(audit.components)})
        reward = reward.model_copy(update={"audit": audit})
    model = spec.model.model_copy(update={"revision": _commit_of(spec.model)})
    algorithm = spec.algorithm
    for name in ("distillation", "value_loss"):
        section = getattr(algorithm, name)
        if section is not None and section.model is not None:
            of_commit = section.model_copy(update={"revision": _commit_of(section.model)})
            algorithm = algorithm.model_copy(update={name: of_commit})
    if (taught := algorithm.distillation) is not None and taught.teachers:
        teachers = tuple(each.model_copy(update={"revision": _commit_of(each.model)}) for each in taught.teachers)
        taught = taught.model_copy(update={"teachers": teachers})
        algorithm = algorithm.model_copy(update={"distillation": taught})
    return spec.model_copy(update={"model": model, "algorithm": algorithm, "reward": reward, "job": _job_of(spec.job)})


def _job_of(job: JobConfig) -> JobConfig:
    if not isinstance(job, SftConfig) or job.distillation is None:
        return job
    taught = job.distillation.model_copy(update={"revision": _commit_of(job.distillation.model)})
    return job.model_copy(update={"distillation": taught})


def _commit_of(model: ModelConfig) -> str | None:
    """Find the commit of a hub's model; the revision as it is where it is one, or where the model is a directory."""
    if not model.is_hub_name or COMMIT.fullmatch(model.revision or ""):
        return model.revision
    return fetch_small(model)


def _of_commits(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """Replace revisions of the hub's reward models by commits."""
    return tuple(
        each.model_copy(update={"revision": _commit_of(each.model)}) if isinstance(each, HostedModelConfig) else each
        for each in components
    )


def check_functions(spec: ExperimentSpec) -> None:
    """Check that the files of custom verifiers are there.

    Raises:
        DataError: one is missing.
    """
    for field, path in paths_of(spec).items():
        is_code = field.startswith("reward.") and field.endswith(".path") and field not in models_of(spec)
        if is_code and not Path(path).is_file():
            raise DataError(f"{field}: there is no file {path}", path=path, field=field)


def train_dataset(spec: ExperimentSpec, places: Places | None = None) -> Dataset:
    """Read the training rows.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    job = spec.finished_job
    if spec.data.dump is not None:
        return load_dump(spec.data, spec.reward, seed=spec.seed, places=places)
    if job is None:
        dataset = load_training(spec.data, seed=spec.seed, places=places, needs_labels=_needs_labels(spec))
        check_data_sources(spec, dataset, "data")
        check_taught(spec, dataset)
        check_shown(spec, dataset)
        return dataset
    dataset = load_training(_ungraded(spec.data), seed=spec.seed, places=places)
    check_rows(dataset, job, "data")
    return dataset


def held_out_dataset(spec: ExperimentSpec, places: Places | None = None) -> Dataset | None:
    """Read the rows whose loss is measured; None if the job names none.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    job = spec.finished_job
    if job is None or job.held_out is None:
        return None
    config = _ungraded(spec.data)
    dataset = joined([load_rows(job.held_out, config, "job.held_out", places=places)], config, spec.seed, ())
    check_rows(dataset, job, "job.held_out")
    return dataset


def _ungraded(data: DataConfig) -> DataConfig:
    """Rows with finished answers need no label."""
    return data.model_copy(update={"label_column": None})


def _needs_labels(spec: ExperimentSpec) -> bool:
    """Rows may lack the label that nothing reads, unless ``data`` names another column than the usual one."""
    usual = DataConfig.model_fields["label_column"].default
    return spec.data.label_column != usual or spec.reward.may_read_labels


def evaluation_dataset(spec: ExperimentSpec, places: Places | None = None) -> Dataset | None:
    """Read the held-out rows; None if the spec has no evaluation.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    if spec.evaluation is None:
        return None
    dataset = load_evaluation(
        spec.evaluation, spec.data, seed=spec.seed, places=places, needs_labels=_needs_labels(spec)
    )
    if spec.written_answers is not None:
        check_written(dataset, spec.written_answers)
    check_data_sources(spec, dataset, "evaluation")
    return dataset


def check_data_sources(spec: ExperimentSpec, dataset: Dataset, field: str) -> None:
    """Check that a component that chooses a scorer by data source has one for every row that it grades.

    Raises:
        DataError: it has none for a row; the detail lists the data sources that it knows.
    """
    column = spec.data.data_source_column
    for where, component in spec.reward.graders.items():
        if not isinstance(component, VerlDefaultConfig) or column is None:
            continue
        values = [value_at(row, column) for row in dataset.rows]
        given = [None if value is None else str(value) for value in values]
        graded = [name for name in given if component.data_sources is None or name in component.data_sources]
        reason = first_not_graded(graded, runs_code=component.runs_code)
        if reason is not None:
            raise DataError(f"{where}, rows of {field}: {reason}", field=field)


def check_taught(spec: ExperimentSpec, dataset: Dataset) -> None:
    """Check that every training row has a teacher, where teachers are chosen by data source.

    Raises:
        DataError: one has none.
    """
    distillation, column = spec.algorithm.distillation, spec.data.data_source_column
    if distillation is None or distillation.data_sources is None or column is None:
        return
    for number, row in enumerate(dataset.rows):
        value = value_at(row, column)
        if value is None or str(value) not in distillation.data_sources:
            name = "teachers" if distillation.teachers else "servers"
            raise DataError(
                f"algorithm.distillation.{name}: row {number} of data has the data source {value!r}, which none of "
                f"them teaches; they teach {', '.join(sorted(distillation.data_sources))}",
                field="data",
            )


def check_shown(spec: ExperimentSpec, dataset: Dataset) -> None:
    """Check that no training row with images has a teacher of text alone.

    Raises:
        DataError: one has.
    """
    images, column = spec.data.images, spec.data.data_source_column
    of_text = {} if images is None else teachers_of_text(spec)
    if images is None or not of_text:
        return
    for number, row in enumerate(dataset.rows):
        source = None if column is None or None in of_text else str(value_at(row, column))
        if source in of_text and row.get(images.column):
            raise DataError(
                f"{of_text[source]}: row {number} of data has images, and this model takes none: name a "
                "vision-language model of the same tokenizer and processor, or leave such rows out",
                field="data",
            )


def check(spec: ExperimentSpec, places: Places | None = None) -> None:
    """Check everything; reads the datasets, so run it in a thread.

    Args:
        places: where code and data may be; None: anywhere.

    Raises:
        InvalidSpec, ModelError, DataError: what is wrong, in one sentence.
    """
    check_paths(spec)
    if places is not None:
        check_code(spec, places)
    check_model(spec)
    check_functions(spec)
    check_trackers(spec)
    check_protocol(spec)
    if spec.trains and spec.data.subscribes_to is None:
        train_dataset(spec, places)
    held_out_dataset(spec, places)
    evaluation_dataset(spec, places)


def subscribed(spec: ExperimentSpec, source: str, theirs: ExperimentSpec) -> ExperimentSpec:
    """Name the experiment whose groups are trained by its id.

    Args:
        spec: of the experiment that trains them.
        source: id of the one that samples them.
        theirs: its spec.

    Raises:
        InvalidSpec: it samples no groups, or not as the spec says, so that log-probabilities would mean another thing.
    """
    if not theirs.trains or theirs.finished_job is not None or theirs.data.holds_groups:
        raise InvalidSpec(
            f"{SUBSCRIBED}: {source} samples no groups that it trains: name an experiment of reinforcement learning "
            "with rollouts of its own"
        )
    for key, ours, of_source in _shared_keys(spec, theirs):
        if ours != of_source:
            raise InvalidSpec(
                f"{key} is {ours}, and the groups of {source} are made with {of_source}: write the same, or leave "
                f"{SUBSCRIBED} out"
            )
    if spec.algorithm.router_replay == "R3" and theirs.algorithm.router_replay != "R3":
        raise InvalidSpec(f"algorithm.router_replay R3 needs what the engines of {source} do not record: leave it out")
    return spec.model_copy(update={"data": spec.data.model_copy(update={FROM: source})})


def _shared_keys(ours: ExperimentSpec, theirs: ExperimentSpec) -> Iterator[tuple[str, object, object]]:
    """List what both must have in common: key, value here, value there."""

    def taught(spec: ExperimentSpec) -> bool:
        return bool(spec.algorithm.distillation and spec.algorithm.distillation.servers)

    def has_baseline(spec: ExperimentSpec) -> bool:
        return spec.algorithm.advantage.kind == "remax"

    yield "rollout.group_size", ours.rollout.group_size, theirs.rollout.group_size
    yield "rollout.sampling.temperature", ours.policy_temperature, theirs.policy_temperature
    # Whatever cuts and penalties were: what was recorded is of the policy, or it is not.
    yield "the kind of log-probabilities that rollout.engine records", _recorded(ours), _recorded(theirs)
    yield "rollout.agents.branches as_one", ours.joins_branches, theirs.joins_branches
    yield "data.images", ours.data.images, theirs.data.images
    if taught(ours):
        yield "algorithm.distillation.servers", True, taught(theirs)
    if has_baseline(ours):
        yield "algorithm.advantage.kind", "remax", theirs.algorithm.advantage.kind


def _recorded(spec: ExperimentSpec) -> str:
    return "after the cut" if spec.rollout.records_the_cut else "of the policy"
