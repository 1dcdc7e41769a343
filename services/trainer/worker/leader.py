"""What the loop, the image pool and the checkpoints ask of a learner, where several ranks do it.

The leader sends the command to the followers first and then does its own part, on the one thread that computes; each
method returns when every rank is done. Where the trainer is one process, its learner and its weights are asked
themselves.
"""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from flotilla.services.trainer.checkpoint.files import SharedFile, paths_in, reserve, shared_files, write_shared
from flotilla.services.trainer.checkpoint.host_copy import HostCopy
from flotilla.services.trainer.checkpoint.manager import Contents, Restored
from flotilla.services.trainer.learning.finished import FinishedLearner
from flotilla.services.trainer.learning.learner import Learner, StepResult
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.parallel.channel import Channel
from flotilla.services.trainer.parallel.commands import (
    End,
    Find,
    Follow,
    KeepVersion,
    Offload,
    Reload,
    Restore,
    Save,
    Snapshot,
    Train,
)
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.services.trainer.worker.follower import build_shard, hit, write_image
from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.config.sections.checkpoint import EVERYTHING
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.faults.sites import Site
from flotilla.shared.models.hub import model_directory
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout


class LedLearner:
    """A learner, all of whose ranks do what is asked of it."""

    def __init__(self, learner: Learner, channel: Channel) -> None:
        self.spec = learner.spec
        self._learner, self._channel = learner, channel

    def train(self, groups: Sequence[Group], step: int) -> StepResult:
        """Train one step."""
        self._channel.send_groups(self._command(step), groups)
        result = self._learner.train(groups, step)
        self._channel.end()
        return result

    def follow(self, spec: ExperimentSpec) -> None:
        """Train by another spec from the next step on."""
        self._channel.send(Follow(spec=spec.model_dump(mode="json")))
        self.spec = spec
        self._learner.follow(spec)
        self._channel.end()

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Compute the loss on groups that are not trained."""
        assert isinstance(self._learner, FinishedLearner)
        self._channel.send_groups(self._command(0, learns=False), groups)
        found = self._learner.measure(groups)
        self._channel.end()
        return found

    def _command(self, step: int, *, learns: bool = True) -> Train:
        sizes = self._learner.sizes
        path = None if sizes.path is None else str(sizes.path)
        bounds = tuple((each.step, each.work, each.tokens, each.why) for each in sizes.bounds)
        return Train(step=step, learns=learns, bounds=bounds, bounds_path=path)

    def keep_version(self, version: int, oldest: int) -> None:
        """Remember the present weights as this version, and none before ``oldest``, if log-probs need them."""
        if self._learner.versions is not None:
            self._channel.send(KeepVersion(version=version, oldest=oldest))
            self._learner.keep_version(version, oldest)
            self._channel.end()


class LedWeights:
    """Weights that all ranks write into an image together."""

    def __init__(self, weights: ShardedParameters, channel: Channel, ranks: Ranks = ONE_RANK) -> None:
        self._weights, self._channel, self._ranks = weights, channel, ranks

    @property
    def layout(self) -> ImageLayout:
        """Of the image."""
        return self._weights.layout

    def snapshot_into(self, image: WeightImage) -> None:
        """Write header and weights; blocks.

        Raises:
            Conflict: the image is still being read.
        """
        with image.writing() as view:
            view[: len(self.layout.header)] = self.layout.header
            self._channel.send(Snapshot(path=str(image.path)))
            write_image(image.mapped, self._weights, self._ranks)
            hit(Site.TRAINER_SNAPSHOT)
            self._channel.end()


class LedMemory:
    """What all ranks have on their devices."""

    def __init__(self, learner: Learner, directory: Path, channel: Channel) -> None:
        self._own, self._directory, self._channel = LearnerMemory(learner, directory), directory, channel

    def offload(self) -> None:
        """Free it on every rank. Errors as of ``Offloader``, for this rank's part before the others'."""
        self._own.offload()
        self._channel.send(Offload(directory=str(self._directory)))
        self._channel.end()

    def reload(self) -> None:
        """Take it again on every rank. Errors as of ``Offloader``, for this rank's part before the others'."""
        self._own.reload()
        self._channel.send(Reload())
        self._channel.end()


class Leader:
    """Rank 0 of a job.

    Args:
        ranks: the job.
        channel: its end of the way to the followers.
    """

    def __init__(self, ranks: Ranks, channel: Channel) -> None:
        self._ranks, self._channel = ranks, channel

    def check_shared(self, directory: Path) -> None:
        """Check that ranks on other hosts see what is written into a directory.

        Raises:
            ModelError: one of them does not.
            Unavailable: nothing can be written there.
        """
        if not self._ranks.remote:
            return
        path, content = directory / f".seen-by-all-{secrets.token_hex(8)}", secrets.token_hex(8)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise Unavailable(f"{directory} cannot be written: {error}") from error
        try:
            self._channel.send(Find(path=str(path), content=content))
            self._channel.end()
        finally:
            path.unlink(missing_ok=True)

    def build(self, spec: ExperimentSpec, stored: StoredCheckpoint | None) -> Restored:
        """Build the learner on every rank.

        Raises:
            ModelError: it is impossible on one of them.
        """
        self._channel.send(Restore(path=None if stored is None else str(stored.path)))
        try:
            restored = build_shard(spec, stored, self._ranks)
        except ModelError as error:
            self._channel.end(error)
            raise
        self._channel.end()
        return restored

    def fill(self, learner: Learner, directory: Path, contents: Contents = EVERYTHING) -> None:
        """Write the files of a checkpoint on every rank.

        Raises:
            OSError: the disk has no room, or fails; the others are informed, and wait for the next command.
            Unavailable: so it was for another rank.
        """
        files = shared_files(learner, contents)
        reserve(directory, files, model_directory(learner.spec.model), learner)
        self._write(paths_in(directory, files), files, contents, is_copy=False)

    def copy(self, learner: Learner, contents: Contents = EVERYTHING) -> HostCopy | None:
        """Copy what the files of a checkpoint hold on every rank, into this host's memory; None if that is too small.

        Raises:
            OSError, Unavailable: as of ``fill``.
        """
        files = shared_files(learner, contents)
        copy = HostCopy.reserve(files, model_directory(learner.spec.model), learner)
        if copy is None:
            return None
        try:
            self._write(copy.paths, files, contents, is_copy=True)
        except BaseException:
            copy.close()
            raise
        return copy

    def _write(self, paths: Mapping[str, Path], files: list[SharedFile], contents: Contents, *, is_copy: bool) -> None:
        told = {name: str(path) for name, path in paths.items()}
        self._channel.send(Save(paths=told, contents=tuple(contents), is_copy=is_copy))
        try:
            write_shared(paths, files, self._ranks)
            if is_copy:
                hit(Site.CHECKPOINT_COPY)
        except OSError as error:
            # Another checkpoint is tried later: a rank still in this one would meet the next command's collectives.
            with contextlib.suppress(ModelError):
                self._channel.end(ModelError(f"the leader could not write its part: {error}"))
            raise
        try:
            self._channel.end()
        except ModelError as error:
            raise Unavailable(f"checkpoint could not be written: {error.detail}") from error

    def learner(self, learner: Learner) -> LedLearner:
        """Return what trains on every rank."""
        return LedLearner(learner, self._channel)

    def snapshots(self, learner: Learner) -> LedWeights:
        """Return what writes images on every rank."""
        assert isinstance(learner.weights, ShardedParameters)
        return LedWeights(learner.weights, self._channel, self._ranks)

    def memory(self, learner: Learner, directory: Path) -> LedMemory:
        """Return what moves weights and optimiser off the devices and back."""
        return LedMemory(learner, directory, self._channel)

    def close(self) -> None:
        """Let the followers go."""
        self._channel.send(End())
