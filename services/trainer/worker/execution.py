"""How the loop's work is executed: by this process alone, or by the ranks of a job under its lead."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flotilla.services.trainer.checkpoint.host_copy import HostCopy
from flotilla.services.trainer.checkpoint.manager import Build, Contents, Restored, build_alone, copy_alone, fill_alone
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.models.memory import check_room
from flotilla.services.trainer.parallel.commands import Opening
from flotilla.services.trainer.parallel.job import OPENING, Place, entered
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.weights.sharded_parameters import StreamedParameters
from flotilla.services.trainer.worker.control import ToldToEnd
from flotilla.services.trainer.worker.images import Snapshots
from flotilla.services.trainer.worker.leader import Leader
from flotilla.services.trainer.worker.loop import StepLearner
from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.config.spec import ExperimentSpec


@dataclass(frozen=True)
class Job:
    """The job that this process leads.

    Attributes:
        place: its place.
        opening: sent to the followers before anything else.
        on_silence: called on another thread with the rank that has ended.
    """

    place: Place
    opening: Opening
    on_silence: Callable[[str], None]


class Memory(Protocol):
    """What a learner has on its device; see ``LearnerMemory``."""

    def offload(self) -> None:
        """Free it; blocks."""

    def reload(self) -> None:
        """Take it again; blocks."""


class Execution(Protocol):
    """All that touches weights; every call blocks."""

    def build(self, spec: ExperimentSpec, stored: StoredCheckpoint | None) -> Restored:
        """Make the learner, from a checkpoint or the spec's model."""

    def fill(self, learner: Learner, directory: Path, contents: Contents) -> None:
        """Write the files of a checkpoint."""

    def copy(self, learner: Learner, contents: Contents) -> HostCopy | None:
        """Copy what they hold into the host's memory; None where that is too small."""

    def learner(self, learner: Learner) -> StepLearner:
        """Return what trains."""

    def snapshots(self, learner: Learner) -> Snapshots:
        """Return what writes images."""

    def memory(self, learner: Learner, directory: Path) -> Memory:
        """Return what moves weights and optimiser off the device and back."""


class SingleRank:
    """This process has all weights.

    Args:
        build: makes a learner.
    """

    def __init__(self, build: Build = build_alone) -> None:
        self._build = build

    def build(self, spec: ExperimentSpec, stored: StoredCheckpoint | None) -> Restored:
        """Make the learner, from a checkpoint or the spec's model."""
        return self._build(spec, stored)

    def fill(self, learner: Learner, directory: Path, contents: Contents) -> None:
        """Write the files of a checkpoint."""
        fill_alone(learner, directory, contents)

    def copy(self, learner: Learner, contents: Contents) -> HostCopy | None:
        """Copy what they hold into the host's memory; None where that is too small."""
        return copy_alone(learner, contents)

    def learner(self, learner: Learner) -> StepLearner:
        """Return what trains."""
        return learner

    def snapshots(self, learner: Learner) -> Snapshots:
        """Return what writes images."""
        assert isinstance(learner.weights, FlatParameters | StreamedParameters)
        return learner.weights

    def memory(self, learner: Learner, directory: Path) -> LearnerMemory:
        """Return what moves weights and optimiser off the device and back."""
        return LearnerMemory(learner, directory)


@contextlib.asynccontextmanager
async def open_execution(
    spec: ExperimentSpec, job: Job | None, compute: Executor, directory: Path, build: Build = build_alone
) -> AsyncIterator[Execution]:
    """Form the group of a job's ranks on the thread that computes; let the followers go unless it failed.

    Args:
        spec: the experiment.
        job: that this process leads; None for a process alone.
        compute: the thread.
        directory: of the checkpoints, which all ranks read.
        build: makes the learner of a process alone.

    Raises:
        ModelError: a rank does not see that directory, or the model cannot be trained in the memory that there is.
        Unavailable: not in what is available now.
    """
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(compute, check_room, spec)
    if job is None:
        yield SingleRank(build)
        return
    store = await loop.run_in_executor(compute, job.place.store)
    await loop.run_in_executor(compute, store.set, OPENING, job.opening.model_dump_json())
    group = entered(job.place, store, spec.parallelism, job.on_silence)
    ranks, channel = await loop.run_in_executor(compute, group.__enter__)
    leader = Leader(ranks, channel)
    await loop.run_in_executor(compute, leader.check_shared, directory)

    async def let_go() -> None:
        await loop.run_in_executor(compute, leader.close)
        await loop.run_in_executor(compute, group.__exit__, None, None, None)

    try:
        yield leader
    except ToldToEnd:
        await let_go()
        raise
    await let_go()
