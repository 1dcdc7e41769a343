"""A server that refuses for a reason of its own is waited for; nothing is lost, and nothing happens twice."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flotilla.cli.redis_server import LocalRedis, find_server
from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.hop import HopName, Resolution, StreamsConfig
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from flotilla.shared.testing.builders import a_group, a_task
from tests.contract.streams.conftest import a_trainer, issue, ledger_of
from tests.integration.streams.proxy import relaying
from tests.integration.streams.refusals import REFUSALS, read_only, small_disk

BINARIES = sorted({find_server(), *(path for path in [Path("/usr/bin/redis-server")] if path.exists())})


@pytest.fixture(scope="module", params=BINARIES, ids=lambda path: path.name)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server's url, and its directory on a small disk."""
    with (
        small_disk(tmp_path_factory.mktemp("small") / "disk") as disk,
        LocalRedis(disk / "redis", binary=request.param) as running,
    ):
        yield running.url, disk / "redis"


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("sampled_tokens", [5, 20_000], ids=["script", "transaction"])
async def test_a_refusal_is_named_and_passes_without_an_effect(
    server: tuple[str, Path], code: str, sampled_tokens: int
) -> None:
    url, directory = server
    refusal, name = REFUSALS[code]
    async with connect(url) as redis:
        experiment_id = uuid.uuid4().hex
        plane = RedisDataPlane(redis, experiment_id, config=StreamsConfig(deadline_seconds=20))
        impatient = RedisDataPlane(redis, experiment_id, config=StreamsConfig(deadline_seconds=0.3))
        await issue(plane, 3)
        rollout = impatient.hop(HopName.TASKS, "rollout")
        first, second = await rollout.claim(2, wait_seconds=0)
        groups = [a_group(claim.task(), sampled_tokens=sampled_tokens) for claim in (first, second)]

        async with refusal(url, directory):
            for call in (
                lambda: issue(impatient, 1, first=3),
                lambda: rollout.forward(first, groups[0]),
                lambda: rollout.forward_many([(first, groups[0]), (second, groups[1])]),
            ):
                with pytest.raises(Unavailable, match=name) as raised:
                    await call()
                # A replica that lost its primary refuses a transaction's write as a write.
                codes = {code, "READONLY"} if code == "MASTERDOWN" else {code}
                assert (raised.value.context["component"], raised.value.context["condition"] in codes) == (
                    "redis",
                    True,
                )

        assert await plane.hop(HopName.TASKS, "other").claim(2, wait_seconds=0)
        patient = plane.hop(HopName.TASKS, "rollout")
        patient.consumer = rollout.consumer
        assert await patient.forward_many([(first, groups[0]), (second, groups[1])]) == [True, True]
        ledger = await ledger_of(plane)
        assert (ledger.issued, ledger.waiting.generated, ledger.claimed.tasks) == (3, 2, 1)
        await plane.remove()


async def test_after_a_fail_over_the_address_is_looked_up_again(tmp_path: Path) -> None:
    """The old primary lives on as a replica, and keeps its connections."""
    with LocalRedis(tmp_path / "old") as old, LocalRedis(tmp_path / "new") as new:
        async with connect(new.url) as redis:
            password = (tmp_path / "old" / "redis.password").read_text()
            await redis.config_set("requirepass", password)
        async with relaying(old.url, tmp_path / "relay") as (relay, url), connect(url) as redis:
            plane = RedisDataPlane(redis, "e", config=StreamsConfig(deadline_seconds=10))
            await issue(plane, 1)
            async with read_only(old.url, tmp_path):
                relay.lead_to(urlsplit(new.url).path)

                result = await plane.admission.issue(a_task(1), limit=9)

                assert result.next_group_id == 0, "the new primary has issued nothing"


async def test_a_trainer_and_a_resolution_wait_for_a_disk(server: tuple[str, Path]) -> None:
    url, directory = server
    refusal, name = REFUSALS["MISCONF"]
    async with connect(url) as redis:
        plane = RedisDataPlane(redis, uuid.uuid4().hex, config=StreamsConfig(deadline_seconds=0.3))
        await issue(plane, 1)
        rollout = plane.hop(HopName.TASKS, "rollout")
        (claim,) = await rollout.claim(wait_seconds=0)
        trainer = await a_trainer(plane)

        async with refusal(url, directory):
            with pytest.raises(Unavailable, match=name):
                await rollout.resolve(claim, Resolution.FAILED, "timeout")
            with pytest.raises(Unavailable, match=name):
                await trainer.hop.claim(wait_seconds=0)
            assert (await ledger_of(plane)).claimed.tasks == 1, "what only reads goes on"

        assert await rollout.resolve(claim, Resolution.FAILED, "timeout")
        assert await trainer.hop.claim(wait_seconds=0) == []
        assert (await ledger_of(plane)).failed == {"timeout": 1}
        await plane.remove()
