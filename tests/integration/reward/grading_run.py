"""Grading by a grader that fails: a reward service's consumer, rollouts that are never the bottleneck, and a trainer.

The grader is a process of its own and fails in a share of its calls, at once or by callbacks through
a real gateway. The trainer takes so many groups a step and a fixed time for it. Every reward that would be trained is
compared with what the grader holds right, so a false zero cannot hide.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.reward.consumer import RewardConsumer, RewardLane
from flotilla.services.reward.remote import Callbacks, RemoteVerifier
from flotilla.services.trainer.data.batch import scored_trajectories
from flotilla.shared.clock import SystemClock
from flotilla.shared.config.sections.reward import RemoteConfig, RewardConfig
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_group, a_task
from tests.agent_fleet import EXPERIMENT, TOKEN, served
from tests.integration.reward.faulty_grader import SECRET, worth
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, a_record
from tests.unit.rollout.agents.world import a_spec

GROUP_SIZE, GROUPS_OF_A_STEP, STEP_SECONDS = 4, 8, 0.4
BUDGET = 96
"""Groups between the feeder and the trainer, as a staleness threshold allows them."""
ANSWER_SECONDS, ATTEMPT_SECONDS, CALLBACK_SECONDS = 0.05, 1.0, 4.0
WARM_UP_STEPS = 4


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        steps_per_second: after the warm-up.
        trained: samples that a trainer would have trained.
        false_rewards: of them, those with another reward than the right one.
        without_grade: samples in groups that came through, which are left out.
        failed_groups: without any grade, replaced by others.
        ledger_is_balanced: at every look.
        faults: how often the grader did what.
        statuses: what the gateway answered to callbacks.
    """

    steps_per_second: float = 0.0
    trained: int = 0
    false_rewards: int = 0
    without_grade: int = 0
    failed_groups: int = 0
    ledger_is_balanced: bool = True
    faults: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)


class Run:
    """Feeder and rollouts, reward service and trainer of one run."""

    def __init__(self, plane: MemoryDataPlane, verifier: RemoteVerifier, config: RewardConfig) -> None:
        self._plane = plane
        self._tasks = plane.hop(HopName.TASKS, "rollout")
        lane = RewardLane("train", plane.hop(HopName.GENERATED, "reward"), is_filtered=True)
        self.consumer = RewardConsumer([lane], verifier, config, concurrency=BUDGET)
        self._queue = plane.trainer("trainer")
        self._next = 0
        self.outcome = Outcome()

    async def generate(self) -> None:
        """Keep as many groups on their way as the budget allows."""
        while True:
            ledger = await self._plane.ledger()
            self.outcome.ledger_is_balanced &= ledger.balanced
            missing = BUDGET - ledger.outstanding
            if missing > 0:
                tasks = [a_task(self._next + n, group_size=GROUP_SIZE) for n in range(missing)]
                self._next += missing
                await self._plane.admission.issue_many(tasks, limit=BUDGET)
                claims = await self._tasks.claim(missing, wait_seconds=0)
                await self._tasks.forward_many([(claim, a_group(claim.task())) for claim in claims])
            await asyncio.sleep(0.02)

    async def train(self, steps: int) -> None:
        """Take so many steps, and look at each sample as the trainer does."""
        await self._queue.take_over()
        began = time.perf_counter()
        for step in range(WARM_UP_STEPS + steps):
            if step == WARM_UP_STEPS:
                began = time.perf_counter()
            claims: list[Any] = []
            while len(claims) < GROUPS_OF_A_STEP:
                claims += await self._queue.hop.claim(GROUPS_OF_A_STEP - len(claims), wait_seconds=1.0)
            for claim in claims:
                self._look(claim.group())
            await asyncio.sleep(STEP_SECONDS)
            for claim in claims:
                await self._queue.hop.resolve(claim, Resolution.TRAINED, "measured")
        self.outcome.steps_per_second = steps / (time.perf_counter() - began)
        ledger = await self._plane.ledger()
        self.outcome.failed_groups = sum(ledger.failed.values())
        self.outcome.ledger_is_balanced &= ledger.balanced

    def _look(self, group: Group) -> None:
        found = scored_trajectories(group)
        self.outcome.trained += len(found)
        self.outcome.without_grade += len(group.trajectories) - len(found)
        self.outcome.false_rewards += sum(each.reward != worth(each.text) for each in found)


@asynccontextmanager
async def a_grader(share: float, seed: int) -> AsyncIterator[str]:
    """Run the grader; gives its address."""
    command = [
        sys.executable,
        "-m",
        "tests.integration.reward.faulty_grader",
        "--share",
        str(share),
        "--seed",
        str(seed),
    ]
    command += ["--seed", str(seed), "--seconds", str(ANSWER_SECONDS), "--late-seconds", str(CALLBACK_SECONDS + 0.5)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().strip()
        yield address
    finally:
        process.terminate()
        async with asyncio.timeout(10):
            await process.wait()


@asynccontextmanager
async def a_gateway_for(planes: MemoryPlanes, folder: Path) -> AsyncIterator[str]:
    """Serve the gateway that callbacks come to; gives its address."""
    gateway = a_gateway(clock=SystemClock(), planes=planes, token=TOKEN)  # type: ignore[arg-type]
    spec = a_spec(group_size=GROUP_SIZE)
    record = a_record(EXPERIMENT, spec=spec.model_dump(mode="json"), state=ExperimentState.RUNNING)
    await gateway.repository.add(record, spec)
    app = create_app(GatewaySettings(token=TOKEN, redis_url="redis://nowhere", data=folder))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    async with served(with_state) as address:  # type: ignore[arg-type]
        yield address


async def measure(share: float, steps: int, *, is_later: bool, seed: int = 0) -> Outcome:
    """Run once."""
    planes = MemoryPlanes()
    plane = planes(EXPERIMENT, Lane.TRAIN)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        gateway = await stack.enter_async_context(a_gateway_for(planes, folder))
        grader = await stack.enter_async_context(a_grader(share, seed))
        component = {
            "url": f"{grader}/{'later' if is_later else 'grade'}",
            "attempt_seconds": ATTEMPT_SECONDS,
            "max_attempts": 8,
            "allow_private": True,
            "callback_seconds": CALLBACK_SECONDS if is_later else None,
        }
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        client = httpx.AsyncClient(trust_env=False, timeout=None, limits=limits)
        callbacks = Callbacks(plane.mailbox, gateway)
        verifier = RemoteVerifier(
            RemoteConfig.model_validate(component), EXPERIMENT, client, SECRET, callbacks=callbacks
        )
        stack.push_async_callback(verifier.aclose)
        run = Run(plane, verifier, RewardConfig.model_validate({"components": [component | {"kind": "remote"}]}))
        run.consumer.resume()
        working = [asyncio.create_task(work) for work in (run.consumer.run(), run.generate())]
        try:
            await run.train(steps)
        finally:
            for each in working:
                each.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        async with httpx.AsyncClient(trust_env=False) as asking:
            said = (await asking.get(f"{grader}/stats")).json()
    run.outcome.faults, run.outcome.statuses = said["faults"], said["statuses"]
    return run.outcome
