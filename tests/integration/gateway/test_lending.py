"""A trainer lends its devices while it waits; whoever dies or stops meanwhile, every group is accounted for."""

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.registry.shifts import holder_of
from flotilla.services.gateway.scheduler.lending import GENERATED
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import LENT, DeviceReport, ObservedState, ServiceKind, WorkState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group
from tests.integration.gateway.fleet import TOKEN, ScriptedReward, ScriptedRollout, ScriptedTrainer, a_spec, until
from tests.integration.gateway.test_faults import GatewayProcess, started, wait_for

pytestmark = pytest.mark.long

GROUPS = 4
TASK_SECONDS = 0.05
ALONE_SECONDS = 0.75
"""Of a task at the rollout with devices of its own: a step waits so long for its groups that devices change hands
meanwhile, on a loaded machine too."""


class SlowRollout(ScriptedRollout):
    """Answers one task at a time, and hands back what it has when the devices are taken away."""

    keeps_devices = False
    """Whether it does not release them."""
    task_seconds = ALONE_SECONDS
    answered = handed_back = 0

    def device(self) -> DeviceReport | None:
        told = super().device()
        return told.model_copy(update={"is_held": True}) if told is not None and self.keeps_devices else told

    async def answer(self, plane: RedisDataPlane, lane: Lane) -> None:
        hop = plane.hop(HopName.TASKS, self.holder)
        while not self.is_leaving:
            if not self.may_compute or self.state is not WorkState.RUNNING:
                await asyncio.sleep(0.01)
                continue
            for claim in await hop.claim(1, wait_seconds=0.05):
                loop, task = asyncio.get_running_loop(), claim.task()
                end = loop.time() + self.task_seconds
                while self.may_compute and (loop.time() < end or (self.version or 0) < task.min_version):
                    await asyncio.sleep(0.01)
                if self.may_compute:
                    self.answered += 1
                    await hop.forward(claim, a_group(task, version=self.version))
                else:
                    self.handed_back += 1
                    await hop.hand_back(claim)


class LentRollout(SlowRollout):
    pool, task_seconds = LENT, TASK_SECONDS

    def observe(self) -> ObservedState:
        return super().observe().model_copy(update={"load": {GENERATED: float(self.answered)}})


class LendingTrainer(ScriptedTrainer):
    """Reports that it waits for most of its time, and for half as long where its devices were lent."""

    was_lent = keeps_devices = False
    num_lent = 0

    def device(self) -> DeviceReport | None:
        told = super().device()
        return told.model_copy(update={"is_held": True}) if told is not None and self.keeps_devices else told

    async def take_turn(self) -> None:
        self.was_lent = not self.may_compute
        self.num_lent += self.was_lent
        await super().take_turn()

    def figures(self, step: int) -> dict[str, float]:
        lent = {"time/lent_seconds": 0.4, "time/device_seconds": 0.05} if self.was_lent else {}
        waited = 0.5 if lent else 1.0
        return {"time/step_seconds": waited + 0.1, "time/wait_seconds": waited} | lent


@dataclass
class Lent:
    """A gateway in a process of its own, and scripted services around it."""

    process: GatewayProcess
    redis_url: str
    stack: AsyncExitStack
    client: GatewayClient
    path: str = ""
    trainers: list[LendingTrainer] = field(default_factory=list)
    lent: list[LentRollout] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    @property
    def trainer(self) -> LendingTrainer:
        return self.trainers[-1]

    async def join(self, kind: type[Any], members: list[Any]) -> None:
        members.append(await self.stack.enter_async_context(kind(self.process.url, self.redis_url)))

    async def until_lent(self) -> None:
        """Wait until the lent rollout samples on the trainer's devices, in a shift that has begun since."""
        answered = self.lent[-1].answered
        try:
            await until(lambda: self.lent[-1].answered > answered and self.lent[-1].may_compute)
        except TimeoutError:
            pytest.fail(f"nothing is lent: {await self.told()}")

    async def is_exact_after(self, num_steps: int) -> None:
        """Check the ledger now, and again some steps later."""
        step = self.trainer.step or 0
        await until(lambda: (self.trainer.step or 0) >= step + num_steps)
        ledger = (await self.client.call("GET", f"{self.path}/ledger"))["train"]
        assert ledger["balanced"]

    async def says(self, words: str) -> bool:
        return words in await self.told()

    async def told(self) -> str:
        [share] = (await self.client.call("GET", "/v1/fleet"))["experiments"]
        return str(share["lending"])


async def pause(fleet: Lent) -> None:
    await fleet.client.call("POST", f"{fleet.path}/pause")
    await wait_for(fleet.client, fleet.path, "paused")
    await fleet.client.call("POST", f"{fleet.path}/resume")


async def lent_rollout_dies(fleet: Lent) -> None:
    await fleet.lent[-1].die()
    await fleet.join(LentRollout, fleet.lent)


async def trainer_dies(fleet: Lent) -> None:
    await fleet.join(LendingTrainer, fleet.trainers)
    await fleet.trainers[-2].die()
    await until(lambda: fleet.trainer.experiment_id is not None)


async def gateway_dies(fleet: Lent) -> None:
    fleet.process.end(signal.SIGKILL)
    fleet.process.start()
    await fleet.process.ready(fleet.client)


async def shift_is(fleet: Lent, holder: ServiceKind) -> None:
    """Wait until it is somebody's turn, whether the others have released the devices or not."""

    def is_it() -> bool:
        order = None if fleet.trainer.desired is None else fleet.trainer.desired.device
        return order is not None and holder_of(order.shift) is holder

    await until(is_it)


async def gateway_dies_while_devices_go_back(fleet: Lent) -> None:
    fleet.lent[-1].keeps_devices = True
    await shift_is(fleet, ServiceKind.TRAINER)
    await gateway_dies(fleet)
    assert not fleet.trainer.may_compute
    fleet.lent[-1].keeps_devices = False
    fleet.lent[-1].membership.notify()


async def gateway_dies_while_devices_are_given(fleet: Lent) -> None:
    await shift_is(fleet, ServiceKind.TRAINER)
    fleet.trainer.keeps_devices = True
    await shift_is(fleet, ServiceKind.ROLLOUT)
    await gateway_dies(fleet)
    assert not fleet.lent[-1].may_compute
    fleet.trainer.keeps_devices = False
    fleet.trainer.membership.notify()


FAULTS = (
    pause,
    lent_rollout_dies,
    trainer_dies,
    gateway_dies,
    gateway_dies_while_devices_go_back,
    gateway_dies_while_devices_are_given,
)


async def test_whoever_dies_or_pauses_while_devices_are_lent_no_group_is_lost_or_trained_twice(
    settings: GatewaySettings, redis_url: str, tmp_path: Path
) -> None:
    spec = a_spec(
        tmp_path,
        rollout={"group_size": 2, "sampling": {"max_new_tokens": 8}, "engine": {"threads": 1}},
        optimisation={"steps": 100_000, "groups_per_mini_batch": GROUPS},
        asynchrony={"staleness_threshold": 1.0},  # so that it samples when the trainer has a step's groups
        resources={"lending": {"over_steps": 2}},
    )
    process = GatewayProcess(settings)
    process.start()
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(GatewayClient(process.url, TOKEN))
            await process.ready(client)
            fleet = Lent(process, redis_url, stack, client)
            for kind, members in (
                (SlowRollout, fleet.others),
                (ScriptedReward, fleet.others),
                (LendingTrainer, fleet.trainers),
                (LentRollout, fleet.lent),
            ):
                await fleet.join(kind, members)
            fleet.path = await started(client, spec)

            for fault in FAULTS:
                print(fault.__name__)
                await fleet.until_lent()
                await fault(fleet)
                await fleet.is_exact_after(2)

            await fleet.until_lent()
            assert "has the trainer's devices" in await fleet.told() or "the trainer has" in await fleet.told()
            fleet.lent[-1].task_seconds = 1000.0  # as where each shift ends before an engine has its weights
            await until(lambda: fleet.says("nothing was sampled there"))
            await client.call("POST", f"{fleet.path}/stop")
            await wait_for(client, fleet.path, "stopped")
            ledger = (await client.call("GET", f"{fleet.path}/ledger"))["train"]
            await until(lambda: fleet.lent[-1].experiment_id is None)
    finally:
        assert process.end(signal.SIGTERM) == 0
    assert ledger["balanced"] and ledger["outstanding"] == 0
    groups = [group for trainer in fleet.trainers for step in trainer.trained for group in step]
    assert len(groups) == len(set(groups)), "none is trained twice"
    assert ledger["failed"] == {} or not sum(ledger["failed"].values())
    assert fleet.trainer.num_lent > 0
    assert sum(each.answered for each in fleet.lent) > 0
    assert sum(each.handed_back for each in fleet.lent) > 0
