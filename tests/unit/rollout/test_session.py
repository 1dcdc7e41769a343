"""What a session that cannot be opened leaves behind."""

from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from flotilla.services.rollout import session as sessions
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.loading import Loaded
from flotilla.services.rollout.session import SessionOpener
from flotilla.services.rollout.task_source import TaskSource
from flotilla.services.rollout.weights.missed import Puller
from flotilla.services.rollout.weights.sources import WeightSources
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.service import Assignment
from flotilla.shared.streams.hop import StreamsConfig
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from tests.unit.gateway.builders import a_spec
from tests.unit.rollout.test_rendering import renderer_of


class CountingEngine(ScriptedEngine):
    num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1
        await super().close()


async def test_an_engine_is_ended_where_the_episodes_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CountingEngine()
    await engine.start()

    async def load(*_: object) -> Loaded:
        return Loaded(engine, EndpointClient(), renderer_of("qwen 3"))

    async def fail(*_: object) -> None:
        raise InvalidSpec("there is no such environment")

    monkeypatch.setattr(sessions, "load", load)
    monkeypatch.setattr(sessions, "open_answering", fail)
    tasks, weights = TaskSource(Redis(), "rollout", StreamsConfig()), WeightSources(cast(Puller, None))
    opener = SessionOpener(tasks, weights, "127.0.0.1", lambda: "rollout-1", Places())
    assignment = Assignment.model_construct(experiment_id="e", directory=str(tmp_path))

    with pytest.raises(InvalidSpec, match="no such environment"):
        await opener(a_spec(), assignment, lambda: None, lambda error: None)

    assert engine.num_closed == 1
