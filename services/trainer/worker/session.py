"""Everything that training one experiment needs: opened in order, closed in reverse."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flotilla.services.trainer.checkpoint.manager import Build, CheckpointManager, build_alone
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.data.plan import StepPlanner
from flotilla.services.trainer.data.source import GroupSource, ReadVersion, requirements_of
from flotilla.services.trainer.worker.checkpoint_policy import CheckpointPolicy, CheckpointWriter
from flotilla.services.trainer.worker.compute import Company, ComputeThread, compute_thread
from flotilla.services.trainer.worker.control import RunControl
from flotilla.services.trainer.worker.device_shift import DeviceShift
from flotilla.services.trainer.worker.execution import Job, Memory, open_execution
from flotilla.services.trainer.worker.held_out import open_held_out
from flotilla.services.trainer.worker.images import ImagePool, Snapshots
from flotilla.services.trainer.worker.loop import TrainingLoop
from flotilla.services.trainer.worker.publisher import Publisher
from flotilla.services.trainer.worker.reporter import Reporter
from flotilla.services.trainer.worker.samples import StepSamples, from_threads, open_samples
from flotilla.services.trainer.worker.takeover import become_trainer, reconcile_with
from flotilla.shared.checkpoints.folders import CHECKPOINTS
from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.models.hub import fetched
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import Failure
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.weights.group.endpoint_client import EndpointClient

UNSENT = "unsent_metrics.jsonl"
OFFLOADED = "offloaded"
"""Folder of the file that takes what leaves a CPU's memory; it has no name there."""


@dataclass(frozen=True)
class SessionDeps:
    """What a session is opened in.

    Attributes:
        experiment_id, service_id: of this session.
        directory: the experiment's.
        incarnation: number of this trainer; None lets the data plane choose.
        gateway, endpoint, plane: the three planes.
        image_directory: where snapshots lie; None chooses shared memory.
        on_image: offers the image of a version to be pulled.
        on_failure: called with the failure of a checkpoint that is retried, and with None after a success.
        on_sample_failure: likewise of samples that cannot be kept.
        on_profile_failure: likewise of a step that could not be profiled.
        job: of several ranks, which this process leads; None for a process alone.
        on_device: called when there is something new to report of the device.
        on_device_failure: called with why the device cannot be released for now, and with None when it could.
        source_version: reads the newest version of the experiment whose groups are trained; None where it is this one.
        company: what it has in common with other sessions of this process; None: there are none.
    """

    experiment_id: str
    service_id: str
    directory: Path
    incarnation: int | None
    gateway: GatewayClient
    endpoint: EndpointClient
    plane: DataPlane
    on_image: Callable[[int, Path, str], Awaitable[None]]
    on_failure: Callable[[Failure | None], None]
    image_directory: Path | None = None
    on_sample_failure: Callable[[Failure | None], None] = lambda _: None
    on_profile_failure: Callable[[Failure | None], None] = lambda _: None
    job: Job | None = None
    on_device: Callable[[], None] = lambda: None
    on_device_failure: Callable[[Failure | None], None] = lambda _: None
    source_version: ReadVersion | None = None
    company: Company | None = None

    @property
    def build(self) -> Build:
        """What makes a learner where one rank does."""
        return build_alone if self.company is None else partial(build_alone, share=self.company.bases.model)


@dataclass(frozen=True)
class Session:
    """A loop that is ready to run, and what must run beside it."""

    loop: TrainingLoop
    source: GroupSource
    publisher: Publisher
    reporter: Reporter
    device: DeviceShift
    durability: CheckpointPolicy
    compute: ComputeThread

    async def run(self) -> bool:
        """Train; True when the last step is done. A failure of anything beside the loop ends it, too."""
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self.source.run(), name="group source"),
                tasks.create_task(self.reporter.run(), name="reporter"),
                tasks.create_task(self.publisher.watch(), name="publisher"),
                tasks.create_task(self.durability.run(), name="checkpoints"),
            ]
            try:
                is_finished = await self.loop.run()
                await self.reporter.flush(FLUSH_SECONDS)
            finally:
                for task in beside:
                    task.cancel()
        return is_finished


FLUSH_SECONDS = 2.0


@contextlib.asynccontextmanager
async def open_session(spec: ExperimentSpec, around: SessionDeps, control: RunControl) -> AsyncIterator[Session]:
    """Take over the experiment, load model and checkpoint, and put the loop together.

    Raises:
        FlotillaError: the spec, the model or the checkpoint cannot be used, or a later trainer took over.
        ToldToEnd: ``control`` was stopped before it could take over.
    """
    await fetched(spec.model)
    for model in other_models(spec).values():
        await fetched(model)
    queue = around.plane.trainer(around.service_id)
    # Before the checkpoint is read: an earlier trainer, if it still lives, commits nothing from here on.
    await become_trainer(queue, around.gateway, around.experiment_id, around.incarnation)
    async with contextlib.AsyncExitStack() as stack:
        opened = open_samples(around.directory, spec.samples, around.on_sample_failure)
        recorder = await stack.enter_async_context(opened)
        computing = compute_thread(spec, around.experiment_id, around.company, lambda: control.is_stopped)
        compute = await stack.enter_async_context(computing)
        loop = asyncio.get_running_loop()
        checkpoints = around.directory / CHECKPOINTS
        opening = open_execution(spec, around.job, compute, checkpoints, around.build)
        execution = await stack.enter_async_context(opening)
        storage = CheckpointStorage(checkpoints, keep=spec.checkpoint.keep, best=spec.checkpoint.best)
        manager = CheckpointManager(around.experiment_id, storage, execution.build, execution.fill, execution.copy)
        restored = await loop.run_in_executor(compute, partial(manager.restore, spec))
        learner, progress = restored.learner, restored.progress
        compute.cores.follow(learner.policy.base)
        learner.sizes.keep(around.directory)
        learner.on_profile_failure = from_threads("profiler", around.on_profile_failure)
        line, live = await reconcile_with(
            queue, around.plane.admission, around.gateway, spec, restored, around.experiment_id, control
        )
        samples = StepSamples(recorder)
        if recorder is not None:
            recorder.forget(after_step=progress.step, lost=line.lost)
            recorder.keep_spec(spec.model_dump_json())
        images = _images(spec, around, execution.snapshots(learner))
        reporter = Reporter(around.gateway, around.experiment_id, around.directory / UNSENT)
        reporter.resend(progress.step)
        needed = requirements_of(spec, learner.loaded.vocabulary, getattr(learner.policy.routing, "sizes", None))
        ended, theirs = samples.ended, around.source_version
        source = GroupSource(queue, needed, progress.trained, progress.totals, line, ended, theirs)
        publisher = _publisher(around, images)
        writer = CheckpointWriter(manager, learner, progress, line, source, reporter, compute, around.on_failure)
        durability = CheckpointPolicy(spec.checkpoint, writer, learner, progress, line, queue)
        planner = StepPlanner(spec, queue, around.plane.admission, source, line, live)
        trained = execution.learner(learner)
        device = _device(around, execution.memory(learner, around.directory / OFFLOADED), compute)
        held_out = await open_held_out(trained, around.gateway, around.experiment_id)
        stack.callback(images.close)
        stack.push_async_callback(publisher.close)
        await durability.begin()
        training = TrainingLoop(
            trained, planner, publisher, durability, reporter, control, compute, samples, held_out, device
        )
        yield Session(training, source, publisher, reporter, device, durability, compute)


def _images(spec: ExperimentSpec, around: SessionDeps, weights: Snapshots) -> ImagePool:
    how = spec.asynchrony.publication
    served_as = None if spec.model.dtype == "auto" else getattr(torch, spec.model.dtype)
    return ImagePool(
        weights,
        directory=around.image_directory,
        slice_bytes=spec.slice_bytes,
        delta=how.delta,
        served_as=served_as,
        quantisation=how.quantisation,
        base=spec.model,
    )


def _device(around: SessionDeps, memory: Memory, compute: Executor) -> DeviceShift:
    async def moved(move: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(compute, move)

    return DeviceShift(
        partial(moved, memory.offload), partial(moved, memory.reload), around.on_device, around.on_device_failure
    )


def _publisher(around: SessionDeps, images: ImagePool) -> Publisher:
    return Publisher(
        around.gateway,
        around.endpoint,
        images,
        experiment_id=around.experiment_id,
        on_image=around.on_image,
    )
