"""A server comes back without the end of its log: a subscriber takes each group of its source once, and misses none."""

from pathlib import Path

import pytest

from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, graded
from tests.contract.streams.conftest import claim_ids, issue, ledger_of
from tests.integration.streams.test_server_crash import lose_the_end_of_the_log
from tests.integration.trainer.test_lost_tail import a_server, written


async def score(plane: RedisDataPlane, *group_ids: int) -> None:
    """Let these groups be scored in this order."""
    hop, held = plane.hop(HopName.TASKS, "rollout"), {}
    for claim in await hop.claim(9, wait_seconds=1.0):
        held[claim.header.group_id] = claim
    reward = plane.hop(HopName.GENERATED, "reward")
    for group_id in group_ids:
        assert await hop.forward(held.pop(group_id), a_group(group_id))
        [claim] = await reward.claim(1, wait_seconds=1.0)
        assert await reward.forward(claim, graded(claim.group(), [0.0, 1.0]))
    for claim in held.values():
        assert await hop.hand_back(claim)


@pytest.mark.parametrize("when", ["read", "taken"])
async def test_what_was_read_before_is_not_taken_for_what_has_the_number_since(tmp_path: Path, when: str) -> None:
    directory = tmp_path / "redis"
    async with a_server(directory) as (server, source):
        taker = RedisDataPlane(source._runner.redis, "taker")
        life = await taker.admission.life()
        subscribed = await source.sharing.subscribe("taker")
        await taker.admission.begin_taking(subscribed, life)
        await issue(source, 2)
        size = await written(directory)
        await score(source, 1)
        read = await source.sharing.read(0, 10)
        assert [(each.number, each.header.group_id) for each in read.groups] == [(1, 1)]
        taken = await taker.admission.take(read, limit=100, life=life) if when == "taken" else None
        server.kill()
        lose_the_end_of_the_log(directory, await written(directory) - size)
        server.start()

        # The calls that were on their way reach the server that has forgotten what they were made of.
        with pytest.raises(Unavailable, match="restarted"):
            if taken is None:
                await taker.admission.take(read, limit=100, life=life)
            else:
                await source.sharing.confirm("taker", taken.through, read.life)
        with pytest.raises(Unavailable, match="restarted"):
            await taker.admission.begin_taking(1, life)
        await score(source, 0, 1)

        with pytest.raises(Unavailable, match="restarted"):
            await source.sharing.confirm("taker", 1, "another life")
        again = await source.sharing.read(await taker.admission.taken_through(), 10)
        taken = await taker.admission.take(again, limit=100, life=await taker.admission.life())
        await source.sharing.confirm("taker", taken.through, again.life)
        assert (taken.count, taken.through) == (2, 2)
        ledger = await ledger_of(taker)
        assert (ledger.issued, ledger.outstanding, ledger.dropped) == (2, 2, {})
        trainer = taker.trainer("trainer")
        await trainer.take_over()
        assert await claim_ids(trainer.hop) == [0, 1]
