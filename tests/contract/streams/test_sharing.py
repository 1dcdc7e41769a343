"""Scored groups that another experiment takes: each once, none missing without being counted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.streams.sharing import TRIMMED, SharedRead, Taken
from flotilla.shared.testing.builders import a_group, a_task, graded
from tests.contract.streams.conftest import World, a_trainer, claim_ids, issue, ledger_of, move_to_scored

LIMIT = 100


@dataclass
class Pair:
    """Two experiments, the second of which subscribes to the first."""

    source: DataPlane
    taker: DataPlane

    async def take(self, *, count: int = 64, limit: int = LIMIT, confirms: bool = True) -> Taken:
        """Take what is there, as the feeder does."""
        confirmed = await self.source.sharing.subscribe("taker")
        await self.taker.admission.begin_taking(confirmed)
        after = await self.taker.admission.taken_through()
        taken = await self.taker.admission.take(await self.source.sharing.read(after, count), limit=limit)
        if confirms:
            await self.source.sharing.confirm("taker", taken.through)
        return taken

    async def held(self) -> list[int]:
        """List the numbers of what is still on offer."""
        return [each.number for each in (await self.source.sharing.read(0, 100)).groups]


@pytest.fixture
def pair(world: World) -> Iterator[Pair]:
    yield Pair(world.open(), replace(world, experiment_id=f"{world.experiment_id}-taker").open())


async def scored(plane: DataPlane, count: int, *, first: int = 0, version: int = 0) -> None:
    await issue(plane, count, first=first, version=version)
    await move_to_scored(plane, count, version=version)


async def test_what_is_scored_while_somebody_subscribes_is_in_both_ledgers(pair: Pair) -> None:
    await scored(pair.source, 2)
    assert await pair.source.sharing.subscribe("taker") == 0
    await scored(pair.source, 3, first=2, version=4)

    assert await pair.take() == Taken(3, 3)

    assert (await ledger_of(pair.source)).waiting.scored == 5
    ledger = await ledger_of(pair.taker)
    assert (ledger.issued, ledger.waiting.scored, ledger.outstanding) == (3, 3, 3)
    assert ledger.tokens.scored == (await ledger_of(pair.source)).tokens.scored * 3 // 5
    trainer = await a_trainer(pair.taker)
    claims = await trainer.hop.claim(5, wait_seconds=0)
    assert [(each.header.group_id, each.header.oldest_version) for each in claims] == [(2, 4), (3, 4), (4, 4)]
    assert [each.group().rewards() for each in claims] == [[0.0, 1.0]] * 3
    assert await trainer.plan(1, claims, version=0)
    assert await trainer.commit([1]) == 1
    assert (await ledger_of(pair.taker)).trained == 3
    assert await pair.held() == []


async def test_without_a_subscriber_nothing_is_kept(pair: Pair) -> None:
    await scored(pair.source, 2)

    assert await pair.source.sharing.read(0, 10) == SharedRead((), 0)
    assert await pair.source.sharing.subscribers() == {}


async def test_what_was_taken_and_not_confirmed_is_not_taken_twice(pair: Pair) -> None:
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 2)
    await pair.take(confirms=False)

    assert await pair.take() == Taken(0, 2)

    assert (await ledger_of(pair.taker)).issued == 2
    assert await pair.source.sharing.subscribers() == {"taker": 2}


async def test_the_limit_bounds_what_is_outstanding(pair: Pair) -> None:
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 5)

    assert await pair.take(limit=2) == Taken(2, 2)
    assert await pair.take(limit=2) == Taken(0, 2)
    trainer = await a_trainer(pair.taker)
    claims = await trainer.hop.claim(1, wait_seconds=0)
    assert await trainer.hop.resolve(claims[0], Resolution.DROPPED, "stale")
    assert await pair.take(limit=2) == Taken(1, 3)
    assert await pair.held() == [4, 5]


async def test_what_is_trimmed_is_counted_by_who_comes_too_late(pair: Pair) -> None:
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 3)
    await pair.take(count=1)
    await pair.source.admission.bound(1)  # a byte: nothing is kept from the next group on
    hop = pair.source.hop(HopName.TASKS, "rollout")
    assert await hop.claim(1, wait_seconds=0) == []
    await pair.source.admission.bound(None)
    await issue(pair.source, 1, first=3)
    rollout, reward = pair.source.hop(HopName.TASKS, "rollout"), pair.source.hop(HopName.GENERATED, "reward")
    [claim] = await rollout.claim(1, wait_seconds=0)
    assert await rollout.forward(claim, a_group(claim.task()))
    [claim] = await reward.claim(1, wait_seconds=0)
    await pair.source.admission.bound(1)
    assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))
    await pair.source.admission.bound(None)

    assert await pair.take() == Taken(0, 4)

    ledger = await ledger_of(pair.taker)
    assert (ledger.issued, ledger.dropped) == (4, {TRIMMED: 3})
    assert ledger.lengths == {"dropped": {TRIMMED: {0: 3}}}
    await scored(pair.source, 1, first=4)
    assert await pair.take() == Taken(1, 5)
    assert (await ledger_of(pair.taker)).dropped == {TRIMMED: 3}


async def test_groups_of_any_size_are_shared(pair: Pair) -> None:
    await pair.source.sharing.subscribe("taker")
    await issue(pair.source, 2)
    rollout, reward = pair.source.hop(HopName.TASKS, "rollout"), pair.source.hop(HopName.GENERATED, "reward")
    for claim, tokens in zip(await rollout.claim(2, wait_seconds=0), (60_000, 3), strict=True):
        assert await rollout.forward(claim, a_group(claim.task(), sampled_tokens=tokens))
    for claim in await reward.claim(2, wait_seconds=0):
        assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))

    await pair.take()

    trainer = await a_trainer(pair.taker)
    claims = await trainer.hop.claim(5, wait_seconds=0)
    assert [each.group().trajectories[0].num_sampled for each in claims] == [60_000, 3]


async def test_the_slowest_subscriber_decides_what_is_kept(pair: Pair) -> None:
    await pair.source.sharing.subscribe("other")
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 4)

    await pair.take()
    await pair.source.sharing.confirm("other", 1)

    assert await pair.held() == [2, 3, 4]
    await pair.source.sharing.unsubscribe("other")
    assert await pair.held() == []
    await pair.source.sharing.unsubscribe("taker")
    await scored(pair.source, 1, first=4)
    assert await pair.source.sharing.read(0, 10) == SharedRead((), 4)


async def test_what_came_while_it_did_not_subscribe_is_not_missing(pair: Pair) -> None:
    await pair.source.sharing.subscribe("other")
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 2)
    await pair.take()
    await pair.source.sharing.unsubscribe("taker")
    await scored(pair.source, 2, first=2)

    assert await pair.take() == Taken(0, 4)

    await scored(pair.source, 1, first=4)
    assert await pair.take() == Taken(1, 5)
    assert (await ledger_of(pair.taker)).dropped == {}


async def test_a_repeated_forward_is_shared_once(pair: Pair) -> None:
    await pair.source.sharing.subscribe("taker")
    await issue(pair.source, 1)
    rollout, reward = pair.source.hop(HopName.TASKS, "rollout"), pair.source.hop(HopName.GENERATED, "reward")
    [claim] = await rollout.claim(1, wait_seconds=0)
    assert await rollout.forward(claim, a_group(a_task(0)))
    [claim] = await reward.claim(1, wait_seconds=0)
    group = graded(claim.group(), [0.0, 1.0])

    assert await reward.forward_many([(claim, group), (claim, group)]) == [True, True]
    assert await reward.forward(claim, group)

    assert await pair.held() == [1]


async def test_it_goes_with_the_experiment(pair: Pair) -> None:
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 2)

    await pair.source.remove()

    assert await pair.source.sharing.subscribers() == {}
    assert await claim_ids((await a_trainer(pair.taker)).hop) == []


async def test_what_may_still_come_of_the_source_is_known_to_the_trainer_that_takes(pair: Pair) -> None:
    trainer = await a_trainer(pair.taker)
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 4)
    await pair.taker.admission.begin_at(9)  # ids of its own say nothing of those that it takes
    assert await trainer.lowest_open(are_taken=True) == 0

    await pair.take(count=2)
    await pair.taker.admission.come_from(4)
    await pair.taker.admission.come_from(3)
    assert await trainer.lowest_open(are_taken=True) == 0
    claims = await trainer.hop.claim(2, wait_seconds=0)
    assert await trainer.plan(1, claims[:1], version=0)
    await trainer.commit([1])
    assert await trainer.lowest_open(are_taken=True) == 1
    assert await trainer.hop.resolve(claims[1], Resolution.FILTERED, "too_long")

    assert await trainer.lowest_open(are_taken=True) == 4


async def test_what_was_read_in_another_life_of_a_server_has_no_effect(pair: Pair, world: World) -> None:
    ours, theirs = await pair.taker.admission.life(), await pair.source.sharing.life()
    assert (ours == theirs) and bool(ours) is (world.redis is not None)
    await pair.source.sharing.subscribe("taker")
    await scored(pair.source, 1)
    read = await pair.source.sharing.read(0, 9)
    assert read.life == theirs

    if world.redis is not None:
        for call in (
            pair.taker.admission.begin_taking(1, "another"),
            pair.taker.admission.take(read, limit=LIMIT, life="another"),
            pair.source.sharing.confirm("taker", 1, "another"),
        ):
            with pytest.raises(Unavailable, match="restarted"):
                await call
    assert await pair.held() == [1]
    assert await pair.taker.admission.take(read, limit=LIMIT, life=ours) == Taken(1, 1)
    await pair.source.sharing.confirm("taker", 1, theirs)
    assert await pair.held() == []
