"""The trainer's queue in memory."""

from collections.abc import Sequence
from dataclasses import replace

from flotilla.shared.errors import ClaimLost, NotFound
from flotilla.shared.streams.hop import FENCED, HANDED_BACK, PLANNED, Claim, Hop, HopName, Resolution, counter_of
from flotilla.shared.streams.memory.streams import MemoryStore
from flotilla.shared.streams.plans import LINEAGE_STEPS, LOST_WITH_CHECKPOINT, Plan, Retained, RolledBack, not_newer


class MemoryTrainerQueue:
    """Plans and commits steps; see ``TrainerQueue``."""

    def __init__(self, store: MemoryStore, hop: Hop) -> None:
        self.hop = hop
        self._store = store
        self._stream = store.streams[HopName.SCORED]

    async def take_over(self, incarnation: int | None = None) -> int:
        """See ``TrainerQueue.take_over``."""
        store = self._store
        is_again = store.trainer_owner == self.hop.consumer
        if incarnation is None:
            incarnation = store.trainer_incarnation + (0 if is_again else 1)
        if incarnation < store.trainer_incarnation or (incarnation == store.trainer_incarnation and not is_again):
            raise not_newer(incarnation, recorded=store.trainer_incarnation)
        store.trainer_incarnation, store.trainer_owner = incarnation, self.hop.consumer
        for entry_id, held in list(self._stream.in_order()):
            if held.consumer not in {self.hop.consumer, PLANNED, HANDED_BACK}:
                self._stream.put_aside(entry_id)
        store.wake()
        return incarnation

    async def plan(self, step: int, claims: Sequence[Claim], version: int, parent: str = "") -> bool:
        """See ``TrainerQueue.plan``."""
        plan = Plan.of(step, claims, version, parent)
        self._check_not_fenced()
        standing = self._store.plans.get(step)
        if standing is not None:
            return standing == plan
        if not all(self._can_be_planned(claim) for claim in claims):
            return False
        self._store.plans[step] = plan
        for claim in claims:
            self._stream.give(claim.entry_id, PLANNED, deliveries=claim.deliveries)
            del self._store.outstanding[claim.header.group_id]
        self._store.count("planned", len(claims))
        self._store.consumed[version] = self._store.consumed.get(version, 0) + len(claims)
        return True

    async def load_plan(self, step: int) -> Plan | None:
        """See ``TrainerQueue.load_plan``."""
        return self._store.plans.get(step)

    async def plans_from(self, step: int) -> list[Plan]:
        """See ``TrainerQueue.plans_from``."""
        return [plan for number, plan in sorted(self._store.plans.items()) if number >= step]

    async def replay(self, step: int) -> list[Claim]:
        """See ``TrainerQueue.replay``."""
        plan = self._store.plans.get(step)
        if plan is None:
            raise NotFound(f"step {step} has no plan", step=step)
        entries = [self._stream.entries[entry_id] for entry_id in plan.entry_ids]
        return [
            Claim(HopName.SCORED, each.entry_id, each.header, each.payload, 0, PLANNED, each.grades) for each in entries
        ]

    async def commit(self, steps: Sequence[int]) -> int:
        """See ``TrainerQueue.commit``."""
        self._check_not_fenced()
        plans = [plan for step in steps if (plan := self._store.plans.pop(step, None)) is not None]
        for plan in plans:
            for entry_id in plan.entry_ids:
                self._stream.remove(entry_id)
            self._store.count("planned", -len(plan.entry_ids))
            self._store.count("trained", len(plan.entry_ids))
            self._store.count("tokens:trained", plan.token_count)
            self._store.lineage[plan.step] = replace(plan, entry_ids=())
            self._store.lineage.pop(plan.step - LINEAGE_STEPS, None)
        return len(plans)

    async def abandon(self, steps: Sequence[int], resolution: Resolution, reason: str) -> int:
        """See ``TrainerQueue.abandon``."""
        self._check_not_fenced()
        plans = [plan for step in steps if (plan := self._store.plans.pop(step, None)) is not None]
        entry_ids = [entry_id for plan in plans for entry_id in plan.entry_ids]
        for entry_id in entry_ids:
            header = self._stream.entries[entry_id].header
            self._stream.remove(entry_id)
            self._store.count("planned", -1)
            self._store.count_end(counter_of(resolution, reason), header.token_count)
        return len(entry_ids)

    async def record(self, plans: Sequence[Plan]) -> int:
        """See ``TrainerQueue.record``."""
        self._check_not_fenced()
        known = self._store.plans.keys() | self._store.lineage.keys()
        forgotten = {plan.step: replace(plan, entry_ids=()) for plan in plans if plan.step not in known}
        self._store.lineage |= forgotten
        return len(forgotten)

    async def roll_back(self, step: int, given_up: Sequence[int]) -> RolledBack:
        """See ``TrainerQueue.roll_back``."""
        self._check_not_fenced()
        store, waiting, lost = self._store, 0, 0
        for plan in [plan for each in given_up if (plan := store.plans.pop(each, None)) is not None]:
            for entry_id, group_id in zip(plan.entry_ids, plan.group_ids, strict=True):
                self._stream.give(entry_id, HANDED_BACK, deliveries=self._stream.pending[entry_id].deliveries)
                store.outstanding[group_id] = plan.oldest_version
            store.count("planned", -len(plan.entry_ids))
            store.unconsume(plan.version, len(plan.entry_ids))
            waiting += len(plan.entry_ids)
        for plan in [store.lineage.pop(each) for each in list(store.lineage) if each > step]:
            counted = 0
            for group_id, tokens in zip(plan.group_ids, plan.token_counts, strict=True):
                is_known = group_id < store.next_group_id and group_id not in store.outstanding
                if is_known and store.counters.get("trained", 0) > 0:
                    store.count("trained", -1)
                    store.count("tokens:trained", -tokens)
                    store.count_end(counter_of(Resolution.DROPPED, LOST_WITH_CHECKPOINT), tokens)
                    counted += 1
            store.unconsume(plan.version, counted)
            lost += counted
        store.wake()
        call = self.hop.consumer, step, tuple(given_up)
        before = store.rolled_back[1] if store.rolled_back[0] == call else (0, 0)
        store.rolled_back = call, (before[0] + waiting, before[1] + lost)
        return RolledBack(*store.rolled_back[1])

    async def retained(self) -> Retained:
        """See ``TrainerQueue.retained``."""
        planned = self._store.counters.get("planned", 0)
        return Retained(self._stream.size_bytes(), self._store.stream_bytes, len(self._stream.entries), planned)

    async def lowest_open(self, *, are_taken: bool = False) -> int:
        """See ``TrainerQueue.lowest_open``."""
        store = self._store
        planned = [group_id for plan in store.plans.values() for group_id in plan.group_ids]
        return min([store.lowest_to_come if are_taken else store.next_group_id, *store.outstanding, *planned])

    async def resolve_already_trained(self, claim: Claim) -> bool:
        """See ``TrainerQueue.resolve_already_trained``."""
        return await self.hop.resolve(claim, Resolution.TRAINED, "already_trained")

    async def lineage(self, step: int) -> Plan | None:
        """See ``TrainerQueue.lineage``."""
        return self._store.lineage.get(step)

    def _can_be_planned(self, claim: Claim) -> bool:
        is_held = self._stream.holds(claim.entry_id, self.hop.consumer, claim.deliveries)
        return is_held and claim.header.group_id in self._store.outstanding

    def _check_not_fenced(self) -> None:
        if self._store.trainer_owner != self.hop.consumer:
            raise ClaimLost(FENCED)
