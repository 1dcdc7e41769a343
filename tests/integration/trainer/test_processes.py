"""The supervisor with real worker processes, a real Redis and a gateway on a socket."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from fastapi import FastAPI, Request

from flotilla.services.trainer.supervisor.process import WorkerHandle
from flotilla.services.trainer.supervisor.served_images import ServedImages
from flotilla.services.trainer.supervisor.supervisor import Addresses, StartWorker, Supervisor
from flotilla.shared.checkpoints.takeover import TakeoverRequest
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import NotFound
from flotilla.shared.net.server.serving import add_problem_handlers, bind
from flotilla.shared.schemas.experiment import CheckpointView, MetricBatch
from flotilla.shared.schemas.publication import PublicationRequest
from flotilla.shared.schemas.service import Assignment, DesiredState, WorkState
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.pull.server import PublishedImages
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_spec, save_tiny_model

pytestmark = pytest.mark.slow

BODIES = {
    "publications": PublicationRequest,
    "metrics": MetricBatch,
    "checkpoints": CheckpointView,
    "takeovers": TakeoverRequest,
}
START_SECONDS = 120.0


def gateway_app(gateway: YesGateway) -> FastAPI:
    app = FastAPI()
    add_problem_handlers(app)

    @app.post("/v1/experiments/{experiment_id}/{kind}")
    async def post(kind: str, request: Request) -> Any:
        assert request.headers["authorization"] == "Bearer secret"
        return await gateway.call("POST", f"/{kind}", body=BODIES[kind].model_validate_json(await request.body()))

    return app


class Rig:
    """A supervisor that is told its desired state by the test."""

    def __init__(
        self, supervisor: Supervisor, plane: RedisDataPlane, gateway: YesGateway, fleet: ScriptedFleet
    ) -> None:
        self.supervisor, self.plane, self.gateway, self.fleet = supervisor, plane, gateway, fleet

    async def desire(self, state: WorkState, assignment: Assignment | None) -> None:
        await self.supervisor.apply(DesiredState(tag=state.value, state=state, assignment=assignment))

    async def until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                failure = self.supervisor.observe().failure
                assert failure is None or not failure.fatal, failure
                await asyncio.sleep(0.02)

    @property
    def state(self) -> WorkState:
        return self.supervisor.observe().state

    @property
    def step(self) -> int:
        return self.supervisor.observe().step or 0

    def worker(self) -> psutil.Process:
        [found] = [p for p in psutil.Process().children() if "flotilla.services.trainer.worker" in p.cmdline()]
        return found


async def offered(published: PublishedImages, version: int) -> WeightImage:
    """Open a version's image: the worker's word to its supervisor may come a moment after the announcement."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                return (await published.open(version))[0]
            except NotFound:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def a_rig(
    redis_url: str, spec: ExperimentSpec, experiment_id: str, start_worker: StartWorker = WorkerHandle.start
) -> AsyncIterator[Rig]:
    redis = connect(redis_url)
    plane = RedisDataPlane(redis, experiment_id)
    published = PublishedImages()

    class Pulled(YesGateway):
        async def call(self, method: str, path: str, **arguments: Any) -> Any:
            body = arguments.get("body")
            if isinstance(body, PublicationRequest) and body.manifest.version > self.version:
                with await offered(published, body.manifest.version) as image:
                    self.images[body.manifest.version] = bytes(image.view)
            return await super().call(method, path, **arguments)

    gateway = Pulled(plane)
    gateway.spec = spec
    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(gateway_app(gateway), log_config=None, lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    host, port = listening.getsockname()
    addresses = Addresses(f"http://{host}:{port}", redis_url, "127.0.0.1", "WARNING", "json")
    supervisor = Supervisor(addresses, ServedImages(published), lambda: "trainer-1", start_worker)
    fleet = ScriptedFleet(spec, plane, gateway)
    tasks = [asyncio.create_task(server._serve([listening])), asyncio.create_task(supervisor.run())]
    tasks.append(asyncio.create_task(fleet.run()))
    try:
        yield Rig(supervisor, plane, gateway, fleet)
    finally:
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await plane.remove()
        await redis.aclose()


def an_assignment(spec: ExperimentSpec, experiment_id: str, directory: Path) -> Assignment:
    return Assignment(
        experiment_id=experiment_id,
        revision=1,
        spec=spec.model_dump(mode="json"),
        directory=str(directory),
        trainer_epoch=1,
        token="secret",
    )


def new_id() -> str:
    return f"e-{uuid.uuid4().hex[:8]}"


async def test_a_killed_worker_is_replaced_and_nothing_is_lost(redis_url: str, tmp_path: Path) -> None:
    spec = a_spec(
        save_tiny_model(tmp_path / "model"),
        optimisation={"steps": 12, "groups_per_mini_batch": 2},
        checkpoint={"every_steps": 5},
    )
    name = new_id()

    async with a_rig(redis_url, spec, name) as rig:
        rig.fleet.ends_before = 16  # the worker cannot end before it is killed
        await rig.desire(WorkState.RUNNING, an_assignment(spec, name, tmp_path))
        await rig.until(lambda: rig.step >= 7)
        rig.worker().send_signal(signal.SIGKILL)
        rig.fleet.ends_before = None
        await rig.until(lambda: rig.supervisor.observe().failure is not None)
        failure = rig.supervisor.observe().failure
        await rig.until(lambda: rig.state is WorkState.FINISHED)
        finished = rig.supervisor.observe()
        ledger = await rig.plane.ledger()

        assert failure is not None
        assert "SIGKILL" in failure.cause
        assert (finished.step, finished.policy_version) == (12, 12)
        assert ledger.balanced
        assert (ledger.trained, ledger.planned) == (24, 0)
        assert rig.gateway.published == list(range(1, 13))
        assert sorted(rig.gateway.metrics) == list(range(1, 13))
        assert finished.failure is None


@pytest.mark.long
async def test_pause_resume_and_stop(redis_url: str, tmp_path: Path) -> None:
    spec = a_spec(
        save_tiny_model(tmp_path / "model"),
        optimisation={"steps": 10_000, "groups_per_mini_batch": 2},
        checkpoint={"every_steps": 5000},
    )
    name = new_id()

    async with a_rig(redis_url, spec, name) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment(spec, name, tmp_path))
        await rig.until(lambda: rig.step >= 2)
        await rig.desire(WorkState.PAUSED, an_assignment(spec, name, tmp_path))
        await rig.until(lambda: rig.state is WorkState.PAUSED)
        paused_at = rig.step
        await asyncio.sleep(1.5)
        assert rig.step == paused_at
        await rig.desire(WorkState.RUNNING, an_assignment(spec, name, tmp_path))
        await rig.until(lambda: rig.step > paused_at)
        worker = rig.worker()
        await rig.desire(WorkState.IDLE, None)
        await rig.until(lambda: rig.state is WorkState.IDLE)
        ledger = await rig.plane.ledger()

        assert not worker.is_running()
        assert ledger.planned == 0, "what was trained is in a checkpoint"
        assert ledger.trained >= 2 * paused_at


async def test_a_model_that_is_not_there_fails_at_once_in_one_sentence(redis_url: str, tmp_path: Path) -> None:
    good = a_spec(save_tiny_model(tmp_path / "model"))
    spec = a_spec(tmp_path / "nothing")
    name = new_id()

    async with a_rig(redis_url, good, name) as rig:
        await rig.desire(WorkState.RUNNING, an_assignment(spec, name, tmp_path))
        async with asyncio.timeout(START_SECONDS):
            while rig.state is not WorkState.FAILED:
                await asyncio.sleep(0.02)

        failure = rig.supervisor.observe().failure
        assert failure is not None
        assert failure.fatal
        assert failure.cause == f"model directory {tmp_path}/nothing does not exist"


def test_a_worker_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-m', 'flotilla.services.trainer.worker'], stdin=subprocess.PIPE)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    killer = threading.Timer(150, parent.kill)
    killer.start()
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        worker.wait(timeout=120)
    finally:
        killer.cancel()
        parent.kill()
        parent.wait()
        parent.stdout.close()
