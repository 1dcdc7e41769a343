"""What goes into a checkpoint, and how training continues from one.

step-00000040/
    model/                 a Hugging Face directory: config, weights, tokenizer; with ``model.lora`` the adapters alone,
                           as peft writes them
    optimizer.safetensors  AdamW's moments and step counts; float32 masters of bfloat16 weights; not everywhere
    versions.safetensors   weights of earlier versions, if ``old_log_probs`` needs them
    critic.safetensors     weights and optimiser state of the critic, if there is one
    average.safetensors    moving average of the trained weights, float32, if one is kept; without it one begins again
    state.json             everything else
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flotilla.services.trainer.checkpoint.files import paths_in, reserve, shared_files, write_shared
from flotilla.services.trainer.checkpoint.host_copy import HostCopy
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.data.group_metrics import Totals
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.opening import load_critic, load_teachers, make_learner
from flotilla.services.trainer.models.loading import Share, check_device, check_overrides, load_model
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.shared.checkpoints.folders import (
    AVERAGE,
    CRITIC,
    FIXED_WEIGHTS,
    MODEL,
    OPTIMIZER,
    VERSIONS,
    CheckpointState,
    ClosedIds,
    StoredCheckpoint,
    check_files,
    differences,
)
from flotilla.shared.checkpoints.lineage import ROOT, Published, VersionLine, follow
from flotilla.shared.config.sections.checkpoint import EVERYTHING, Content
from flotilla.shared.config.sections.job import RewardModelJobConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.models.hub import ADAPTER, model_directory
from flotilla.shared.net.absence import absent_or
from flotilla.shared.schemas.live_changes import CurriculumState, LiveChange, held_at
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.plans import RECENT_STEPS, Plan

log = logging.getLogger(__name__)

WITHOUT_OPTIMIZER = "the checkpoint was made without the optimiser's state, which begins again with moments of 0"


SOFTWARE = ("flotilla", "torch", "transformers", "safetensors", "numpy")

FIXED_FIELDS = (
    *FIXED_WEIGHTS,
    ("asynchrony", "trigger_parameter_sync_step"),
    ("optimisation", "groups_per_mini_batch"),
    ("asynchrony", "require_batches"),
)
"""Settings that a checkpoint cannot be continued without: they define the weights, the versions and the steps."""


def software_versions() -> dict[str, str]:
    """List the versions of what wrote a checkpoint."""
    found = {}
    for name in SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            continue
    return found


def check_same_lineage(state: CheckpointState, spec: ExperimentSpec) -> None:
    """Refuse to continue from a checkpoint under settings that do not fit it.

    Raises:
        ModelError: a setting differs; it is named with both values and the way out.
    """
    for section, key, before, after in differences(state, spec, FIXED_FIELDS):
        raise ModelError(
            f"checkpoint of step {state.step} was made with {section}.{key} {before!r}, the spec now says "
            f"{after!r}: set it back, or start a new experiment from the checkpoint's model directory"
        )


@dataclass
class Progress:
    """Where training stands; changed by the loop alone.

    Attributes:
        step: steps done.
        trained: ids of all groups trained in this lineage, and those that were closed.
        totals: figures that grow over the experiment.
        lineage: names the groups of every step, in order.
        recent: plans of the last steps, oldest first.
        changes: live changes of the spec that are known, oldest first.
        curriculum: what the gateway knows of the rows of a curriculum; None without one.
        closed: which ids ``trained`` has whatever became of their groups; None where it has none.
    """

    step: int
    trained: IntervalSet
    totals: Totals
    lineage: str = ROOT
    recent: tuple[Plan, ...] = ()
    changes: tuple[LiveChange, ...] = ()
    curriculum: CurriculumState | None = None
    closed: ClosedIds | None = None

    @classmethod
    def start(cls) -> "Progress":
        """Stand at the beginning."""
        return cls(0, IntervalSet(), Totals())

    def add(self, plan: Plan) -> None:
        """Note that the groups of a plan were trained."""
        self.step = plan.step
        self.trained.add_many(plan.group_ids)
        self.lineage = follow(self.lineage, plan.step, plan.group_ids)
        self.recent = (*self.recent, plan)[-RECENT_STEPS:]

    def close(self, below: int) -> None:
        """Keep no longer which groups below an id were trained: none of them comes again."""
        if added := self.trained.close_below(below):
            untrained = added + (0 if self.closed is None else self.closed.untrained)
            self.closed = ClosedIds(below=below, untrained=untrained)


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds, or the beginning.

    Attributes:
        learner, progress: to continue with.
        published: the policy version that was newest when it was written.
        lost: numbers of versions that are not in its lineage.
    """

    learner: Learner
    progress: Progress
    published: Published
    lost: IntervalSet


Build = Callable[[ExperimentSpec, StoredCheckpoint | None], Restored]
"""Makes a learner from a checkpoint, or from the spec's model; raises ``ModelError`` where that is impossible."""
Contents = Sequence[Content]
Fill = Callable[[Learner, Path, Contents], None]
"""Writes what a checkpoint of a learner shall hold, but ``state.json``, into a directory."""
Copy = Callable[[Learner, Contents], HostCopy | None]
"""Copies the same into the host's memory; None where that is too small."""


@dataclass(frozen=True)
class CopiedCheckpoint:
    """A checkpoint in memory.

    Attributes:
        state: all of it that is no tensor; sizes and checksums of files are not known yet.
        copy: its files.
    """

    state: CheckpointState
    copy: HostCopy


class CheckpointManager:
    """Saves and restores a learner.

    Args:
        experiment_id: whose checkpoints these are.
        storage: where they lie.
        build, fill, copy: how a learner is made, written and copied; those of one rank unless others are given.
    """

    def __init__(
        self,
        experiment_id: str,
        storage: CheckpointStorage,
        build: Build | None = None,
        fill: Fill | None = None,
        copy: Copy | None = None,
    ) -> None:
        self._experiment_id = experiment_id
        self._storage = storage
        self._build, self._fill, self._copy = build or build_alone, fill or fill_alone, copy or copy_alone

    def save(self, learner: Learner, progress: Progress, line: VersionLine, figure: float | None = None) -> Path:
        """Write a durable checkpoint, with what it is compared with others by; blocks.

        Raises:
            Unavailable: the disk is full or not writable; nothing of it remains.
        """

        state = self._describe(learner, progress, line, figure)
        contents = self._contents(learner, progress)
        return self._write(state, lambda directory: self._fill(learner, directory, contents))

    def copy(
        self, learner: Learner, progress: Progress, line: VersionLine, figure: float | None = None
    ) -> CopiedCheckpoint | None:
        """Copy all that a checkpoint holds into memory, as it is now; None where memory is too short. Blocks.

        Raises:
            Unavailable: it could not be copied, on this rank or another.
        """
        state = self._describe(learner, progress, line, figure)
        try:
            copied = self._copy(learner, self._contents(learner, progress))
        except OSError as error:
            raise Unavailable(f"checkpoint of step {progress.step} could not be copied: {error}") from error
        return None if copied is None else CopiedCheckpoint(state, copied)

    def write(self, copied: CopiedCheckpoint) -> Path:
        """Write a durable checkpoint of what was copied, and free the copy; blocks. Errors as of ``save``."""
        try:
            return self._write(copied.state, copied.copy.write)
        finally:
            copied.copy.close()

    def _contents(self, learner: Learner, progress: Progress) -> Contents:
        return learner.spec.checkpoint.contents_at(progress.step, learner.spec.optimisation.steps)

    def _write(self, state: CheckpointState, fill: Callable[[Path], None]) -> Path:
        def describe(files: dict[str, int]) -> CheckpointState:
            return state.model_copy(update={"files": files})

        return self._storage.write(state.step, _failing_as_os_error(fill), describe)

    def _describe(
        self, learner: Learner, progress: Progress, line: VersionLine, figure: float | None
    ) -> CheckpointState:
        published = line.published_at(progress.step)
        trained, curriculum = progress.trained.to_list(), progress.curriculum
        if curriculum is not None and trained:
            # As ``Origin.first_group_id``: a fork continues after the last group that was trained.
            curriculum = curriculum.issued_again_from(trained[-1][1] + 1)
        return CheckpointState(
            experiment_id=self._experiment_id,
            step=progress.step,
            version=published.version,
            published_step=published.step,
            lost_versions=line.lost.to_list(),
            lineage=progress.lineage,
            recent=[asdict(replace(plan, entry_ids=())) for plan in progress.recent],
            updates=learner.optimizer.updates,
            trained=trained,
            closed=progress.closed,
            seed=learner.spec.seed,
            kl_coefficient=learner.kl_coefficient,
            totals=progress.totals.to_dict(),
            spec=learner.spec.model_dump(mode="json"),
            software=software_versions(),
            files={},
            figure=figure,
            changes=held_at(progress.changes, published.version),
            curriculum=curriculum,
            reward_moments=astuple(learner.reward_moments) if learner.reward_moments.count else None,
        )

    def restore(self, spec: ExperimentSpec) -> Restored:
        """Make a learner from the newest checkpoint that is whole, or from the spec's model where there is none.

        One that is damaged is passed over, and set aside once an older one is found to be whole.

        Raises:
            ModelError: model or checkpoint cannot be used, with the reason.
        """
        self._storage.sweep()
        check_device(spec.parallelism.device)
        damage: ModelError | None = None
        for stored in self._storage.complete():
            check_same_lineage(stored.state, spec)
            try:
                check_files(stored)
                restored = self._build(spec, stored)
            except ModelError as error:
                log.warning("checkpoint is passed over", extra={"path": str(stored.path), "error": error.detail})
                damage = damage or error
                continue
            self._storage.set_aside(stored.step)
            log.info("training goes on from a checkpoint", extra={"step": stored.step, "path": str(stored.path)})
            return restored
        if damage is not None:
            raise damage
        if spec.checkpoint.resume_from is not None:
            raise ModelError(
                f"{self._storage.directory} has no checkpoint any more, and the experiment did not begin with the "
                f"model's weights but from {spec.checkpoint.resume_from}: start another one from there"
            )
        self._storage.set_aside(0)
        return self._build(spec, None)


def build_alone(spec: ExperimentSpec, stored: StoredCheckpoint | None, share: Share | None = None) -> Restored:
    """Make the learner of a trainer that is one process; ``share`` gives it bases that others have, too.

    Raises:
        ModelError: model or checkpoint cannot be used.
    """
    device = check_device(spec.parallelism.device)
    if stored is None:
        return beginning(spec, device, share=share)
    return restored_from(spec, stored, device, share=share)


def fill_alone(learner: Learner, directory: Path, contents: Contents = EVERYTHING) -> None:
    """Write the files of a learner whose weights one process has."""
    files = shared_files(learner, contents)
    # Not from where the weights were loaded: that may be a checkpoint which is removed meanwhile.
    reserve(directory, files, model_directory(learner.spec.model), learner)
    write_shared(paths_in(directory, files), files)


def copy_alone(learner: Learner, contents: Contents = EVERYTHING) -> HostCopy | None:
    """Copy the same into memory; None where that is too small."""
    files = shared_files(learner, contents)
    copy = HostCopy.reserve(files, model_directory(learner.spec.model), learner)
    if copy is None:
        return None
    try:
        write_shared(copy.paths, files)
    except BaseException:
        copy.close()
        raise
    if (faults := armed()) is not None:
        faults.hit(Site.CHECKPOINT_COPY)
    return copy


def beginning(
    spec: ExperimentSpec, device: torch.device, ranks: Ranks = ONE_RANK, share: Share | None = None
) -> Restored:
    """Make a learner of the model that training begins with.

    Raises:
        ModelError: it cannot be used.
    """
    source = model_directory(spec.model)
    learner = _learner(spec, source, device, ranks, share)
    return Restored(learner, Progress.start(), Published(spec.first_version, 0), IntervalSet())


def _learner(spec: ExperimentSpec, source: Path, device: torch.device, ranks: Ranks, share: Share | None) -> Learner:
    # Several ranks read what each of them keeps, when that is known.
    how = spec.model
    load = partial(load_model, device=device, in_parts=ranks.is_several, attention=how.attention, kernels=how.kernels)
    scores = isinstance(spec.job, RewardModelJobConfig)
    policy = partial(load, source, dtype=how.dtype, scores=scores, quantisation=how.quantisation)
    key = (source, how.dtype, how.attention, how.kernels)
    loaded = policy() if share is None else share(key, policy)
    check_overrides(loaded.model.config, how.overrides)
    reference = None
    if spec.needs_reference and spec.model.lora is None:
        reference = load(model_directory(spec.model), dtype=spec.model.dtype)
    teachers = load_teachers(spec, loaded, load)
    critic = load_critic(spec, loaded, load) if spec.algorithm.needs_critic else None
    return make_learner(spec, loaded, reference, teachers, critic, ranks=ranks)


def restored_from(
    spec: ExperimentSpec,
    stored: StoredCheckpoint,
    device: torch.device,
    ranks: Ranks = ONE_RANK,
    share: Share | None = None,
) -> Restored:
    """Make a learner of a checkpoint.

    Raises:
        ModelError: it cannot be read.
    """
    source = stored.path / MODEL if spec.model.lora is None else model_directory(spec.model)
    learner = _learner(spec, source, device, ranks, share)
    _load_tensors(learner, stored)
    state = stored.state
    totals = Totals(**{key: value for key, value in state.totals.items() if hasattr(Totals, key)})
    published_step = state.published_step
    if published_step is None:
        # An earlier release wrote it, whose versions followed steps without a gap.
        published_step = min(state.version * spec.steps_per_version, stored.step)
    recent = tuple(map(Plan.from_wire, state.recent))
    trained = IntervalSet.from_list(state.trained)
    progress = Progress(
        stored.step, trained, totals, state.lineage, recent, state.changes, state.curriculum, state.closed
    )
    return Restored(
        learner, progress, Published(state.version, published_step), IntervalSet.from_list(state.lost_versions)
    )


def _load_tensors(learner: Learner, stored: StoredCheckpoint) -> None:
    try:
        if learner.adapters is not None:
            learner.adapters.load(load_file(stored.path / MODEL / ADAPTER))
        has_optimizer = (stored.path / OPTIMIZER).is_file()
        learner.optimizer.load(load_file(stored.path / OPTIMIZER) if has_optimizer else {}, stored.state.updates)
        if not has_optimizer:
            log.warning(WITHOUT_OPTIMIZER, extra={"step": stored.step, "path": str(stored.path)})
        if learner.versions is not None:
            learner.versions.load(load_file(stored.path / VERSIONS))
        if learner.critic is not None:
            learner.critic.load(load_file(stored.path / CRITIC), stored.state.updates, with_optimizer=has_optimizer)
        if learner.average is not None and AVERAGE in stored.state.files:
            learner.average.load(load_file(stored.path / AVERAGE))
        elif learner.average is not None:
            learner.average.restart()
    except (OSError, SafetensorError) as error:
        raise absent_or(error, ModelError(f"checkpoint {stored.path} cannot be read: {error}")) from error
    learner.kl_coefficient = stored.state.kl_coefficient
    learner.remember_rewards(stored.state.reward_moments)
    # What was configured when it was written: a change that holds since is to be applied, one before has its effect.
    kl = stored.state.spec.get("algorithm", {}).get("kl") or {}
    learner.configured_kl = kl.get("coefficient", learner.configured_kl)


def _failing_as_os_error(fill: Callable[[Path], None]) -> Callable[[Path], None]:
    """Let a full disk look the same from every library: safetensors reports it in an error of its own."""

    def filled(directory: Path) -> None:
        try:
            fill(directory)
        except SafetensorError as error:
            free = shutil.disk_usage(directory).free
            raise Unavailable(f"checkpoint could not be written, {free} bytes are free: {error}") from error

    return filled
