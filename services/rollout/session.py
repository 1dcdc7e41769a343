"""Opens and closes what a rollout service needs for one experiment: engine, weights, episodes, samples."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.answering import Answering, open_answering
from flotilla.services.rollout.consumer import RolloutConsumer
from flotilla.services.rollout.engines.base import Engine, OnEngineDeath
from flotilla.services.rollout.failed_samples import FailedSamples
from flotilla.services.rollout.loading import Loaded, load
from flotilla.services.rollout.task_source import TaskSource
from flotilla.services.rollout.tools.code_interpreter import Sandboxes
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.sources import WeightSources
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.locations.allowed import Places, check_agents, check_episodes
from flotilla.shared.samples.recorder import SampleRecorder
from flotilla.shared.schemas.service import Assignment


@dataclass
class RolloutSession:
    """See ``flotilla.services.rollout.service.Session``."""

    loaded: Loaded
    worker: RolloutConsumer
    receiver: WeightReceiver
    answering: Answering
    recorder: SampleRecorder | None = None

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self.loaded.engine

    @property
    def agents(self) -> AgentEpisodes | None:
        """The episodes that agents from outside ask for."""
        return self.answering.agents

    async def close(self) -> None:
        """End the engine and the endpoint, delete the images that it staged, and write samples that wait."""
        await self.receiver.close()
        await asyncio.gather(self.loaded.close(), self.answering.close())
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)


@dataclass(frozen=True, slots=True)
class SessionOpener:
    """Opens sessions.

    Attributes:
        tasks: where tasks are claimed.
        weights: where versions are found.
        host: address that this service is reached at.
        service_id: what the gateway calls this service.
        places: where code and programs of a spec may be, and its tools behind URLs.
        engine_pythons: interpreters that have an engine, by its kind.
        sandboxes: how the sandboxes of an experiment are reached, by its id.
        pool: of machines, which this service is in; None: it names none.
        shared: makes an experiment's part of an engine that others use, too, where it may have one; None: none has.
        gateway_url: where agents that are started here ask for episodes.
    """

    tasks: TaskSource
    weights: WeightSources
    host: str
    service_id: Callable[[], str]
    places: Places
    engine_pythons: Mapping[str, Path] = field(default_factory=dict)
    sandboxes: Callable[[str], Sandboxes] | None = None
    pool: str | None = None
    shared: Callable[[ExperimentSpec, str], Awaitable[Engine | None]] | None = None
    gateway_url: str = ""

    async def __call__(
        self,
        spec: ExperimentSpec,
        assignment: Assignment,
        notify: Callable[[], None],
        on_engine_death: OnEngineDeath,
    ) -> RolloutSession:
        """Load what the experiment needs; nothing of it is left where this fails.

        Raises:
            ModelError, Unavailable: as of ``load``.
            InvalidSpec: the engine is not one that this service can start, or code is where it runs none.
        """
        check_episodes(spec.rollout.episodes, self.places)
        check_agents(spec.rollout.agents, self.places)
        shared = None if self.shared is None else await self.shared(spec, assignment.experiment_id)
        loaded = await load(spec, self.engine_pythons, self.places, self.host, shared)
        try:
            return await self._open(loaded, spec, assignment, notify, on_engine_death)
        except BaseException:
            await loaded.close()
            raise

    async def _open(
        self,
        loaded: Loaded,
        spec: ExperimentSpec,
        assignment: Assignment,
        notify: Callable[[], None],
        on_engine_death: OnEngineDeath,
    ) -> RolloutSession:
        directory, experiment_id = Path(assignment.directory), assignment.experiment_id
        receiver = self.weights.receiver(
            loaded.engine, loaded.endpoint, spec.asynchrony, directory, notify, on_engine_death
        )
        answering = await open_answering(
            spec,
            loaded,
            assignment,
            self.tasks.mailbox(experiment_id),
            self.service_id,
            self.places.networks,
            None if self.sandboxes is None else self.sandboxes(experiment_id),
            self.gateway_url,
        )
        if answering.agents is not None and answering.agents.environment is not None:
            answering.agents.environment.notify = notify
        recorder = None
        if spec.samples is not None:
            recorder = SampleRecorder(directory, spec.samples, writer="rollout").start()
        failed = None if recorder is None else FailedSamples(recorder, loaded.renderer)
        lanes, most = self.tasks.lanes(spec, experiment_id), spec.reward.max_consecutive_failures
        worker = RolloutConsumer(
            lanes, answering.episodes, receiver.gate, on_engine_death, answering.tally, failed, most, self.service_id
        )
        worker.pool = self.pool
        return RolloutSession(loaded, worker, receiver, answering, recorder)
