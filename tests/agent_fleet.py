"""A gateway and rollouts with scripted engines in this process, behind real sockets: what agents talk to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from flotilla.agents.episodes import Play, play_all
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.reward.grading import grading_samples
from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.services.rollout.agents.environment import Door, EnvironmentAgent
from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.routes import episodes_router
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.clock import SystemClock
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import LOOPBACK
from flotilla.shared.net.authorisation.tokens import bearer_of
from flotilla.shared.net.server.serving import add_problem_handlers, address_of, bind
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.schemas.task import Lane, Message
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.builders import a_task
from flotilla.shared.testing.characters import END, CharacterTokenizer
from tests.unit.gateway.builders import a_gateway, a_record, a_registration, say
from tests.unit.rollout.agents.world import Writes, engine_that

TOKEN = "the-fleets-token"
EXPERIMENT = "agents-1"


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """Serve an app on a loopback port; return its address."""
    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.01)
        yield address_of(listening)
    finally:
        server.should_exit = True
        await task


class Rollout:
    """One rollout for agents.

    Args:
        fleet: that it belongs to.
        name: of its process.
    """

    def __init__(self, fleet: "AgentFleet", name: str) -> None:
        self._fleet = fleet
        self._name = name
        self.service_id = ""
        self.engine: ScriptedEngine = engine_that(fleet.writes, **fleet.engine)
        template = ChatTemplate(ChatRenderer(CharacterTokenizer(), (END,)))
        prefix = lambda: f"{EXPERIMENT}.{self.service_id}"  # noqa: E731
        self.episodes = AgentEpisodes(self.engine, template, fleet.spec, fleet.plane.mailbox, prefix)
        self.gate = VersionGate()
        lanes = [
            (LaneConfig(lane.value, fleet.max_groups, None), plane.hop(HopName.TASKS, name))
            for lane, plane in fleet.planes.items()
        ]
        self.consumer = RolloutConsumer(lanes, self.episodes, self.gate, lambda _: None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rollout"]:
        gateway = self._fleet.gateway
        app = FastAPI()
        add_problem_handlers(app)
        token = gateway.tokens.peer_of(ServiceKind.ROLLOUT)
        app.include_router(episodes_router(lambda *_: self.episodes, lambda header: bearer_of(header) == token))
        await self.engine.start()
        await self.gate.set(0)
        self.consumer.resume()
        consuming = asyncio.create_task(self.consumer.run())
        async with served(app) as self.address:
            registration = a_registration(ServiceKind.ROLLOUT, self._name, address=self.address)
            self.service_id = (await gateway.fleet.register(registration)).service_id
            await gateway.registry.assign(gateway.registry.get(self.service_id), EXPERIMENT)
            await self.report()
            try:
                yield self
            finally:
                consuming.cancel()
                await asyncio.gather(consuming, return_exceptions=True)
                await self.engine.close()

    async def report(self) -> None:
        """Say to the gateway how it is."""
        load = self.episodes.to_load()
        observed = ObservedState(experiment_id=EXPERIMENT, state=WorkState.RUNNING, policy_version=0, load=load)
        await say(self._fleet.gateway, self.service_id, observed)


class AgentFleet:
    """All of it.

    Attributes:
        url: of the gateway.
        gateway: its state.
    """

    def __init__(
        self, spec: ExperimentSpec, writes: Writes, planes: dict[Lane, DataPlane], max_groups: int, **engine: Any
    ) -> None:
        self.spec = spec
        self.writes = writes
        self.planes = planes
        self.plane = planes[Lane.TRAIN]
        self.max_groups = max_groups
        self.engine = engine
        self.rollouts: list[Rollout] = []
        self.url = ""
        self.gateway: GatewayState

    @asynccontextmanager
    async def running(self, num_rollouts: int, planes: Callable[..., DataPlane]) -> AsyncIterator["AgentFleet"]:
        self.gateway = a_gateway(clock=SystemClock(), planes=planes, token=TOKEN)  # type: ignore[arg-type]
        record = a_record(EXPERIMENT, spec=self.spec.model_dump(mode="json"), state=ExperimentState.RUNNING)
        await self.gateway.repository.add(record, self.spec)
        settings = GatewaySettings(token=TOKEN, redis_url="redis://nowhere", data=self.gateway.settings.data)
        app = create_app(settings)

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"state": {"gateway": self.gateway}}, receive, send)

        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.gateway.episodes.rollouts.aclose)
            self.url = await stack.enter_async_context(served(with_state))  # type: ignore[arg-type]
            for number in range(num_rollouts):
                await self.add_rollout(stack, f"r{number}")
            yield self

    async def add_rollout(self, stack: AsyncExitStack, name: str) -> Rollout:
        rollout = Rollout(self, name)
        self.rollouts.append(await stack.enter_async_context(rollout.running()))
        return rollout

    async def issue(self, count: int) -> None:
        size = self.spec.rollout.group_size
        first = await self.plane.admission.next_group_id()
        tasks = [a_task(number, group_size=size) for number in range(first, first + count)]
        await self.plane.admission.issue_many(tasks, limit=1_000_000)

    async def until(self, condition: Callable[[Ledger], bool], seconds: float = 20.0) -> Ledger:
        async with asyncio.timeout(seconds):
            while True:
                ledger = await self.plane.ledger()
                assert ledger.balanced
                if condition(ledger):
                    return ledger
                await asyncio.sleep(0.01)

    async def groups(self) -> list[Group]:
        hop = self.plane.hop(HopName.GENERATED, "reward")
        return [claim.group() for claim in await hop.claim(10_000, wait_seconds=0)]

    def counts(self) -> dict[str, int]:
        """Sum the episodes of all rollouts."""
        loads = [rollout.episodes.counts.to_load() for rollout in self.rollouts]
        return {name: int(sum(load[name] for load in loads)) for name in loads[0]}


@asynccontextmanager
async def agent_fleet(
    spec: ExperimentSpec,
    writes: Writes = lambda _prompt: "yes~",
    *,
    num_rollouts: int = 1,
    max_groups: int = 64,
    **engine: Any,
) -> AsyncIterator[AgentFleet]:
    """Run a fleet whose data plane is in memory."""
    from tests.unit.gateway.builders import MemoryPlanes

    planes = MemoryPlanes()
    lanes: dict[Lane, DataPlane] = {lane: planes(EXPERIMENT, lane) for lane in Lane}
    fleet = AgentFleet(spec, writes, lanes, max_groups, **engine)
    async with fleet.running(num_rollouts, planes):
        yield fleet


async def begin(fleet: AgentFleet, client: httpx.AsyncClient, wait_seconds: float = 10.0) -> dict[str, Any]:
    """Begin an episode with the fleet's token."""
    answer = await client.post(
        f"{fleet.url}/v1/experiments/{EXPERIMENT}/episodes",
        json={"wait_seconds": wait_seconds},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def play_rows(fleet: AgentFleet, play: Play, rows: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    """Play an episode for each member of each row's group; return the rewards as the reward service grades them."""
    await issue_rows(fleet, rows)
    playing = asyncio.create_task(play_all(fleet.url, EXPERIMENT, TOKEN, play, parallel=4))
    try:
        await _while_it_runs(playing, fleet.until(lambda ledger: ledger.waiting.generated == len(rows), 120.0))
        await fleet.gateway.commands.fail(fleet.gateway.repository.get(EXPERIMENT), "test", "it is over")
        assert await playing >= len(rows)
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    return await rewards_of(fleet)


async def play_named(fleet: AgentFleet, rows: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    """Do the same with the agent that the spec's environment names, as a rollout starts and ends it."""
    agents = fleet.spec.rollout.agents
    assert agents is not None and agents.environment is not None
    door = Door(fleet.url, EXPERIMENT, fleet.gateway.tokens.agent_of(EXPERIMENT), LOOPBACK)
    agent = EnvironmentAgent(agents.environment, door, lambda: fleet.counts()["episodes_completed"])
    said = list[str | None]()
    agent.notify = lambda: said.append(None if agent.failure is None else agent.failure.cause)
    await issue_rows(fleet, rows)
    running = asyncio.create_task(agent.run())
    try:
        await _while_it_runs(running, fleet.until(lambda ledger: ledger.waiting.generated == len(rows), 120.0))
    except TimeoutError:
        raise AssertionError(said) from None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not said, said
    return await rewards_of(fleet)


async def _while_it_runs(task: asyncio.Task[Any], what: Coroutine[Any, Any, Any]) -> None:
    """Wait for something, and no longer than a task runs that must not end before."""
    waiting = asyncio.create_task(what)
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await task
        await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def issue_rows(fleet: AgentFleet, rows: Sequence[Mapping[str, Any]]) -> None:
    """Issue a task for each row."""
    tasks = [
        a_task(
            number,
            group_size=fleet.spec.rollout.group_size,
            messages=tuple(Message(**each) for each in row["prompt"]),
            metadata={name: value for name, value in row.items() if name != "prompt"},
        )
        for number, row in enumerate(rows)
    ]
    await fleet.plane.admission.issue_many(tasks, limit=1000)


async def rewards_of(fleet: AgentFleet) -> list[list[float | None]]:
    """Grade what was generated as the reward service does."""
    groups = sorted(await fleet.groups(), key=lambda group: group.task.group_id)
    verifier = AgentVerifier(fleet.plane.mailbox)
    return [[grade.reward for grade in await verifier.score(grading_samples(group))] for group in groups]
