"""Claims tasks, samples their groups and forwards them to be graded.

One dispatcher per lane claims as many tasks as there is room for; each claimed task is answered by its own asyncio
task. A task is never sampled by a version older than its ``min_version``, nor by another than its
``pinned_version``. What cannot be finished is handed back.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.rollout.episodes.single_turn import SingleTurnEpisodes
from services.rollout.version import VersionGate
from shared.errors import FlotillaError, InvalidRequest, WorkerDied
from shared.schemas.task import Task
from shared.streams.hop import Claim, Hop, Resolution

log = logging.getLogger(__name__)

CLAIM_WAIT_SECONDS = 1.0
HAND_BACK_SECONDS = 5.0
VERSION_WAIT_SECONDS = 60.0
OTHER_VERSION_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """How one lane claims.

    Attributes:
        name: for logs and task names.
        max_groups: groups in work at the same time.
        task_seconds: longest time to answer one task.
    """

    name: str
    max_groups: int
    task_seconds: float


class RolloutWorker:
    """Answers the tasks of one experiment.

    Args:
        lanes: how to claim, and from where, for each lane.
        episodes: what samples a group.
        gate: the serving version.
        on_engine_death: called when the engine's process ended under a task.
    """

    def __init__(
        self,
        lanes: list[tuple[LaneConfig, Hop]],
        episodes: SingleTurnEpisodes,
        gate: VersionGate,
        on_engine_death: Callable[[WorkerDied], None],
    ) -> None:
        self._lanes = lanes
        self._episodes = episodes
        self._gate = gate
        self._on_engine_death = on_engine_death
        self._claiming = asyncio.Event()
        self.in_work = 0
        self.answered = 0

    def resume(self) -> None:
        """Claim tasks."""
        self._claiming.set()

    def pause(self) -> None:
        """Claim no more tasks; those in work are finished."""
        self._claiming.clear()

    async def run(self) -> None:
        """Work until cancelled; what is in work is then handed back."""
        async with asyncio.TaskGroup() as tasks:
            for config, hop in self._lanes:
                tasks.create_task(self._dispatch(config, hop, tasks), name=f"{config.name} dispatcher")

    async def _dispatch(self, config: LaneConfig, hop: Hop, tasks: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(config.max_groups)
        while True:
            await self._claiming.wait()
            await room.acquire()
            extra = 0
            while extra + 1 < config.max_groups and not room.locked():
                await room.acquire()
                extra += 1
            claims: list[Claim] = []
            try:
                claims = await hop.claim(count=1 + extra, wait_seconds=CLAIM_WAIT_SECONDS)
            except FlotillaError as error:
                log.warning("tasks cannot be claimed", extra={"lane": config.name, "error": repr(error)})
                await asyncio.sleep(CLAIM_WAIT_SECONDS)
            finally:
                for _ in range(1 + extra - len(claims)):
                    room.release()
            for claim in claims:
                answer = tasks.create_task(self._answer(config, hop, claim), name=f"{config.name} {claim.entry_id}")
                answer.add_done_callback(lambda _: room.release())

    async def _answer(self, config: LaneConfig, hop: Hop, claim: Claim) -> None:
        self.in_work += 1
        try:
            async with hop.renewing(claim), asyncio.timeout(config.task_seconds):
                task = claim.task()
                if not await self._right_version(task):
                    # Held for a moment first: handed back at once, it would come straight back here.
                    await asyncio.sleep(OTHER_VERSION_PAUSE_SECONDS)
                    await hop.hand_back(claim)
                    return
                group = await self._episodes.run(task)
            if await hop.forward(claim, group):
                self.answered += 1
            else:
                log.info("claim was lost, group discarded", extra={"group_id": task.group_id})
        except InvalidRequest as error:
            log.warning("task cannot be answered", extra={"entry_id": claim.entry_id, "error": error.detail})
            await hop.resolve(claim, Resolution.FAILED, "prompt_too_long")
        except TimeoutError:
            log.warning("task took too long", extra={"entry_id": claim.entry_id, "seconds": config.task_seconds})
            await hop.resolve(claim, Resolution.FAILED, "rollout_timeout")
        except WorkerDied as error:
            self._on_engine_death(error)
            await self._give_up(hop, claim)
        except FlotillaError as error:
            log.warning("task is handed back", extra={"entry_id": claim.entry_id, "error": repr(error)})
            await self._give_up(hop, claim)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(hop, claim))
            raise
        finally:
            self.in_work -= 1

    async def _right_version(self, task: Task) -> bool:
        wanted = task.min_version if task.pinned_version is None else task.pinned_version
        try:
            version = await self._gate.at_least(wanted, VERSION_WAIT_SECONDS)
        except TimeoutError:
            log.warning("task waits for a version that does not come", extra={"version": wanted})
            return False
        return task.pinned_version is None or version == task.pinned_version

    async def _give_up(self, hop: Hop, claim: Claim) -> None:
        # If this fails too, the lease ends and somebody else takes the claim over.
        try:
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await hop.hand_back(claim)
        except (FlotillaError, TimeoutError) as error:
            log.warning("claim could not be handed back", extra={"entry_id": claim.entry_id, "error": repr(error)})
