"""Random interleavings of everybody who touches a data plane, stale holders included."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flotilla.shared.errors import ClaimLost
from flotilla.shared.schemas.trajectory import NO_VERSION
from flotilla.shared.streams.hop import Claim, Hop, HopName, Resolution
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.plans import TrainerQueue
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory, graded
from tests.contract.streams.conftest import lengths_add_up

Answer = TypeVar("Answer")
picks = st.integers(0, 10**6)
LARGE = 8000
"""Sampled tokens of a trajectory, of which two are appended by a command of their own."""


class Rig:
    """A data plane on an event loop of its own, and its clock."""

    def __init__(
        self, runner: asyncio.Runner, plane: DataPlane, let_leases_end: Callable[[], None], close: Callable[[], None]
    ) -> None:
        self.runner = runner
        self.plane = plane
        self.let_leases_end = let_leases_end
        self.close = close


class Fleet(RuleBasedStateMachine):
    """Two rollouts, two rewards, any number of trainers; holders never forget a claim, lost or not."""

    def __init__(self, make_rig: Callable[[], Rig], *, drain_seconds: float) -> None:
        super().__init__()
        self._rig = make_rig()
        self._drain_seconds = drain_seconds
        self._plane = self._rig.plane
        self._hops: list[Hop] = [
            self._plane.hop(name, service)
            for name in (HopName.TASKS, HopName.GENERATED)
            for service in ("one", "other")
        ]
        self._trainers: list[TrainerQueue] = []
        self._holders: list[tuple[Hop, Claim]] = []
        self._scored: list[tuple[TrainerQueue, Claim]] = []
        self._moves: Counter[tuple[HopName, int]] = Counter()
        self._moved_by: set[str] = set()
        self._handed_over: set[str] = set()
        self._planned: dict[int, tuple[int, ...]] = {}
        self._committed: set[int] = set()
        self._found: tuple[object, tuple[int, int]] = (None, (0, 0))
        self._rolled_back: set[int] = set()
        self._issued = 0
        self._version = 0
        self.new_trainer()

    def teardown(self) -> None:
        try:
            self._drain()
        finally:
            self._rig.close()
            self._rig.runner.close()

    def do(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return self._rig.runner.run(call)

    @invariant()
    def balances(self) -> None:
        ledger = self.do(self._plane.ledger())
        assert ledger.balanced, ledger
        assert lengths_add_up(ledger), ledger
        assert ledger.issued == self._issued
        live = [step for step in self._planned if step not in self._committed]
        assert ledger.planned == sum(len(self._planned[step]) for step in live)

    @rule(count=st.integers(1, 4), limit=st.integers(1, 12))
    def issue(self, count: int, limit: int) -> None:
        tasks = [a_task(self._issued + index, min_version=self._version) for index in range(count)]
        before = self.do(self._plane.ledger())
        result = self.do(self._plane.admission.issue_many(tasks, limit=limit))
        room = limit - before.outstanding - before.consumed_since_publication
        assert result.count == max(0, min(count, room))
        self._issued += result.count

    @rule(count=st.integers(1, 3), limit=st.integers(1, 12), hop=st.sampled_from([HopName.GENERATED, HopName.SCORED]))
    def issue_finished(self, count: int, limit: int, hop: HopName) -> None:
        groups = [a_group(self._issued + index, rewards=[0.0, 1.0], version=NO_VERSION) for index in range(count)]
        before = self.do(self._plane.ledger())
        result = self.do(self._plane.admission.issue_groups(groups, hop=hop, limit=limit))
        assert result.count == max(0, min(count, limit - before.outstanding))
        self._issued += result.count

    @rule(which=st.integers(0, 3), count=st.integers(1, 3))
    def claim(self, which: int, count: int) -> None:
        hop = self._hops[which]
        claims = self.do(hop.claim(count, wait_seconds=0))
        assert len(claims) <= count
        self._holders += [(hop, claim) for claim in claims]

    @rule(pick=picks)
    @precondition(lambda self: self._holders)
    def forward(self, pick: int) -> None:
        hop, claim = self._holders[pick % len(self._holders)]
        if claim.hop is HopName.GENERATED and pick % 2:
            group = graded(claim.group(), [0.0, 1.0])
        else:
            group = a_group(claim.header.group_id, sampled_tokens=LARGE if pick % 16 == 0 else 1 + pick % 40)
        if self.do(hop.forward(claim, group)):
            self._record(claim)

    @rule(pick=picks, resolution=st.sampled_from([Resolution.FILTERED, Resolution.DROPPED, Resolution.FAILED]))
    @precondition(lambda self: self._holders)
    def resolve(self, pick: int, resolution: Resolution) -> None:
        hop, claim = self._holders[pick % len(self._holders)]
        if self.do(hop.resolve(claim, resolution, "a reason")):
            self._record(claim)

    @rule(pick=picks)
    @precondition(lambda self: self._holders)
    def hand_back(self, pick: int) -> None:
        hop, claim = self._holders[pick % len(self._holders)]
        if self.do(hop.hand_back(claim)):
            assert claim.token not in self._moved_by
            assert self.do(hop.renew([claim])) == [claim]

    @rule(pick=picks, tokens=st.integers(1, 9))
    @precondition(lambda self: self._holders)
    def hand_over(self, pick: int, tokens: int) -> None:
        hop, claim = self._holders[pick % len(self._holders)]
        if claim.hop is not HopName.TASKS:
            return
        was_held = not self.do(hop.renew([claim]))
        is_handed_over = self.do(hop.hand_over(claim, (None, a_trajectory(sampled_tokens=tokens))))
        assert is_handed_over or not was_held
        if is_handed_over and claim.token not in self._handed_over:
            self._handed_over.add(claim.token)
            assert claim.token not in self._moved_by
            assert self.do(hop.renew([claim])) == [claim]

    @rule(pick=picks)
    @precondition(lambda self: self._holders)
    def renew(self, pick: int) -> None:
        hop, claim = self._holders[pick % len(self._holders)]
        lost = self.do(hop.renew([claim]))
        assert lost == [claim] or claim.token not in self._moved_by

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        hop = self._hops[which]
        mine = [claim for owner, claim in self._holders if owner is hop]
        lost = self.do(hop.renew(mine))
        # What it handed back and claimed again is held by two claims of the same delivery.
        held = {claim.entry_id for claim in mine if claim not in lost}
        assert self.do(self._plane.release({hop.consumer})) == len(held)
        assert self.do(hop.renew(mine)) == mine
        assert hop.consumer not in self.do(self._plane.holders())

    @rule()
    def let_leases_end(self) -> None:
        self._rig.let_leases_end()

    @rule()
    def new_trainer(self) -> None:
        queue = self._plane.trainer("trainer")
        self.do(queue.take_over())
        self._trainers.append(queue)

    @rule(pick=picks, count=st.integers(1, 3))
    def claim_scored(self, pick: int, count: int) -> None:
        queue = self._trainers[pick % len(self._trainers)]
        try:
            claims = self.do(queue.hop.claim(count, wait_seconds=0))
        except ClaimLost:
            assert queue is not self._trainers[-1]
            return
        self._scored += [(queue, claim) for claim in claims]

    @rule(pick=picks, size=st.integers(1, 3), step=st.integers(1, 6))
    @precondition(lambda self: self._scored)
    def plan(self, pick: int, size: int, step: int) -> None:
        queue = self._scored[pick % len(self._scored)][0]
        mine = {claim.header.group_id: claim for owner, claim in self._scored if owner is queue}
        claims = list(mine.values())[-size:]
        if step in self._committed:
            return
        try:
            is_planned = self.do(queue.plan(step, claims, self._version))
        except ClaimLost:
            assert queue is not self._trainers[-1]
            return
        group_ids = tuple(claim.header.group_id for claim in claims)
        if is_planned and step not in self._planned:
            self._planned[step] = group_ids
            for claim in claims:
                self._record(claim)
        assert not is_planned or self._planned[step] == group_ids

    @rule(pick=picks, resolution=st.sampled_from([Resolution.FILTERED, Resolution.TRAINED]))
    @precondition(lambda self: self._scored)
    def resolve_scored(self, pick: int, resolution: Resolution) -> None:
        queue, claim = self._scored[pick % len(self._scored)]
        if self.do(queue.hop.resolve(claim, resolution, "a reason")):
            self._record(claim)

    @rule(pick=picks)
    @precondition(lambda self: self._scored)
    def hand_back_scored(self, pick: int) -> None:
        queue, claim = self._scored[pick % len(self._scored)]
        self.do(queue.hop.hand_back(claim))

    @rule(step=st.integers(1, 6))
    def replay_and_commit(self, step: int) -> None:
        queue = self._trainers[-1]
        is_live = step in self._planned and step not in self._committed
        if is_live:
            assert tuple(claim.header.group_id for claim in self.do(queue.replay(step))) == self._planned[step]
        assert self.do(queue.commit([step])) == int(is_live)
        if is_live:
            self._committed.add(step)

    @rule(step=st.integers(0, 6))
    def roll_back(self, step: int) -> None:
        given_up = [each for each in self._planned if each > step and each not in self._committed]
        lost = {each for each in self._committed if each > step} - self._rolled_back
        found = self.do(self._trainers[-1].roll_back(step, given_up))
        again = [group_id for each in given_up for group_id in self._planned.pop(each)]
        # The same call of the same trainer: its first answer may have been lost.
        call = (self._trainers[-1], step, tuple(given_up))
        counted = len(again), sum(len(self._planned[each]) for each in lost)
        before = self._found[1] if self._found[0] == call else (0, 0)
        assert (found.waiting, found.lost) == (before[0] + counted[0], before[1] + counted[1])
        self._found = call, (found.waiting, found.lost)
        self._rolled_back |= lost
        for group_id in again:
            del self._moves[HopName.SCORED, group_id]

    @rule()
    def publish(self) -> None:
        self._version += 1
        assert self.do(self._plane.admission.published(self._version))

    def _record(self, claim: Claim) -> None:
        """Note an effect of a claim; a repeated answer of the same claim is none."""
        if claim.token in self._moved_by:
            return
        self._moved_by.add(claim.token)
        where = (claim.hop, claim.header.group_id)
        self._moves[where] += 1
        assert self._moves[where] == 1, f"{where} had effect twice"

    def _drain(self) -> None:
        """Bring every group to its end: none is lost, none ends twice."""
        for hop in self._hops:
            self._rig.let_leases_end()
            while claims := self.do(hop.claim(16, wait_seconds=self._drain_seconds)):
                for claim in claims:
                    if self.do(hop.forward(claim, a_group(claim.header.group_id))):
                        self._record(claim)
        self.new_trainer()
        queue = self._trainers[-1]
        while claims := self.do(queue.hop.claim(16, wait_seconds=self._drain_seconds)):
            for claim in claims:
                assert self.do(queue.resolve_already_trained(claim))
                self._record(claim)
        self.do(queue.commit(list(self._planned)))
        ledger = self.do(self._plane.ledger())
        assert ledger.balanced
        ended = ledger.trained + sum(
            map(sum, (each.values() for each in (ledger.filtered, ledger.failed, ledger.dropped)))
        )
        assert (ended, ledger.outstanding, ledger.planned) == (self._issued, 0, 0)
