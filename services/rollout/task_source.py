"""Where a rollout service claims an experiment's tasks: the lanes of the data plane, and how much of each."""

import math
from dataclasses import dataclass

from redis.asyncio import Redis

from flotilla.services.rollout.consumer import LaneConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import Hop, HopName, StreamsConfig
from flotilla.shared.streams.mailbox import Mailbox
from flotilla.shared.streams.redis.plane import RedisDataPlane

SURPLUS = 1.25
"""Samples in work over the engine's slots, so that a slot that falls free is filled at once."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The data plane, as this process claims from it.

    Attributes:
        redis: the data plane's client; stays its owner's to close.
        holder: what this process is named as a claimer.
        streams: leases and deliveries.
    """

    redis: Redis
    holder: str
    streams: StreamsConfig

    def lanes(self, spec: ExperimentSpec, experiment_id: str) -> list[tuple[LaneConfig, Hop]]:
        """List the lanes that are worked for: training, and evaluation where there is one."""
        sizes = {Lane.TRAIN: spec.rollout.group_size}
        if spec.evaluation is not None:
            sizes[Lane.EVALUATION] = spec.evaluation.group_size
        lanes: list[tuple[LaneConfig, Hop]] = []
        for lane, group_size in sizes.items():
            max_groups = math.ceil(SURPLUS * spec.rollout.engine.slots / group_size)
            # What agents drive ends by times of its own, which begin when the first agent does.
            seconds = spec.rollout.task_seconds if spec.rollout.agents is None else None
            ends_old = lane is Lane.TRAIN and spec.asynchrony.redundant_groups > 0
            config = LaneConfig(lane.value, max_groups, seconds, spec.asynchrony.resolved_max_lag if ends_old else None)
            lanes.append((config, self._plane(experiment_id, lane).hop(HopName.TASKS, self.holder)))
        return lanes

    def mailbox(self, experiment_id: str) -> Mailbox:
        """Open where rewards of agents are left that come after an episode's end."""
        return self._plane(experiment_id, Lane.TRAIN).mailbox

    def _plane(self, experiment_id: str, lane: Lane) -> RedisDataPlane:
        return RedisDataPlane(self.redis, experiment_id, lane, self.streams)
