"""Answers that are lost with their connection: what was done is done once, and what was delivered comes again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.admission import IssueOutcome
from flotilla.shared.streams.hop import HopName, Resolution, StreamsConfig
from flotilla.shared.streams.redis import connection, hop
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.streams.redis.scripts import script
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory, graded
from tests.contract.streams.conftest import a_trainer, claim_ids, issue, ledger_of, move_to_scored
from tests.integration.streams.proxy import Relay, relaying


@pytest.fixture
async def cut(redis_url: str, experiment_id: str, tmp_path: Path) -> AsyncIterator[tuple[Relay, RedisDataPlane]]:
    """A relay, and a plane that speaks through it."""
    async with relaying(redis_url, tmp_path / "relay") as (relay, url):
        client = connect(url)
        try:
            yield relay, RedisDataPlane(client, experiment_id, config=StreamsConfig(lease_seconds=0.3))
        finally:
            await client.aclose()


def digest(name: str) -> bytes:
    return script(name).digest.encode()


async def test_a_forward_whose_answer_was_lost_is_repeated_with_one_effect(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane
) -> None:
    relay, through = cut
    await issue(plane, 1)
    rollout = through.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    relay.swallow_answer_to(digest("finish"))

    assert await rollout.forward(claim, a_group(claim.task()))

    assert relay.swallowed == 1
    ledger = await ledger_of(plane)
    assert (ledger.waiting.generated, ledger.claimed.tasks) == (1, 0)


@pytest.mark.parametrize("cut_at", [b"MULTI", b"EXEC"])
async def test_a_large_group_is_there_once_after_the_answer_was_lost(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane, cut_at: bytes
) -> None:
    """Cut in the middle of the transaction, and after all of it was sent."""
    relay, through = cut
    await issue(plane, 1)
    rollout, reward = plane.hop(HopName.TASKS, "rollout"), through.hop(HopName.GENERATED, "reward")
    (task_claim,) = await rollout.claim(wait_seconds=0)
    assert await rollout.forward(task_claim, a_group(task_claim.task(), sampled_tokens=20_000))
    (claim,) = await reward.claim(wait_seconds=0)
    sent = graded(claim.group(), [0.0, 1.0])
    relay.swallow_answer_to(cut_at)

    assert await reward.forward(claim, sent)

    assert relay.swallowed == 1
    (scored,) = await (await a_trainer(plane)).hop.claim(10, wait_seconds=0)
    assert scored.payload == claim.payload
    assert scored.group().grades_to_wire() == sent.grades_to_wire()
    assert (await ledger_of(plane)).tokens.scored == sent.num_sampled


async def test_a_resolution_whose_answer_was_lost_counts_once(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane
) -> None:
    relay, through = cut
    await issue(plane, 1)
    rollout = through.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    relay.swallow_answer_to(digest("finish"))

    assert await rollout.resolve(claim, Resolution.FAILED, "timeout")

    assert relay.swallowed == 1
    assert (await ledger_of(plane)).failed == {"timeout": 1}


async def test_a_hand_over_whose_answer_was_lost_leaves_one_entry(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane
) -> None:
    relay, through = cut
    await issue(plane, 1)
    rollout = through.hop(HopName.TASKS, "rollout")
    (claim,) = await rollout.claim(wait_seconds=0)
    relay.swallow_answer_to(digest("hand_over"))

    assert await rollout.hand_over(claim, (None, a_trajectory()))

    assert relay.swallowed == 1
    ledger = await ledger_of(plane)
    assert (ledger.waiting.tasks, ledger.claimed.tasks) == (1, 0)


async def test_an_issue_whose_answer_was_lost_says_that_the_cursor_moved(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane
) -> None:
    relay, through = cut
    relay.swallow_answer_to(digest("issue"))

    result = await through.admission.issue_many([a_task(0), a_task(1)], limit=5)

    assert relay.swallowed == 1
    assert (result.outcome, result.next_group_id) == (IssueOutcome.CURSOR_MOVED, 2)
    assert (await ledger_of(plane)).issued == 2


async def test_a_delivery_that_was_lost_comes_again_when_its_lease_ends(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane
) -> None:
    relay, through = cut
    await issue(plane, 1)
    rollout = through.hop(HopName.TASKS, "rollout")
    await rollout.claim(0, wait_seconds=0)
    relay.swallow_answer_to(b"XREADGROUP")

    (claim,) = await rollout.claim(wait_seconds=5)

    assert relay.swallowed == 1
    assert claim.deliveries == 2


@pytest.mark.parametrize("is_cut", [True, False], ids=["its connection broke", "no answer in time"])
@pytest.mark.parametrize("swallowed", ["XREADGROUP", "sweep"])
async def test_a_delivery_to_the_trainer_that_was_lost_comes_again(
    cut: tuple[Relay, RedisDataPlane],
    plane: RedisDataPlane,
    monkeypatch: pytest.MonkeyPatch,
    swallowed: str,
    is_cut: bool,
) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 1.0)
    relay, through = cut
    await issue(plane, 3)
    await move_to_scored(plane, 3)
    trainer = await a_trainer(through)
    held = await trainer.hop.claim(wait_seconds=0)
    if swallowed == "sweep":
        trainer = await a_trainer(through)  # what the first one held waits to be swept
        held = []
    lose = relay.swallow_answer_to if is_cut else relay.withhold_answer_to
    lose(b"XREADGROUP" if swallowed == "XREADGROUP" else digest("sweep"))

    while len(held) < 3:
        claims = await trainer.hop.claim(3, wait_seconds=3)
        assert claims
        held += claims

    assert relay.swallowed == 1
    assert sorted(claim.header.group_id for claim in held) == [0, 1, 2]
    assert await trainer.plan(1, held, version=0)
    assert (await ledger_of(plane)).planned == 3


async def test_a_delivery_to_the_trainer_that_takes_effect_after_it_was_given_up_comes_again(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was stopped reads what a connection sent before it was closed."""
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(hop, "STRAYS_SECONDS", 0.2)
    relay, through = cut
    trainer = await a_trainer(through)
    await trainer.hop.claim(wait_seconds=0.1)
    relay.hold_back(b"XREADGROUP")
    assert await trainer.hop.claim(wait_seconds=1.6) == []
    assert await trainer.hop.claim(wait_seconds=0.1) == [], "the look after a call that failed"
    await issue(plane, 1)
    await move_to_scored(plane, 1)

    relay.release()
    async with asyncio.timeout(10):
        while not (await ledger_of(plane)).claimed.scored:
            await asyncio.sleep(0.01)

    assert await claim_ids(trainer.hop, wait_seconds=5) == [0]


async def test_a_plan_and_its_commit_survive_lost_answers(
    cut: tuple[Relay, RedisDataPlane], plane: RedisDataPlane
) -> None:
    relay, through = cut
    await issue(plane, 2)
    await move_to_scored(plane, 2)
    relay.swallow_answer_to(digest("take_over"))
    trainer = await a_trainer(through)
    claims = await trainer.hop.claim(2, wait_seconds=1)

    relay.swallow_answer_to(digest("plan"))
    assert await trainer.plan(1, claims, version=0)
    relay.swallow_answer_to(digest("commit"))
    await trainer.commit([1])

    assert relay.swallowed == 3
    ledger = await ledger_of(plane)
    assert (ledger.planned, ledger.trained, ledger.consumed_since_publication) == (0, 2, 2)


async def test_a_server_that_is_away_is_unavailable_after_the_deadline(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/nobody.sock")
    plane = RedisDataPlane(client, "e", config=StreamsConfig(deadline_seconds=0.2))

    for call in (
        plane.ledger(),
        plane.hop(HopName.TASKS, "rollout").claim(wait_seconds=0),
        plane.admission.next_group_id(),
        plane.trainer("trainer").replay(1),
    ):
        with pytest.raises(Unavailable):
            await call
    await client.aclose()


async def test_a_connection_is_used_again_unless_it_is_closed(redis_url: str) -> None:
    async with connect(redis_url) as client, connect(redis_url) as other:
        own = await client.client_id()
        with pytest.raises(ResponseError):
            await client.execute_command("NONE")
        assert await client.client_id() == own, "a refusal is an answer"

        assert await other.execute_command("CLIENT", "KILL", "ID", own) == 1
        await asyncio.sleep(0.05)

        assert await client.client_id() != own


async def test_an_answer_that_nobody_waited_for_is_no_other_commands(redis_url: str, experiment_id: str) -> None:
    async with connect(redis_url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.execute_command("BLPOP", experiment_id, 0.1)
        await asyncio.sleep(0.1)

        assert [await client.execute_command("ECHO", str(number)) for number in range(3)] == [b"0", b"1", b"2"]
        at_once = await asyncio.gather(*(client.execute_command("ECHO", str(number)) for number in range(32)))
        assert at_once == [str(number).encode() for number in range(32)]
