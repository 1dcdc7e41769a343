"""Opens all that a rollout service needs for one experiment: what is loaded, weights, episodes, hops."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.engines.base import Engine
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.episodes_of import open_episodes
from flotilla.services.rollout.failed_samples import FailedSamples
from flotilla.services.rollout.loading import Loaded, load
from flotilla.services.rollout.tools.code_interpreter import Sandboxes
from flotilla.services.rollout.weights.missed import Locator, MissedVersions, Puller
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import WorkerDied
from flotilla.shared.locations.allowed import Places, check_episodes
from flotilla.shared.samples.recorder import SampleRecorder
from flotilla.shared.schemas.service import Assignment
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import Hop, HopName, StreamsConfig
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.weights.pull.kept_images import DIRECTORY as KEPT_IMAGES
from flotilla.shared.weights.pull.server import PublishedImages

SURPLUS = 1.25
"""Samples in work over the engine's slots, so that a slot that falls free is filled at once."""


@dataclass
class RolloutSession:
    """See ``flotilla.services.rollout.service.Session``."""

    loaded: Loaded
    gate: VersionGate
    worker: RolloutConsumer
    receiver: WeightReceiver
    close_episodes: Callable[[], Awaitable[None]]
    recorder: SampleRecorder | None = None
    agents: AgentEpisodes | None = None

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self.loaded.engine

    async def close(self) -> None:
        """End the engine and the endpoint, delete the images that it staged, and write samples that wait."""
        await self.receiver.close()
        await asyncio.gather(self.loaded.close(), self.close_episodes())
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)


@dataclass(frozen=True, slots=True)
class SessionOpener:
    """Opens sessions.

    Attributes:
        redis: the data plane's client; stays its owner's to close.
        holder: what this process is named as a claimer.
        streams: leases and deliveries.
        pull: fetches versions that were missed.
        locate: finds them in this host's shared memory.
        host: address that this service is reached at.
        service_id: what the gateway calls this service.
        engine_pythons: interpreters that have an engine, by its kind.
        places: where code and programs of a spec may be, and its tools behind URLs.
        sandboxes: how the sandboxes of an experiment are reached, by its id.
        published: where other rollouts get the images that this one keeps.
    """

    redis: Redis
    holder: str
    streams: StreamsConfig
    pull: Puller
    host: str
    service_id: Callable[[], str]
    places: Places
    engine_pythons: Mapping[str, Path] = field(default_factory=dict)
    sandboxes: Callable[[str], Sandboxes] | None = None
    published: PublishedImages | None = None
    locate: Locator | None = None

    async def __call__(
        self,
        spec: ExperimentSpec,
        assignment: Assignment,
        notify: Callable[[], None],
        on_engine_death: Callable[[WorkerDied], None],
    ) -> RolloutSession:
        """Load what the experiment needs; nothing of it is left where this fails.

        Raises:
            ModelError, Unavailable: as of ``load``.
            InvalidSpec: the engine is not one that this service can start, or code is where it runs none.
        """
        check_episodes(spec.rollout.episodes, self.places)
        loaded = await load(spec, self.engine_pythons, self.places.networks, self.host)
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
        on_engine_death: Callable[[WorkerDied], None],
    ) -> RolloutSession:
        engine, renderer = loaded.engine, loaded.renderer
        gate, publication = VersionGate(), spec.asynchrony.publication
        receiver = WeightReceiver(
            engine,
            gate,
            loaded.endpoint,
            MissedVersions(
                self.pull,
                self.locate if publication.may_map else None,
                Path(assignment.directory) / KEPT_IMAGES if publication.write_to_directory else None,
            ),
            spec.asynchrony.on_weight_update,
            notify,
            on_engine_death,
            published=self.published,
        )
        tally = SamplingTally(renderer.special_tokens())
        agents = self._agents(loaded, spec, assignment, tally) if spec.rollout.agents else None
        sandboxes = None if self.sandboxes is None else self.sandboxes(assignment.experiment_id)
        networks, turns = self.places.networks, Turns.of(spec)
        opened = await open_episodes(spec, engine, renderer, turns, tally, networks, sandboxes)
        episodes = agents or opened.episodes
        recorder = None
        if spec.samples is not None:
            recorder = SampleRecorder(Path(assignment.directory), spec.samples, writer="rollout").start()
        failed = None if recorder is None else FailedSamples(recorder, renderer)
        lanes, most = self._lanes(spec, assignment), spec.reward.max_consecutive_failures
        worker = RolloutConsumer(lanes, episodes, gate, on_engine_death, tally, failed, most)
        return RolloutSession(loaded, gate, worker, receiver, opened.close, recorder, agents)

    def _agents(
        self, loaded: Loaded, spec: ExperimentSpec, assignment: Assignment, tally: SamplingTally
    ) -> AgentEpisodes:
        chat = ChatTemplate(loaded.renderer)
        experiment_id = assignment.experiment_id
        mailbox = RedisDataPlane(self.redis, experiment_id, Lane.TRAIN, self.streams).mailbox
        return AgentEpisodes(loaded.engine, chat, spec, mailbox, lambda: f"{experiment_id}.{self.service_id()}", tally)

    def _lanes(self, spec: ExperimentSpec, assignment: Assignment) -> list[tuple[LaneConfig, Hop]]:
        sizes = {Lane.TRAIN: spec.rollout.group_size}
        if spec.evaluation is not None:
            sizes[Lane.EVALUATION] = spec.evaluation.group_size
        lanes: list[tuple[LaneConfig, Hop]] = []
        for lane, group_size in sizes.items():
            plane = RedisDataPlane(self.redis, assignment.experiment_id, lane, self.streams)
            max_groups = math.ceil(SURPLUS * spec.rollout.engine.slots / group_size)
            # What agents drive ends by times of its own, which begin when the first agent does.
            seconds = spec.rollout.task_seconds if spec.rollout.agents is None else None
            ends_old = lane is Lane.TRAIN and spec.asynchrony.redundant_groups > 0
            config = LaneConfig(lane.value, max_groups, seconds, spec.asynchrony.resolved_max_lag if ends_old else None)
            lanes.append((config, plane.hop(HopName.TASKS, self.holder)))
        return lanes
