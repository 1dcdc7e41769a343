"""The trainer's worker on a real queue and model: more models than memory holds, and a process that takes over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.trainer.tinker.slots import Base
from flotilla.services.trainer.tinker.trainer import Trainer
from flotilla.services.trainer.tinker.worker import TrainingWorker
from flotilla.shared.clock import ManualClock
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.queue import Request, TinkerQueue
from flotilla.shared.tinker.records import AdamStep, Lora, Model, Verb
from flotilla.shared.tinker.sessions import TinkerSessions
from flotilla.shared.tinker.store import request_id_of
from tests.fleet import tiny_model
from tests.integration.tinker.test_trainer import a_pass, loss_of, made

STEPS = 6


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[TinkerQueue]:
    redis = connect(redis_url)
    await redis.flushdb()
    yield TinkerQueue(redis)
    await redis.aclose()


def lora(number: int) -> Lora:
    return Lora(rank=2 + number, seed=number)


async def submit(queue: TinkerQueue, number: int, first: int, steps: int) -> list[str]:
    """Ask for steps of a model; returns the ids of its passes."""
    run, owner = f"s:train:{number}", f"owner {number}"
    model = Model(model_id=run, session_id="s", owner=owner, lora=lora(number))
    update = AdamStep(learning_rate=1e-2).model_dump_json().encode()
    asked = [(Verb.CREATE, b"")] if first == 0 else []
    asked += [(Verb.FORWARD_BACKWARD, a_pass()), (Verb.OPTIM_STEP, update)] * steps
    for seq, (verb, body) in enumerate(asked, first):
        request = Request(request_id_of(run, seq), "", verb, seq, run, body, owner)
        await queue.submit(request, str(seq), 1.0, model if verb is Verb.CREATE else None)
    verbs = enumerate(asked, first)
    return [request_id_of(run, seq) for seq, (verb, _) in verbs if verb is Verb.FORWARD_BACKWARD]


async def answered(queue: TinkerQueue, sessions: TinkerSessions, trainer: Trainer, *owners: str) -> None:
    """Have a worker answer all that waits."""
    working = asyncio.create_task(TrainingWorker(queue, sessions, trainer).run())
    async with asyncio.timeout(240):
        while any([(await queue.ledger(owner)).waiting for owner in owners]):
            assert not working.done()
            await asyncio.sleep(0.05)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def contents(redis: Any) -> dict[bytes, bytes]:
    return {name: await redis.dump(name) for name in await redis.keys("*")}


async def become(redis: Any, kept: dict[bytes, bytes]) -> None:
    await redis.flushdb()
    for name, value in kept.items():
        await redis.restore(name, 0, value)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_redis_that_comes_back_older_than_the_trainers_disk_applies_no_request_twice(
    queue: TinkerQueue, redis_url: str, tmp_path: Path, *, is_restarted: bool
) -> None:
    base = Base(tiny_model(), device="cpu", dtype="float32")
    expected = made(base, tmp_path / "quiet", 0, lora(0)).learns(10)
    redis = connect(redis_url)
    sessions = TinkerSessions(redis, queue)
    trainer = Trainer(base, "tiny", tmp_path / "data", ManualClock())
    passes = await submit(queue, 0, 0, 3)
    await answered(queue, sessions, trainer, "owner 0")
    older = await contents(redis)
    passes += await submit(queue, 0, 7, 6)
    await answered(queue, sessions, trainer, "owner 0")

    # The ninth update is lost, and the state on the disk, behind the eighth, is newer than what is left.
    await become(redis, older)
    if is_restarted:
        trainer = Trainer(base, "tiny", tmp_path / "data", ManualClock())
    await submit(queue, 0, 7, 7)
    await answered(queue, sessions, trainer, "owner 0")

    answers = [await queue.answer(each) for each in [*passes, request_id_of("s:train:0", 19)]]
    assert [loss_of(each) for each in answers if each is not None] == expected
    await redis.aclose()


async def test_models_share_less_memory_than_they_need_and_a_takeover_changes_no_loss(
    queue: TinkerQueue, redis_url: str, tmp_path: Path
) -> None:
    base = Base(tiny_model(), device="cpu", dtype="float32")
    expected = [made(base, tmp_path / str(number), number, lora(number)).learns(STEPS) for number in range(2)]
    redis = connect(redis_url)
    sessions = TinkerSessions(redis, queue)
    passes: list[list[str]] = [[], []]

    for first, steps in ((0, 3), (7, STEPS - 3)):
        trainer = Trainer(base, "tiny", tmp_path / "shared", ManualClock(), most_models=1)
        for number in range(2):
            passes[number] += await submit(queue, number, first, steps)
        await answered(queue, sessions, trainer, "owner 0", "owner 1")
        assert len(trainer.models()) == 2

    answers = [[await queue.answer(each) for each in ids] for ids in passes]
    assert [[loss_of(each) for each in of_one if each is not None] for of_one in answers] == expected
    assert (await queue.ledger("owner 0")).done == 1 + 2 * STEPS
    await redis.aclose()
