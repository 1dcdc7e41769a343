"""A trainer's publisher, a gateway and rollouts' receivers in one process, joined by the real transports."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI
from torch import nn

from flotilla.services.gateway.publications.negotiation import Opened, SendFailed, Sent
from flotilla.services.gateway.publications.transports import MOST_IN_GROUP
from flotilla.services.gateway.state import GatewayState
from flotilla.services.rollout.engines.scripted import ScriptedTransfer
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.services.trainer.worker.publisher import Publisher
from flotilla.shared.clock import SystemClock
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.publication import PublicationConfig
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.schemas.publication import Member, PublicationPhase, PublicationReport
from flotilla.shared.schemas.service import Capabilities, ObservedState, ServiceKind, WorkState
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.mapped.locate import ImageLocator
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.server import PublishedImages, weights_router
from tests.unit.gateway.builders import a_gateway, a_registration, a_spec, add_experiment

PHASE_SECONDS = 30.0
"""Of a publication where nobody fails: no slow machine comes near it."""
WIDTH = 512
"""Of a square layer: an image of 1 MB, which travels in several slices."""
SLICE_BYTES = 1 << 18
EXPERIMENT = "tiny-1"
SEEN = Capabilities(transports=("gloo", "pull", "relay"), shared_memory="here")
PUBLICATIONS = f"/v1/experiments/{EXPERIMENT}/publications"


class RecordingEngine:
    """Keeps the hash of every image that it was made to serve."""

    def __init__(self) -> None:
        self.served: dict[int, str] = {}

    def begin_transfer(self, image: Path, version: int) -> ScriptedTransfer:
        return ScriptedTransfer(image, version)

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        self.served[version] = hashlib.sha256(image.read_bytes()).hexdigest()


class ByHost(httpx.AsyncBaseTransport):
    """Leads each request to the app of the host that it names."""

    def __init__(self, hosts: dict[str, httpx.AsyncBaseTransport]) -> None:
        self._hosts = hosts
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        return await self._hosts[request.url.host].handle_async_request(request)


class DirectGateway:
    """The trainer's client of the gateway, without HTTP."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def call(self, method: str, path: str, *, body: Any = None, params: Any = None, **_: Any) -> Any:
        publications = self._state.publications
        words = path.removeprefix(PUBLICATIONS).strip("/").split("/")
        if words == [""]:
            trainer = self._state.registry.trainer_of(EXPERIMENT)
            assert trainer is not None
            return (await publications.announce(EXPERIMENT, trainer.id, body)).model_dump(mode="json")
        version, action = int(words[0]), words[-1] if len(words) > 1 else "show"
        if action == "show":
            wait = dict(params or {})
            phase = PublicationPhase(wait["phase"]) if "phase" in wait else None
            shown = await publications.get(
                EXPERIMENT, version, wait_seconds=wait.get("wait", 0.0), phase=phase, epoch=wait.get("epoch")
            )
            return shown.model_dump(mode="json")
        event = {
            "rendezvous": lambda: Opened(body),
            "sent": lambda: Sent(body["epoch"], body["checksum"]),
            "failed": lambda: SendFailed(body["epoch"], body["detail"]),
        }[action]()
        return (await publications.apply_to_version(EXPERIMENT, version, event)).model_dump(mode="json")


class Rollout:
    """A rollout's receiver with a recording engine; ``reports`` False makes it one that hears and says nothing."""

    def __init__(self, fleet: "Fleet", name: str, endpoint: EndpointClient) -> None:
        self.fleet, self.name, self.endpoint = fleet, name, endpoint
        self.engine, self.gate = RecordingEngine(), VersionGate()
        self.news = asyncio.Event()
        self.is_stalled = False
        self.service_id = ""
        self.pulls = 0
        self.reports: list[PublicationReport] = []
        self._published = PublishedImages(num_kept=1)
        app = FastAPI()
        app.include_router(weights_router(self._published, Credentials("token")))
        fleet.hosts[name] = httpx.ASGITransport(app=app)
        self.asking = ByHost(fleet.hosts)
        self._puller = WeightPuller(Credentials("token"), transport=self.asking)
        locate = ImageLocator(Credentials("token"), transport=ByHost(fleet.hosts))
        self.receiver = WeightReceiver(
            self.engine,  # type: ignore[arg-type]
            self.gate,
            endpoint,
            MissedVersions(self._pull, locate if fleet.config.may_map else None, relayed=self._puller.relayed),
            OnWeightUpdate.DRAIN,
            self.news.set,
            lambda error: None,
            published=self._published,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def _pull(self, *args: Any, **facts: Any) -> Path:
        path = await self._puller(*args, **facts)
        self.pulls += 1
        return path

    async def join(self) -> None:
        fleet = self.fleet.gateway.fleet
        registration = a_registration(ServiceKind.ROLLOUT, self.name, address=f"http://{self.name}", capabilities=SEEN)
        self.service_id = (await fleet.register(registration)).service_id
        registry = self.fleet.gateway.registry
        await registry.assign(registry.get(self.service_id), EXPERIMENT)
        self._tasks = [asyncio.create_task(self.receiver.run()), asyncio.create_task(self._follow())]
        # An engine begins with the initial weights only where there is nothing newer.
        await until(lambda: self.gate.version is not None)
        await self.settle()

    async def _follow(self) -> None:
        fleet, acknowledged = self.fleet.gateway.fleet, None
        with contextlib.suppress(FlotillaError):  # it was taken out
            while True:
                self.news.clear()
                observed = ObservedState(
                    acknowledged=acknowledged,
                    experiment_id=EXPERIMENT,
                    state=WorkState.RUNNING,
                    policy_version=self.gate.version,
                    **self.fleet.observe(self.receiver),
                )
                if observed.publication is not None and observed.publication not in self.reports:
                    self.reports.append(observed.publication)
                polling = asyncio.create_task(fleet.report(self.service_id, observed, 5.0, _stays))
                waiting = asyncio.create_task(self.news.wait())
                try:
                    await asyncio.wait({polling, waiting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                    if not polling.done():
                        polling.cancel()
                await asyncio.wait({polling})
                if polling.cancelled():
                    continue
                desired = polling.result()
                acknowledged = desired.tag
                while self.is_stalled:
                    await asyncio.sleep(0.005)
                self.receiver.take(desired)

    async def settle(self) -> None:
        """Have the gateway know what this rollout serves and holds."""
        self.news.set()
        registry = self.fleet.gateway.registry

        def is_known() -> bool:
            observed = registry.get(self.service_id).observed
            known = (observed.policy_version, observed.held_image)
            return known == (self.gate.version, self.receiver.held_image)

        await until(is_known)

    async def die(self) -> None:
        """End without a word, and have the gateway notice as it does: by the lease."""
        await self._stop()
        await self.fleet.gateway.fleet.leave(self.service_id, reason="the lease ended")

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.receiver.close()

    async def close(self) -> None:
        await self._stop()


class Fleet:
    """A gateway, a trainer of one layer, and rollouts."""

    def __init__(self, config: PublicationConfig, sender: EndpointClient, phase_seconds: float) -> None:
        self.config, self.sender = config, sender
        self.gateway = a_gateway(clock=SystemClock(), publication_seconds=phase_seconds)  # type: ignore[arg-type]
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.published = PublishedImages()
        self.app = FastAPI()
        self.app.include_router(weights_router(self.published, Credentials("token")))
        wire = getattr(torch, config.wire_dtype) if config.wire_dtype else None
        self.images = ImagePool(
            FlatParameters(self.layer, wire_dtype=wire), slice_bytes=SLICE_BYTES, delta=config.delta
        )
        self.hosts: dict[str, httpx.AsyncBaseTransport] = {"trainer": httpx.ASGITransport(app=self.app)}
        self.hashes: dict[int, str] = {}
        self.rollouts: list[Rollout] = []
        self.rows_to_train = WIDTH
        self.before_announcing: Callable[[int, Path], None] = lambda version, path: None
        self._held: list[WeightImage] = []

    def observe(self, receiver: WeightReceiver) -> dict[str, Any]:
        return {"publication": receiver.report, "held_image": receiver.held_image}

    async def start(self) -> None:
        document = self.config.model_dump(mode="json")
        spec = a_spec(asynchrony={"publication": document}).model_dump(mode="json")
        await add_experiment(self.gateway, EXPERIMENT, trainer_epoch=1, spec=spec)
        registration = a_registration(ServiceKind.TRAINER, "trainer", address="http://trainer", capabilities=SEEN)
        self.trainer_id = (await self.gateway.fleet.register(registration)).service_id
        await self.gateway.registry.assign(self.gateway.registry.get(self.trainer_id), EXPERIMENT)
        await self._trainer_reports()
        self.publisher = Publisher(
            DirectGateway(self.gateway),
            self.sender,
            self.images,
            experiment_id=EXPERIMENT,
            on_image=self._offer,
        )

    async def _trainer_reports(self) -> None:
        observed = ObservedState(experiment_id=EXPERIMENT, state=WorkState.RUNNING)
        await self.gateway.fleet.report(self.trainer_id, observed, 0.0, _stays)

    async def _offer(self, version: int, path: Path, checksum: str) -> None:
        image = WeightImage.attach(path)
        self._held.append(image)
        for old in self._held[:-2]:
            old.close()
        self._held = self._held[-2:]
        self.published.publish(version, path, checksum)
        self.hashes[version] = hashlib.sha256(path.read_bytes()).hexdigest()
        self.before_announcing(version, path)

    async def train_and_publish(self, version: int) -> None:
        """Change the weights of some rows, publish, and wait for the commit."""
        with torch.no_grad():
            self.layer.weight[: self.rows_to_train] += 1.0
        await self.publish(version)
        await self.publisher.settled()

    async def publish(self, version: int) -> None:
        await self.publisher.publish(version, version, asyncio.to_thread)

    async def keep_deadlines(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            await self.gateway.publications.check_deadlines()

    async def everybody_serves(self, version: int) -> None:
        """Wait until every rollout serves the version, with the very bytes that were published."""
        await until(lambda: all(rollout.gate.version == version for rollout in self.rollouts))
        for rollout in self.rollouts:
            assert rollout.engine.served[version] == self.hashes[version]

    def transports(self) -> set[str]:
        """Name the transports of the last publication's members."""
        return {member.transport.value for member in self.last_members()}

    def members(self) -> set[str]:
        """Name the services that are members of the last publication."""
        return {member.service_id for member in self.last_members()}

    def last_members(self) -> list[Member]:
        """List the members of the last publication."""
        newest = max(self.gateway.store._publications.values(), key=lambda record: record.version)  # type: ignore[attr-defined]
        return [Member.model_validate(member) for member in newest.members]

    async def close(self) -> None:
        await self.publisher.close()
        for rollout in self.rollouts:
            await rollout.close()
        self.images.close()
        for image in self._held:
            image.close()


@asynccontextmanager
async def a_fleet(
    config: PublicationConfig,
    endpoints: list[EndpointClient],
    num_rollouts: int,
    phase_seconds: float = PHASE_SECONDS,
    most_in_group: int = MOST_IN_GROUP,
) -> AsyncIterator[Fleet]:
    """Run a fleet; the first endpoint is the trainer's."""
    fleet = Fleet(config, endpoints[0], phase_seconds)
    fleet.gateway.publications.most_in_group = most_in_group
    await fleet.start()
    keeping = asyncio.create_task(fleet.keep_deadlines())
    try:
        for number in range(num_rollouts):
            await a_rollout(fleet, f"r{number}", endpoints[number + 1])
        yield fleet
    finally:
        await fleet.close()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def a_rollout(fleet: Fleet, name: str, endpoint: EndpointClient) -> Rollout:
    """Let a rollout join."""
    rollout = Rollout(fleet, name, endpoint)
    fleet.rollouts.append(rollout)
    await rollout.join()
    return rollout


async def until(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    """Wait for a state."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def _stays() -> asyncio.Future[Any]:
    """A caller that does not hang up."""
    return asyncio.get_running_loop().create_future()
