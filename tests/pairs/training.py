"""A trainer's part of a run, without its services: steps, versions, images, checkpoints, and turns on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flotilla.services.trainer.checkpoint.manager import CheckpointManager
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.worker.held_out import Measures
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import NO_VERSION, Group
from flotilla.shared.streams.plans import Plan
from flotilla.shared.testing.builders import a_task
from tests.unit.trainer.builders import a_trajectory, uneven_groups

LENGTHS = ([7], [3, 4, 6], [20], [1, 2, 5])


@dataclass
class Figures:
    """What each step gave, by its number.

    Attributes:
        metrics: as they are reported.
        images: checksum of what each published step's engines are sent.
    """

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    images: dict[int, str] = field(default_factory=dict)


class Training:
    """Trains as a trainer's loop does, from a checkpoint where there is one.

    Args:
        spec: of the experiment.
        manager: of its checkpoints.
        directory: for what leaves the device between two steps.
        takes_turns: whether the learner leaves its device after each step.
    """

    def __init__(
        self, spec: ExperimentSpec, manager: CheckpointManager, directory: Path, *, takes_turns: bool = False
    ) -> None:
        self.spec, self.manager = spec, manager
        restored = manager.restore(spec)
        self.learner, self.progress = restored.learner, restored.progress
        self.line = VersionLine.of(
            [INITIAL], steps_per_version=spec.steps_per_version, total_steps=spec.optimisation.steps
        )
        publication = spec.asynchrony.publication
        self.images = ImagePool(self.learner.weights, directory=directory, delta=publication.delta)
        self.memory = LearnerMemory(self.learner, directory) if takes_turns else None
        self.figures = Figures()

    def train_to(self, last: int) -> None:
        """Train up to a step, and publish where that makes a version."""
        while self.progress.step < last:
            step = self.progress.step + 1
            groups = groups_of(self.spec, step, self.line)
            self.figures.metrics[step] = dict(self.learner.train(groups, step).metrics)
            self.progress.add(_plan(step, self.line.at(step - 1), len(groups)))
            if isinstance(self.learner, Measures):
                self.figures.metrics[step] |= self.learner.measure(groups_of(self.spec, 0, self.line))
            if self.line.is_published(step):
                self._publish(step)
            if self.memory is not None:
                self.memory.offload()
                self.memory.reload()

    def _publish(self, step: int) -> None:
        version = self.line.at(step)
        self.learner.keep_version(version, self.line.oldest_allowed(version, self.spec.asynchrony.resolved_max_lag))
        path = self.images.snapshot()
        manifest = self.images.manifest(path, version)
        self.images.acknowledge(path, manifest)
        self.figures.images[step] = manifest.checksum

    def save(self) -> None:
        """Write a checkpoint as the spec says."""
        if not self.spec.checkpoint.asynchronous:
            self.manager.save(self.learner, self.progress, self.line)
            return
        copied = self.manager.copy(self.learner, self.progress, self.line)
        assert copied is not None, "a small model has room"
        self.manager.write(copied)

    def state(self) -> dict[str, torch.Tensor]:
        """Copy all that the learner keeps, by name."""
        learner = self.learner
        kept = {f"weight/{name}": each for name, each in learner.loaded.model.state_dict().items()}
        kept |= {f"optimiser/{name}": each for name, each in learner.optimizer.state().items()}
        if learner.critic is not None:
            kept |= {f"critic/{name}": each for name, each in learner.critic.state().items()}
        if learner.average is not None:
            kept |= {f"average/{name}": each for name, each in learner.average.state().items()}
        if learner.versions is not None:
            kept |= {f"versions/{name}": each for name, each in learner.versions.state().items()}
        if learner.kl_coefficient is not None:
            kept["kl"] = torch.tensor(learner.kl_coefficient, dtype=torch.float64)
        return {name: each.detach().clone() for name, each in kept.items()}

    def close(self) -> None:
        """Remove the images."""
        self.images.close()


def _plan(step: int, version: int, count: int) -> Plan:
    return Plan(
        step=step,
        version=version,
        group_ids=tuple(range(count * (step - 1), count * step)),
        entry_ids=(),
        oldest_version=0,
        newest_version=version,
        token_count=0,
        token_counts=(),
    )


def groups_of(spec: ExperimentSpec, step: int, line: VersionLine) -> list[Group]:
    """Make the groups of a step; those of step 0 are held out."""
    if spec.finished_job is None:
        return _sampled(spec, step, line)
    size = 1 if spec.job.kind in {"sft", "kto"} else 2
    return [
        Group(
            a_task(number, group_size=size),
            tuple(
                a_trajectory(
                    4, LENGTHS[(number + each) % 4], 1.0 - each, seed=97 * step + 7 * number + each, version=NO_VERSION
                )
                for each in range(size)
            ),
        )
        for number in range(spec.groups_per_step)
    ]


def _sampled(spec: ExperimentSpec, step: int, line: VersionLine) -> list[Group]:
    """Let answers begin under the oldest version that may be trained, and end under the newest."""
    newest = line.at(step - 1)
    oldest = max(0, line.oldest_allowed(newest, min(1, spec.asynchrony.resolved_max_lag)))
    groups = uneven_groups(spec.groups_per_step, seed=step)
    return [
        replace(
            group,
            trajectories=tuple(
                replace(each, versions=_spans(len(each.token_ids), oldest, newest)) for each in group.trajectories
            ),
        )
        for group in groups
    ]


def _spans(length: int, oldest: int, newest: int) -> Sequence[tuple[int, int]]:
    return ((0, newest),) if oldest == newest else ((0, oldest), (length // 2, newest))
