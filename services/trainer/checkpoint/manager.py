"""What goes into a checkpoint, and how training goes on from one.

step-00000040/
    model/                 a Hugging Face directory: config, weights, tokenizer
    optimizer.safetensors  AdamW's moments and step counts; float32 masters of bfloat16 weights
    versions.safetensors   weights of earlier versions, if ``old_log_probs`` needs them
    critic.safetensors     weights and optimiser state of the critic, if there is one
    state.json             everything else
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from services.trainer.checkpoint.state import CheckpointState, check_same_lineage, software_versions
from services.trainer.checkpoint.storage import CheckpointStorage, StoredCheckpoint
from services.trainer.data.group_metrics import Totals
from services.trainer.learning.learner import Learner
from services.trainer.models.loading import LoadedModel, check_device, load_model
from shared.config.spec import ExperimentSpec
from shared.errors import ModelError, Unavailable
from shared.streams.intervals import IntervalSet

log = logging.getLogger(__name__)

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
VERSIONS = "versions.safetensors"
CRITIC = "critic.safetensors"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"})
_WRITTEN_WITH_WEIGHTS = frozenset({"config.json", "generation_config.json"})


@dataclass
class Progress:
    """Where training stands; changed by the loop alone.

    Attributes:
        step: steps done.
        trained: ids of all groups trained in this lineage.
        totals: figures that grow over the experiment.
    """

    step: int
    trained: IntervalSet
    totals: Totals

    @classmethod
    def start(cls) -> "Progress":
        """Stand at the beginning."""
        return cls(0, IntervalSet(), Totals())


class CheckpointManager:
    """Saves and restores a learner.

    Args:
        experiment_id: whose checkpoints these are.
        storage: where they lie.
    """

    def __init__(self, experiment_id: str, storage: CheckpointStorage) -> None:
        self._experiment_id = experiment_id
        self._storage = storage

    def save(self, learner: Learner, progress: Progress, version: int) -> Path:
        """Write a durable checkpoint; blocks.

        Raises:
            Unavailable: the disk is full or not writable; nothing of it remains.
        """

        def fill(directory: Path) -> None:
            # Not from where the weights were loaded: that may be a checkpoint which is removed meanwhile.
            _save_model(learner.loaded, Path(learner.spec.model.path), directory / MODEL)
            save_file(_contiguous(learner.optimizer.state()), directory / OPTIMIZER)
            if learner.versions is not None:
                save_file(_contiguous(learner.versions.state()), directory / VERSIONS)
            if learner.critic is not None:
                save_file(_contiguous(learner.critic.state()), directory / CRITIC)

        def describe(files: dict[str, int]) -> CheckpointState:
            return CheckpointState(
                experiment_id=self._experiment_id,
                step=progress.step,
                version=version,
                updates=learner.optimizer.updates,
                trained=progress.trained.to_list(),
                seed=learner.spec.seed,
                kl_coefficient=learner.kl_coefficient,
                totals=progress.totals.to_dict(),
                spec=learner.spec.model_dump(mode="json"),
                software=software_versions(),
                files=files,
            )

        return self._storage.write(progress.step, _failing_as_os_error(fill), describe)

    def restore(self, spec: ExperimentSpec) -> tuple[Learner, Progress]:
        """Make a learner from the newest complete checkpoint, or from the spec's model where there is none.

        Raises:
            ModelError: model or checkpoint cannot be used; one sentence says why.
        """
        self._storage.sweep()
        device = check_device(spec.parallelism.device)
        stored = self._storage.newest()
        if stored is not None:
            check_same_lineage(stored.state, spec)
        source = Path(spec.model.path) if stored is None else stored.path / MODEL
        loaded = load_model(source, dtype=spec.model.dtype, device=device)
        reference = None
        if spec.algorithm.needs_reference:
            reference = load_model(Path(spec.model.path), dtype=spec.model.dtype, device=device)
        learner = Learner(spec, loaded, reference)
        if stored is None:
            return learner, Progress.start()
        _load_tensors(learner, stored)
        log.info("training goes on from a checkpoint", extra={"step": stored.step, "path": str(stored.path)})
        totals = Totals(**{key: value for key, value in stored.state.totals.items() if hasattr(Totals, key)})
        return learner, Progress(stored.step, IntervalSet.from_list(stored.state.trained), totals)


def _save_model(loaded: LoadedModel, source: Path, directory: Path) -> None:
    loaded.model.save_pretrained(directory)  # type: ignore[operator]
    for path in source.iterdir():
        # Tokenizer, chat template and whatever else belongs to the model's directory, but no other weights.
        is_wanted = path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json")
        if is_wanted and path.name not in _WRITTEN_WITH_WEIGHTS:
            shutil.copyfile(path, directory / path.name)


def _load_tensors(learner: Learner, stored: StoredCheckpoint) -> None:
    try:
        learner.optimizer.load(load_file(stored.path / OPTIMIZER), stored.state.updates)
        if learner.versions is not None:
            learner.versions.load(load_file(stored.path / VERSIONS))
        if learner.critic is not None:
            learner.critic.load(load_file(stored.path / CRITIC), stored.state.updates)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"checkpoint {stored.path} cannot be read: {error}") from error
    learner.kl_coefficient = stored.state.kl_coefficient


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # safetensors refuses tensors that share memory or have gaps.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _failing_as_os_error(fill: Callable[[Path], None]) -> Callable[[Path], None]:
    """Let a full disk look the same from every library: safetensors reports it in an error of its own."""

    def filled(directory: Path) -> None:
        try:
            fill(directory)
        except SafetensorError as error:
            free = shutil.disk_usage(directory).free
            raise Unavailable(f"checkpoint could not be written, {free} bytes are free: {error}") from error

    return filled
