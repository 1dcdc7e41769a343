"""What the gateway can check of a spec before anything starts: that its files are there and can be read."""

from pathlib import Path

from services.gateway.feeder.dataset import Dataset, load_dataset
from services.gateway.tracking.opening import check_trackers
from shared.config.reward import CustomConfig
from shared.config.spec import ExperimentSpec
from shared.config.tracking import JsonlTrackerConfig, TensorboardTrackerConfig
from shared.errors import DataError, InvalidSpec, ModelError, Scalar


def paths_of(spec: ExperimentSpec) -> dict[str, str]:
    """List the local paths of a spec by their dotted field."""
    paths = {"model.path": spec.model.path, "data.path": spec.data.path}
    if spec.evaluation is not None:
        paths["evaluation.path"] = spec.evaluation.path
    for number, component in enumerate(spec.reward.components):
        if isinstance(component, CustomConfig):
            paths[f"reward.components.{number}.path"] = component.path.rpartition(":")[0]
    for number, tracker in enumerate(spec.tracking.trackers):
        if isinstance(tracker, JsonlTrackerConfig | TensorboardTrackerConfig) and tracker.directory is not None:
            paths[f"tracking.trackers.{number}.directory"] = tracker.directory
    return paths


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


def check_model(spec: ExperimentSpec) -> None:
    """Check that the model's directory is there and holds a model.

    Raises:
        ModelError: it is missing, or has no readable config.json.
    """
    directory = Path(spec.model.path)
    if not directory.is_dir():
        raise ModelError(f"model.path: there is no directory {directory}", path=str(directory))
    try:
        (directory / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.path: cannot read config.json in {directory}: {error}", path=str(directory)) from None


def check_functions(spec: ExperimentSpec) -> None:
    """Check that the files of custom verifiers are there.

    Raises:
        DataError: one is missing.
    """
    for field, path in paths_of(spec).items():
        if field.startswith("reward.") and not Path(path).is_file():
            raise DataError(f"{field}: there is no file {path}", path=path)


def train_dataset(spec: ExperimentSpec) -> Dataset:
    """Read the training rows.

    Raises:
        DataError: they cannot be read as the spec says.
    """
    return load_dataset(spec.data.path, spec.data, seed=spec.seed, max_rows=spec.data.max_rows)


def evaluation_dataset(spec: ExperimentSpec) -> Dataset | None:
    """Read the held-out rows; None if the spec has no evaluation.

    Raises:
        DataError: they cannot be read as the spec says.
    """
    if spec.evaluation is None:
        return None
    return load_dataset(spec.evaluation.path, spec.data, seed=spec.seed, max_rows=spec.evaluation.max_rows)


def check(spec: ExperimentSpec) -> None:
    """Check everything; reads the datasets, so run it in a thread.

    Raises:
        InvalidSpec, ModelError, DataError: what is wrong, in one sentence.
    """
    check_paths(spec)
    check_model(spec)
    check_functions(spec)
    check_trackers(spec)
    train_dataset(spec)
    evaluation_dataset(spec)
