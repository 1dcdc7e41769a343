"""A rollout goes on when the server at its URL goes away and comes back with its first weights."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flotilla.services.rollout.service as rollout_service
from flotilla.services.rollout import consumer
from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.engines.servers import connection
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.service import RolloutService
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import WorkerDied
from flotilla.shared.schemas.service import Assignment, DesiredState, WorkState
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.service import reconciling
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_group, a_task
from tests.contract.engine.fake_server import weights_in
from tests.contract.engine.models import make_model, save_image, save_model
from tests.contract.engine.served import Port, served
from tests.contract.engine.test_attached import KINDS, Kind, a_server, check_versions, sample, settings_of

SPEC = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "reward": {"components": [{"kind": "numeric"}]},
    "optimisation": {"steps": 3},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (connection, "POLL_SECONDS"),
        (rollout_service, "FIRST_PAUSE_SECONDS"),
        (reconciling, "FIRST_PAUSE_SECONDS"),
        (reconciling, "LONGEST_PAUSE_SECONDS"),
        (consumer, "UNAVAILABLE_PAUSE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.01)


class Episodes:
    """Samples one completion for each task, and keeps it."""

    def __init__(self, engine: ServerEngine, done: list[Completion]) -> None:
        self._engine = engine
        self._done = done

    async def run(self, task: Task, partials: object, serving: int, *, delivery: str) -> Group:
        completion = await sample(self._engine)
        self._done.append(completion)
        return a_group(task, version=serving)


class Session:
    """An engine, a consumer, and a receiver that has version 1 loaded first, as one that catches up."""

    held_image = report = agents = served = refusal = None
    switches = 0

    def __init__(self, engine: ServerEngine, image: Path, plane: MemoryDataPlane, done: list[Completion], died: Any):
        self.engine, self.gate, self.receiver = engine, VersionGate(), self
        self._image, self._died = image, died
        lanes = [(LaneConfig("train", 4, 5.0), plane.hop(HopName.TASKS, "rollout"))]
        self.worker = RolloutConsumer(lanes, Episodes(engine, done), self.gate, died)  # type: ignore[arg-type]

    @property
    def version(self) -> int | None:
        return self.gate.version

    async def run(self) -> None:
        try:
            await self.engine.load_weights(self._image, 1, OnWeightUpdate.DRAIN)
        except WorkerDied as error:
            self._died(error)
            return
        await self.gate.set(1)
        await asyncio.Event().wait()

    def take(self, desired: DesiredState) -> None:
        return None

    async def close(self) -> None:
        await self.engine.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_rollout_outlives_its_server_and_samples_by_the_current_version_alone(
    kind: Kind, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_model("qwen3", model)
    (tmp_path / "image").mkdir()
    image = save_image(make_model("qwen3", seed=1), tmp_path / "image" / "model.safetensors")
    plane, done = MemoryDataPlane(), list[Completion]()

    async def open_session(spec: ExperimentSpec, assignment: Assignment, notify: object, died: object) -> Session:
        engine = kind.engine(settings_of(model, port.url))
        await engine.start()
        return Session(engine, image, plane, done, died)

    async def generated(count: int) -> Ledger:
        async with asyncio.timeout(20):
            while (ledger := await plane.ledger()).waiting.generated < count:
                await asyncio.sleep(0.005)
        assert ledger.balanced
        return ledger

    async with served(a_server(kind, model)) as port:
        service = RolloutService(open_session)  # type: ignore[arg-type]
        running = asyncio.create_task(service.run())
        assignment = Assignment(experiment_id="e1", revision=1, spec=SPEC, directory="/data")
        await service.apply(DesiredState(tag="1", state=WorkState.RUNNING, assignment=assignment))
        await plane.admission.issue_many([a_task(number) for number in range(10)], limit=1000)
        await generated(10)

        for label in ("default", "1"):
            await restart_while_it_works(port, kind, model, label, plane, service)

        ledger = await generated(30)
        assert (ledger.failed, ledger.dropped) == ({}, {})
        assert service.observe().failure is None
        running.cancel()
        await asyncio.wait([running])
    weights = {1: weights_in(image.parent)}
    assert len(done) >= 30
    for completion in done:
        assert completion.versions == ((0, 1),)
        check_versions(completion, weights)


async def restart_while_it_works(
    port: Port, kind: Kind, model: Path, label: str, plane: MemoryDataPlane, service: RolloutService
) -> None:
    """Kill the server, let it be missed, and start it with its first weights, which its owner calls as he likes."""
    first = (await plane.ledger()).issued
    await port.kill()
    await plane.admission.issue_many([a_task(first + number) for number in range(10)], limit=1000)

    def is_missed() -> bool:
        failure = service.observe().failure
        return failure is not None and not failure.fatal and "cannot be reached now: start it" in failure.cause

    await until(is_missed)
    await port.start(a_server(kind, model, label))
