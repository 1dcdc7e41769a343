"""Every rank but the first: it has its part of the weights, and executes the leader's commands until it is released."""

import logging
import mmap
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError

from flotilla.services.trainer.checkpoint.files import shared_files, write_shared
from flotilla.services.trainer.checkpoint.manager import Restored, beginning, restored_from
from flotilla.services.trainer.learning.finished import FinishedLearner
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.learning.pass_sizes import Bound
from flotilla.services.trainer.parallel.channel import Channel
from flotilla.services.trainer.parallel.commands import (
    Command,
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
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.services.trainer.parallel.remote_parts import send_parts, with_remote_parts
from flotilla.services.trainer.weights.parts import map_file, write_parts
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.services.trainer.worker.compute import ComputeCores
from flotilla.shared.checkpoints.folders import StoredCheckpoint, state_of
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site

log = logging.getLogger(__name__)

SEEN_SECONDS = 5.0
"""Within which a shared file system shows on one host what another has written."""


class Follower:
    """Obeys.

    Args:
        spec: the experiment.
        ranks: the job.
        channel: its end of the way from the leader.
        on_status: called with None when it can train, and with each trained step.
        on_devices: called with whether the ranks have their weights on their devices: before they load them, and once
            all have released them.
    """

    def __init__(
        self,
        spec: ExperimentSpec,
        ranks: Ranks,
        channel: Channel,
        on_status: Callable[[int | None], None] | None = None,
        on_devices: Callable[[bool], None] | None = None,
    ) -> None:
        self._spec, self._ranks, self._channel = spec, ranks, channel
        self._on_status, self._on_devices = on_status, on_devices
        self._cores = ComputeCores(spec.parallelism.threads)
        self._built: Learner | None = None
        self._memory: LearnerMemory | None = None

    def run(self) -> None:
        """Obey until the leader lets this rank go; what goes wrong, but for a model or disk, ends it and so the job."""
        with closing(self._cores):
            while not isinstance(command := self._channel.receive(), End):
                failure = None
                if self._on_devices is not None and isinstance(command, Restore | Reload):
                    self._on_devices(True)
                try:
                    with self._cores.computing():
                        self._obey(command)
                except ModelError as error:
                    if not isinstance(command, Restore | Find):
                        raise
                    failure = error
                except (OSError, SafetensorError) as error:
                    # The leader tries another checkpoint later, as where its own disk fails.
                    if not isinstance(command, Save):
                        raise
                    failure = ModelError(f"could not write its part: {error}")
                try:
                    self._channel.end(failure)
                except ModelError as error:
                    # The leader tries another checkpoint, or ends.
                    log.warning("a command failed on a rank", extra={"error": error.detail})
                    continue
                if self._on_status is not None and isinstance(command, Restore | Train):
                    self._on_status(command.step if isinstance(command, Train) else None)
                if self._on_devices is not None and isinstance(command, Offload):
                    self._on_devices(False)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Find):
            check_seen(Path(command.path), command.content)
            return
        if isinstance(command, Restore):
            # The memory of what a failed attempt left must be free.
            self._built = None
            self._built = build_shard(self._spec, _stored(command.path), self._ranks).learner
            self._cores.follow(self._built.policy.base)
            return
        assert self._built is not None
        learner = self._built
        if isinstance(command, Train):
            groups = self._channel.receive_groups(command.payload_bytes)
            hit(Site.TRAINER_STEP)
            path = None if command.bounds_path is None else Path(command.bounds_path)
            learner.sizes.follow([Bound(*each) for each in command.bounds], path)
            if command.learns:
                learner.train(groups, command.step)
            else:
                assert isinstance(learner, FinishedLearner)
                learner.measure(groups)
        elif isinstance(command, Follow):
            learner.follow(command.read())
        elif isinstance(command, KeepVersion):
            learner.keep_version(command.version, command.oldest)
        elif isinstance(command, Snapshot):
            assert isinstance(learner.weights, ShardedParameters)
            if self._ranks.is_remote:
                send_image(self._ranks, learner.weights)
            else:
                write_image(map_file(Path(command.path)), learner.weights, self._ranks)
            hit(Site.TRAINER_SNAPSHOT)
        elif isinstance(command, Save):
            paths = {name: Path(path) for name, path in command.paths.items()}
            write_shared(paths, shared_files(learner, command.contents), self._ranks)
            hit(Site.CHECKPOINT_COPY if command.is_copy else Site.CHECKPOINT_WRITE)
        elif isinstance(command, Offload):
            self._memory = LearnerMemory(learner, Path(command.directory))
            self._memory.offload()
        elif isinstance(command, Reload):
            assert self._memory is not None
            self._memory.reload()


def build_shard(spec: ExperimentSpec, stored: StoredCheckpoint | None, ranks: Ranks) -> Restored:
    """Make this rank's part of the learner.

    Raises:
        ModelError: model or checkpoint cannot be used.
    """
    if stored is None:
        return beginning(spec, ranks.device, ranks)
    return restored_from(spec, stored, ranks.device, ranks)


@torch.no_grad()
def write_image(mapped: mmap.mmap, weights: ShardedParameters, ranks: Ranks) -> None:
    """Write this rank's elements into an image; the leader also those of ranks of other hosts."""
    parts = with_remote_parts(ranks, weights.layout, mapped, weights.image_parts())
    write_parts(mapped, weights.layout, parts)


@torch.no_grad()
def send_image(ranks: Ranks, weights: ShardedParameters) -> None:
    """Send this rank's elements of an image to the leader."""
    send_parts(ranks, weights.layout, weights.image_parts())


def check_seen(path: Path, content: str) -> None:
    """Check that a file which the leader wrote is here, too.

    Raises:
        ModelError: it is not.
    """
    end = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            if path.read_text(encoding="utf-8") == content:
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise ModelError(
                f"{socket.gethostname()} does not see what another node writes into {path.parent}: with "
                "parallelism.nodes above 1 all trainers need the gateway's data directory on a file system that they "
                "share, under the same path"
            )
        time.sleep(SEEN_SECONDS / 50)


def hit(site: Site) -> None:
    """Let a fault happen here, if this process has one."""
    if (faults := armed()) is not None:
        faults.hit(site)


def _stored(path: str | None) -> StoredCheckpoint | None:
    if path is None:
        return None
    state = state_of(Path(path))
    if state is None:
        raise ModelError(f"checkpoint {path} is not complete")
    return StoredCheckpoint(state.step, Path(path), state)
