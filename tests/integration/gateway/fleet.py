"""A fleet of scripted services that speak to a real gateway over HTTP and to a real Redis server.

They do what the real ones do, but for the tokens: rollouts answer with made-up trajectories, rewards grade by a rule,
the trainer plans, publishes and commits without a model.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.signals import end
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import ClaimLost, StalePolicyVersion
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.server.serving import address_of, bind
from flotilla.shared.schemas.publication import (
    Manifest,
    PublicationOrder,
    PublicationPhase,
    PublicationReport,
    PublicationRequest,
    ReceiveState,
    Rendezvous,
    TensorSpec,
)
from flotilla.shared.schemas.service import (
    LENT,
    Capabilities,
    DesiredState,
    DeviceReport,
    Failure,
    ObservedState,
    Registration,
    ServiceKind,
    WorkState,
)
from flotilla.shared.schemas.task import Lane
from flotilla.shared.service.membership import Membership
from flotilla.shared.streams.hop import HopName, StreamsConfig, holder_name
from flotilla.shared.streams.plans import Plan
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, graded

TOKEN = "token-of-the-tests"
PATIENCE_SECONDS = 90.0
"""How long anybody waits for what has to come: a process that is started beside other work takes its time."""


def a_spec(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a dataset and a model directory, and make a spec of two steps with two groups each."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    for name, count in (("train", 7), ("heldout", 3)):
        lines = [json.dumps({"prompt": f"{name} {n}?", "label": str(n)}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    spec: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model)},
        "data": {"path": str(folder / "train.jsonl")},
        "rollout": {"group_size": 2, "sampling": {"max_new_tokens": 8}},
        "reward": {"components": [{"kind": "numeric"}]},
        "optimisation": {"steps": 2, "groups_per_mini_batch": 2},
        "asynchrony": {"staleness_threshold": 0},
        "checkpoint": {"every_steps": 1},
    }
    return spec | changes


@asynccontextmanager
async def a_fleet(url: str, redis_url: str, *kinds: "type[Scripted]") -> AsyncIterator[list[Any]]:
    """Scripted services of these kinds."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(kind(url, redis_url)) for kind in kinds]


@asynccontextmanager
async def a_gateway(settings: GatewaySettings, port: int = 0) -> AsyncIterator[tuple[str, GatewayState]]:
    """Serve a gateway on a socket in this process."""
    app = create_app(settings)
    listening = bind("127.0.0.1", port)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started:
            assert not task.done(), "the gateway did not start"
            await asyncio.sleep(0.01)
        yield address_of(listening), app.state.gateway
    finally:
        server.should_exit = True
        await task


class Scripted:
    """A registered service that does nothing but its membership."""

    kind = ServiceKind.SANDBOX
    streams = StreamsConfig()
    pool: str | None = None

    def __init__(self, gateway_url: str, redis_url: str) -> None:
        self.client = GatewayClient(gateway_url, TOKEN)
        self.redis = connect(redis_url)
        self.desired: DesiredState | None = None
        self.state = WorkState.IDLE
        self.version: int | None = None
        self.step: int | None = None
        self.publication: PublicationReport | None = None
        self.failure: Failure | None = None
        self.experiment_id: str | None = None
        self.is_leaving = False
        incarnation = secrets.token_hex(8)
        self.holder = holder_name(self.kind, os.getpid(), incarnation)
        registration = Registration(
            kind=self.kind,
            address=f"http://127.0.0.1:9/{incarnation}",
            host=socket.gethostname(),
            pid=os.getpid(),
            capabilities=Capabilities(transports=("gloo",), live_changes=True, pool=self.pool),
            incarnation=incarnation,
        )
        self.membership = Membership(self.client, registration, self.observe, self.apply, poll_seconds=5.0)
        self._tasks: list[asyncio.Task[Any]] = []
        self._member: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        assert self.membership.service_id is not None
        return self.membership.service_id

    def observe(self) -> ObservedState:
        return ObservedState(
            experiment_id=self.experiment_id,
            state=self.state,
            policy_version=self.version,
            step=self.step,
            publication=self.publication,
            failure=self.failure,
            device=self.device(),
        )

    @property
    def may_compute(self) -> bool:
        """Whether it may use the devices that trainer and rollouts share in turns, if they do."""
        order = None if self.desired is None else self.desired.device
        return order is None or order.may_hold

    def device(self) -> DeviceReport | None:
        """Say what it has on shared devices."""
        return None

    async def apply(self, desired: DesiredState) -> None:
        self.desired = desired
        assigned = desired.assignment.experiment_id if desired.assignment else None
        if assigned != self.experiment_id:
            await self.cancel_work()
            self.experiment_id = assigned
            self.failure = None
            if assigned is not None and desired.assignment is not None:
                self.is_leaving = False
                self.begin(assigned)
        if desired.state is WorkState.DRAINING and assigned is not None:
            self.is_leaving = True
            await asyncio.gather(*self._tasks)
            self.state = WorkState.FINISHED
            return
        self.state = WorkState.IDLE if assigned is None else desired.state
        self.take(desired)

    def begin(self, experiment_id: str) -> None:
        """Start to work for an experiment."""

    def take(self, desired: DesiredState) -> None:
        """Take in whatever else is desired."""

    def start(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    def plane(self, lane: Lane) -> RedisDataPlane:
        assert self.experiment_id is not None
        return RedisDataPlane(self.redis, self.experiment_id, lane, self.streams)

    async def cancel_work(self) -> None:
        await end(*self._tasks)
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for result in done:
            if isinstance(result, Exception):
                raise result

    async def __aenter__(self) -> "Scripted":
        self._member = asyncio.create_task(self.membership.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._member is not None
        try:
            await self.cancel_work()  # before it leaves, at which what it has under way with the gateway would fail
        finally:
            await end(self._member)
            await self.cancel_work()
            await self.client.close()
            await self.redis.aclose()

    async def die(self) -> None:
        """Vanish without a word: the connection breaks, nothing is said."""
        assert self._member is not None
        self.membership.service_id = None
        await end(self._member)
        await self.cancel_work()


class ScriptedRollout(Scripted):
    """Answers tasks with made-up trajectories and takes publications."""

    kind = ServiceKind.ROLLOUT
    is_deaf = False
    """Whether it never joins a publication."""
    is_stuck = False
    """Whether it holds what it claims and never answers."""
    holds_tasks = False

    def device(self) -> DeviceReport | None:
        order = None if self.desired is None else self.desired.device
        return None if order is None else DeviceReport(shift=order.shift, is_held=order.may_hold)

    def begin(self, experiment_id: str) -> None:
        self.version = 0
        self.publication = None
        for lane in Lane:
            self.start(self.answer(self.plane(lane), lane))

    def take(self, desired: DesiredState) -> None:
        order = desired.publication
        if order is not None and order.rendezvous is not None and not self.is_deaf:
            self.publication = self.report_on(order)
        if desired.policy_version is not None and self.version is not None:
            held = desired.hold_version if desired.hold_version is not None else desired.policy_version
            self.version = max(self.version, min(held, desired.policy_version))

    def report_on(self, order: PublicationOrder) -> PublicationReport:
        is_sent = order.phase is PublicationPhase.TRANSFERRING
        return PublicationReport(
            version=order.version,
            epoch=order.epoch,
            state=ReceiveState.RECEIVED if is_sent else ReceiveState.JOINED,
            checksum=order.manifest.checksum if is_sent else None,
        )

    async def answer(self, plane: RedisDataPlane, lane: Lane) -> None:
        hop = plane.hop(HopName.TASKS, self.holder)
        while not self.is_leaving:
            if not self.may_compute:
                await asyncio.sleep(0.02)
                continue
            for claim in await hop.claim(4, wait_seconds=0.2):
                task = claim.task()
                self.holds_tasks = self.is_stuck
                while self.is_stuck or self.state is not WorkState.RUNNING or (self.version or 0) < task.min_version:
                    if self.is_leaving or not self.may_compute:
                        break
                    await asyncio.sleep(0.01)
                if (self.version or 0) < task.min_version or not self.may_compute:
                    assert await hop.hand_back(claim)
                    continue
                if task.pinned_version not in {None, self.version}:
                    # As a rollout does (``consumer.py``): whether the version is ever served is the gateway's affair.
                    await asyncio.sleep(0.2)
                    await hop.hand_back(claim)
                    continue
                await hop.forward(claim, a_group(task, version=self.version))


class LentRollout(ScriptedRollout):
    """Has no engine before it has had the trainer's devices."""

    pool = LENT

    def begin(self, experiment_id: str) -> None:
        super().begin(experiment_id)
        self.version = None

    def take(self, desired: DesiredState) -> None:
        if self.version is None and desired.device is not None and desired.device.may_hold:
            self.version = 0
        super().take(desired)


class ScriptedReward(Scripted):
    """Grades the first answer of each group as right and the others as wrong."""

    kind = ServiceKind.REWARD

    def begin(self, experiment_id: str) -> None:
        for lane in Lane:
            self.start(self.grade(self.plane(lane)))

    async def grade(self, plane: RedisDataPlane) -> None:
        hop = plane.hop(HopName.GENERATED, self.holder)
        while not self.is_leaving:
            for claim in await hop.claim(4, wait_seconds=0.2):
                group = claim.group()
                rewards = [1.0] + [0.0] * (group.task.group_size - 1)
                await hop.forward(claim, graded(group, rewards))


class ScriptedTrainer(Scripted):
    """Plans, publishes after each step, commits, and reports that it has finished."""

    kind = ServiceKind.TRAINER

    def __init__(self, gateway_url: str, redis_url: str) -> None:
        super().__init__(gateway_url, redis_url)
        self.trained: list[tuple[int, ...]] = []
        self.lags: list[int] = []
        self.token: str | None = None
        self.step_seconds = 0.0
        self.versions_ahead = 0
        """Of its steps: a trainer that takes over gives new numbers to weights whose own were given out before."""
        self.waits_before: int | None = None
        """Step that is not begun while this stands."""
        self.turns: list[int] = []
        """Shifts in which it trained, where it takes turns with the rollouts."""
        self._is_wanted = self._is_held = False

    def device(self) -> DeviceReport | None:
        order = None if self.desired is None else self.desired.device
        if order is None:
            return None
        return DeviceReport(shift=order.shift, is_held=self._is_held, is_wanted=self._is_wanted)

    async def take_turn(self) -> None:
        """Wait for the devices, where they are shared in turns."""
        self._is_wanted = True
        self.membership.notify()
        while not self.may_compute:
            await asyncio.sleep(0.01)
        self._is_held = True
        if self.desired is not None and self.desired.device is not None:
            self.turns.append(self.desired.device.shift)

    def end_turn(self) -> None:
        """Give the devices back."""
        self._is_wanted = self._is_held = False
        self.membership.notify()

    def begin(self, experiment_id: str) -> None:
        self.step = 0
        self._is_wanted = self._is_held = False
        assert self.desired is not None and self.desired.assignment is not None
        self.token = self.desired.assignment.token
        self.start(self.train(experiment_id))

    async def train(self, experiment_id: str) -> None:
        assert self.desired is not None and self.desired.assignment is not None
        spec = self.desired.assignment.spec
        queue = self.plane(Lane.TRAIN).trainer(self.id)
        await queue.take_over(self.desired.assignment.trainer_epoch)
        try:
            await self._steps(experiment_id, queue, spec)
        except ClaimLost:
            return
        while self.desired is not None and self.state is not WorkState.IDLE:
            self.state = WorkState.FINISHED
            self.membership.notify()
            await asyncio.sleep(0.2)

    async def _steps(self, experiment_id: str, queue: Any, spec: Any) -> None:
        assert self.step is not None
        size = spec["optimisation"]["groups_per_mini_batch"]
        done = set[int]()
        # A checkpoint follows each step here, so the lineage says where to go on.
        while (before := await queue.lineage(self.step + 1)) is not None:
            done |= set(before.group_ids)
            self.step += 1
        while self.step < spec["optimisation"]["steps"]:
            step, version = self.step + 1, self.step + self.versions_ahead
            while step == self.waits_before:
                await asyncio.sleep(0.02)
            plan = await queue.load_plan(step)
            if plan is None:
                plan = await self._planned(queue, step, version, size, done)
            done |= set(plan.group_ids)
            await self.take_turn()
            await asyncio.sleep(self.step_seconds)
            await self.publish(experiment_id, version + 1, step)
            await self._commit(queue, step)
            await queue.record([plan])
            self.step, self.version = step, version + 1
            body = {"step": step, "version": version + 1, "values": self.figures(step)}
            await self._call("POST", f"/v1/experiments/{experiment_id}/metrics", body=body)
            self.end_turn()
        # What was trained and has not come again would end as dropped.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await self.plane(Lane.TRAIN).ledger()).trained < len(done):
                await self._commit(queue, self.step)
                for claim in await queue.hop.claim(size, wait_seconds=0.2):
                    is_done = claim.header.group_id in done
                    await (queue.resolve_already_trained(claim) if is_done else queue.hop.hand_back(claim))

    async def _commit(self, queue: Any, until: int) -> None:
        """Make steps final: all whose plans stand, since the server may have forgotten that some were."""
        await queue.commit([plan.step for plan in await queue.plans_from(0) if plan.step <= until])

    async def _planned(self, queue: Any, step: int, version: int, size: int, done: set[int]) -> Plan:
        """Plan a step as a trainer does (``source.py``): a server that has lost the end of its log delivers again what
        is held here, and what was trained.
        """
        ready: dict[int, Any] = {}
        while True:
            while len(ready) < size:
                for claim in await queue.hop.claim(size - len(ready), wait_seconds=0.2):
                    if claim.header.group_id in done:
                        await queue.resolve_already_trained(claim)
                    else:
                        ready[claim.header.group_id] = claim
            claims = list(ready.values())
            if await queue.plan(step, claims, version):
                self.trained.append(tuple(ready))
                self.lags += [version - claim.header.oldest_version for claim in claims]
                return Plan.of(step, claims, version)
            lost = {claim.header.group_id for claim in await queue.hop.renew(claims)}
            for group_id in lost or list(ready):
                del ready[group_id]

    def figures(self, step: int) -> dict[str, float]:
        """What it reports of a step."""
        return {"loss": 1.0 / step}

    async def publish(self, experiment_id: str, version: int, step: int) -> None:
        path = f"/v1/experiments/{experiment_id}/publications"
        request = PublicationRequest(manifest=a_manifest(version), step=step)
        try:
            answer = await self._call("POST", path, body=request)
        except StalePolicyVersion:
            return
        opened = 0
        while answer["phase"] in {"preparing", "transferring"}:
            epoch = answer["epoch"]
            if answer["rendezvous"] is None:
                opened += 1
                meeting = Rendezvous(host="127.0.0.1", port=1000, epoch=epoch, world_size=len(answer["members"]) + 1)
                answer = await self._call("PUT", f"{path}/{version}/rendezvous", body=meeting)
                continue
            params = {"wait": 5, "phase": answer["phase"], "epoch": epoch}
            answer = await self._call("GET", f"{path}/{version}", params=params)
        assert answer["phase"] == "committed", answer

    async def _call(self, method: str, path: str, **how: Any) -> Any:
        assert self.token is not None, "it is assigned"
        return await self.client.call(method, path, token=self.token, deadline_seconds=PATIENCE_SECONDS, **how)


def a_manifest(version: int) -> Manifest:
    tensor = TensorSpec(name="w", shape=(1,), dtype="F32", start=0, end=4)
    return Manifest(version=version, image_bytes=4, slice_bytes=4, checksum=f"{version:016x}", tensors=(tensor,))


async def until(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait for a state; its value is returned."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)
