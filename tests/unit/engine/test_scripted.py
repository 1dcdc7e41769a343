"""What the scripted engine offers to tests beyond the protocol."""

import asyncio

import pytest

from flotilla.services.rollout.engines.scripted import ScriptedEngine, log_prob_of
from flotilla.shared.errors import WorkerDied
from tests.contract.engine.requests import a_request


async def test_tokens_come_from_the_function() -> None:
    engine = ScriptedEngine(lambda prompt, seed, position, version: prompt[0] + seed + position + version, version=100)
    await engine.start()

    [completion] = await engine.generate(a_request([10], seeds=(5,), max_new_tokens=3))

    assert completion.token_ids.tolist() == [115, 116, 117]
    assert completion.log_probs.tolist() == pytest.approx([log_prob_of(token) for token in (115, 116, 117)])
    await engine.close()


async def test_a_paused_engine_takes_calls_and_samples_nothing() -> None:
    engine = ScriptedEngine()
    await engine.start()
    engine.pause()
    running = asyncio.create_task(engine.generate(a_request(max_new_tokens=2)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await engine.load()).generated_tokens == 0

    engine.resume()

    assert len(await running) == 1
    await engine.close()


async def test_a_dead_engine_fails_every_call() -> None:
    engine = ScriptedEngine()
    await engine.start()
    engine.pause()
    running = asyncio.create_task(engine.generate(a_request()))
    await asyncio.sleep(0)

    engine.die()

    with pytest.raises(WorkerDied, match="told to die"):
        await running
    with pytest.raises(WorkerDied):
        await engine.load()
