"""The trainer's queue over Redis."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flotilla.shared.errors import ClaimLost, NotFound
from flotilla.shared.streams.hop import FENCED, PLANNED, Claim, HopName, Resolution, StreamKeys, counter_of
from flotilla.shared.streams.plans import LINEAGE_STEPS, LOST_WITH_CHECKPOINT, Plan, Retained, RolledBack, not_newer
from flotilla.shared.streams.redis.hop import TrainerHop, claim_of
from flotilla.shared.streams.redis.scripts import Argument, ScriptRunner

REPLAY_ENTRIES = 16
"""Entries read per round trip; a large group is a megabyte."""


class RedisTrainerQueue:
    """Plans and commits steps; see ``TrainerQueue``."""

    def __init__(self, runner: ScriptRunner, keys: StreamKeys, hop: TrainerHop) -> None:
        self.hop = hop
        self._runner = runner
        self._keys = keys
        self._stream = keys.stream(HopName.SCORED)
        self._incarnation: int | None = None
        hop.regain = self._regain

    async def take_over(self, incarnation: int | None = None) -> int:
        """See ``TrainerQueue.take_over``."""
        wanted = "" if incarnation is None else incarnation
        number = await self._runner.run("take_over", [self._stream, self._keys.state], [self.hop.consumer, wanted])
        if number < 0:
            raise not_newer(incarnation, recorded=-int(number))
        self._incarnation = int(number)
        return self._incarnation

    async def _regain(self) -> bool:
        """Become the trainer again unless another one took over: the server was restored at a state before that."""
        if self._incarnation is None:
            return False
        arguments: list[Argument] = [self.hop.consumer, self._incarnation]
        return int(await self._runner.run("take_over", [self._stream, self._keys.state], arguments)) >= 0

    async def plan(self, step: int, claims: Sequence[Claim], version: int, parent: str = "") -> bool:
        """See ``TrainerQueue.plan``."""
        plan = Plan.of(step, claims, version, parent)
        keys = self._keys
        held = [part for claim in claims for part in (claim.entry_id, claim.deliveries, claim.header.group_id)]
        names = [self._stream, keys.ledger, keys.outstanding, keys.state, keys.consumed, keys.plans]
        answer = await self._fenced(
            "plan", names, [self.hop.consumer, step, version, plan.to_bytes(), *held], fenced=b"fenced"
        )
        if answer == b"planned":
            self.hop.release(plan.entry_ids)
        return bool(answer == b"planned")

    async def load_plan(self, step: int) -> Plan | None:
        """See ``TrainerQueue.load_plan``."""
        encoded = await self._runner.command("HGET", self._keys.plans, step)
        return None if encoded is None else Plan.from_bytes(encoded)

    async def plans_from(self, step: int) -> list[Plan]:
        """See ``TrainerQueue.plans_from``."""
        plans = [Plan.from_bytes(encoded) for encoded in await self._runner.command("HVALS", self._keys.plans)]
        return sorted((plan for plan in plans if plan.step >= step), key=lambda plan: plan.step)

    async def replay(self, step: int) -> list[Claim]:
        """See ``TrainerQueue.replay``."""
        plan = await self.load_plan(step)
        if plan is None:
            raise NotFound(f"step {step} has no plan", step=step)
        claims: list[Claim] = []
        for start in range(0, len(plan.entry_ids), REPLAY_ENTRIES):
            claims += await self._read(plan.entry_ids[start : start + REPLAY_ENTRIES], step)
        return claims

    async def commit(self, steps: Sequence[int]) -> int:
        """See ``TrainerQueue.commit``."""
        keys = [self._stream, self._keys.ledger, self._keys.state, self._keys.plans, self._keys.lineage]
        return int(await self._fenced("commit", keys, [self.hop.consumer, LINEAGE_STEPS, *steps], fenced=-1))

    async def abandon(self, steps: Sequence[int], resolution: Resolution, reason: str) -> int:
        """See ``TrainerQueue.abandon``."""
        keys = [self._stream, self._keys.ledger, self._keys.state, self._keys.plans]
        counter = counter_of(resolution, reason)
        return int(await self._fenced("abandon", keys, [self.hop.consumer, counter, *steps], fenced=-1))

    async def record(self, plans: Sequence[Plan]) -> int:
        """See ``TrainerQueue.record``."""
        if not plans:
            return 0
        lines = [part for plan in plans for part in (plan.step, replace(plan, entry_ids=()).to_bytes())]
        keys = [self._keys.state, self._keys.plans, self._keys.lineage]
        return int(await self._fenced("restore_lineage", keys, [self.hop.consumer, *lines], fenced=-1))

    async def roll_back(self, step: int, given_up: Sequence[int]) -> RolledBack:
        """See ``TrainerQueue.roll_back``."""
        keys = self._keys
        names = [self._stream, keys.ledger, keys.outstanding, keys.state, keys.consumed, keys.plans, keys.lineage]
        if given_up:
            await self._runner.run("create_group", [self._stream, keys.plans])
        counter = counter_of(Resolution.DROPPED, LOST_WITH_CHECKPOINT)
        answer = await self._fenced("roll_back", names, [self.hop.consumer, step, counter, *given_up], fenced=-1)
        waiting, lost = map(int, answer)
        return RolledBack(waiting, lost)

    async def retained(self) -> Retained:
        """See ``TrainerQueue.retained``."""
        keys = [self._stream, self._keys.ledger, self._keys.state]
        size_bytes, bound_bytes, entries, planned = await self._runner.run("retained", keys)
        return Retained(size_bytes, None if bound_bytes < 0 else bound_bytes, entries, planned)

    async def lowest_open(self, *, are_taken: bool = False) -> int:
        """See ``TrainerQueue.lowest_open``."""
        keys = [self._keys.outstanding, self._keys.state, self._keys.plans]
        return int(await self._runner.run("lowest_open", keys, ["lowest_to_come" if are_taken else "next_group_id"]))

    async def resolve_already_trained(self, claim: Claim) -> bool:
        """See ``TrainerQueue.resolve_already_trained``."""
        return await self.hop.resolve(claim, Resolution.TRAINED, "already_trained")

    async def lineage(self, step: int) -> Plan | None:
        """See ``TrainerQueue.lineage``."""
        encoded = await self._runner.command("HGET", self._keys.lineage, step)
        return None if encoded is None else Plan.from_bytes(encoded)

    async def _fenced(self, name: str, keys: Sequence[str], arguments: Sequence[Argument], *, fenced: object) -> Any:
        """Run a script that only the trainer may, and once more where the server had forgotten that this is the one.

        Raises:
            ClaimLost: a later trainer took over.
        """
        answer = await self._runner.run(name, keys, arguments)
        if answer == fenced and await self._regain():
            answer = await self._runner.run(name, keys, arguments)
        if answer == fenced:
            raise ClaimLost(FENCED)
        return answer

    async def _read(self, entry_ids: Sequence[str], step: int) -> list[Claim]:
        async def once() -> list[Any]:
            async with self._runner.redis.pipeline(transaction=False) as pipeline:
                for entry_id in entry_ids:
                    pipeline.xrange(self._stream, entry_id, entry_id)
                found: list[Any] = await pipeline.execute()
            return found

        found = await self._runner.retried(once)
        claims = []
        for entry_id, entries in zip(entry_ids, found, strict=True):
            if not entries:
                raise NotFound(f"entry {entry_id} of the plan of step {step} is gone", step=step)
            claims.append(claim_of(HopName.SCORED, entry_id, entries[0][1], 0, PLANNED))
        return claims
