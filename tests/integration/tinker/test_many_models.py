"""Eight models of different ranks on one base: one trainer, one engine that samples from all of them at once."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.tinker.worker import SamplingWorker
from flotilla.services.trainer.tinker.slots import Base
from flotilla.services.trainer.tinker.trainer import Trainer
from flotilla.services.trainer.tinker.worker import TrainingWorker
from flotilla.shared.clock import ManualClock
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.messages import as_bytes, fields_of, put_bytes, put_entry
from flotilla.shared.tinker.queue import Answer, Form, Request, TinkerQueue
from flotilla.shared.tinker.records import AdamStep, Chunk, Lora, Model, Prompt, Sample, Sampling, Save, Verb
from flotilla.shared.tinker.sessions import TinkerSessions
from flotilla.shared.tinker.store import request_id_of
from tests.fleet import tiny_model
from tests.integration.tinker.test_trainer import loss_of, tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"),
]

RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
STEPS, SAMPLES, TOKENS, LONG = 10, 32, 6, 50
LEARNING_RATE = 6e-3
"""Times the rank, since B A is divided by it."""
LOW = 193
PROMPT = [5, 6, 7, 8]
SECONDS = 240
Sequence = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Counting(ProcessEngine):
    """An engine that tells how often its weights were replaced, and how many models were in one batch at most."""

    def __init__(self) -> None:
        super().__init__(EngineSettings(str(tiny_model()), slots=128, context_tokens=64))
        self.num_loads, self.most = 0, 0
        self._sampling: list[str | None] = []

    async def load_weights(self, *arguments: Any) -> None:
        """Count it."""
        self.num_loads += 1
        await super().load_weights(*arguments)

    async def generate(self, request: Any) -> Any:
        """Count the adapters that are sampled from meanwhile."""
        self._sampling.append(request.adapter)
        self.most = max(self.most, len(set(self._sampling)))
        try:
            return await super().generate(request)
        finally:
            self._sampling.remove(request.adapter)


class Loop:
    """What one client asks for: each step samples from what was saved, and learns to write low token ids."""

    def __init__(self, queue: TinkerQueue, rank: int) -> None:
        self.queue, self.rank = queue, rank
        self.model = Model(model_id=f"s{rank}:train:0", session_id=f"s{rank}", owner=f"o{rank}", lora=Lora(rank=rank))
        self._numbers = itertools.count()
        self.losses: list[float] = []
        self.rewards: list[float] = []

    async def run(self, steps: int = STEPS) -> "Loop":
        """Go on for some steps."""
        await self._asks(Verb.CREATE)
        for step in range(steps):
            path = f"{self.saved}/{step}"
            await self._asks(Verb.SAVE_FOR_SAMPLER, Save(path=path).model_dump_json().encode())
            found = await self.samples(path, step)
            self.rewards.append(float(np.mean([tokens < LOW for tokens, _ in found])))
            body = _learn(found, self.rewards[-1])
            self.losses.append(loss_of(await self._asks(Verb.FORWARD_BACKWARD, body)))
            await self._asks(
                Verb.OPTIM_STEP, AdamStep(learning_rate=LEARNING_RATE * self.rank).model_dump_json().encode()
            )
        return self

    async def _asks(self, verb: Verb, body: bytes = b"") -> Answer:
        seq, run = next(self._numbers), self.model.model_id
        request = Request(request_id_of(run, seq), "", verb, seq, run, body, self.model.owner)
        await self.queue.submit(request, str(seq), 1.0, self.model if verb is Verb.CREATE else None)
        return await self._answer(request.id)

    @property
    def saved(self) -> str:
        """Where its saved weights are."""
        return f"tinker://{self.model.model_id}/sampler_weights"

    async def samples(self, path: str, seed: int, tokens: int = TOKENS) -> list[Sequence]:
        """Sample from saved weights."""
        how = Sampling(max_tokens=tokens, seed=seed, stop=[])
        prompt = Prompt(chunks=[Chunk(tokens=PROMPT)])
        wanted = Sample(prompt=prompt, path=path, num_samples=SAMPLES, sampling_params=how)
        name = f"sample:{self.model.model_id}:{seed}"
        await self.queue.ask(name, wanted.model_dump_json().encode(), name, self.model.owner, is_scored=False)
        return _sequences((await self._answer(name)).content)

    async def _answer(self, name: str) -> Answer:
        while (found := await self.queue.answer(name)) is None:
            await asyncio.sleep(0.01)
        assert found.form is not Form.FAILED, found.content
        return found


def _sequences(content: bytes) -> list[Sequence]:
    found: list[Sequence] = []
    for number, value in fields_of(memoryview(content)):
        if number == 1:
            fields = dict(fields_of(memoryview(as_bytes(value))))
            tokens, log_probs = (as_bytes(fields[each]) for each in (2, 3))
            found.append((np.frombuffer(tokens, "<i4"), np.frombuffer(log_probs, "<f4")))
    return found


def _learn(found: list[Sequence], baseline: float) -> bytes:
    data, before = [], len(PROMPT) - 1
    for tokens, log_probs in found:
        whole = np.array([*PROMPT, *tokens], "<i4")
        given = {
            "target_tokens": tensor([0] * before + tokens.tolist(), 2),
            "logprobs": tensor([0.0] * before + log_probs.tolist(), 1),
            "advantages": tensor([0.0] * before + ((tokens < LOW) - baseline).tolist(), 1),
        }
        text = put_bytes(1, put_bytes(1, put_bytes(1, whole[:-1].tobytes())))
        data.append(put_bytes(3, text + b"".join(put_entry(2, key, put_bytes(2, each)) for key, each in given.items())))
    return put_bytes(4, b"importance_sampling") + b"".join(data)


class Fleet:
    """Trainer and sampler at work on a queue of their own."""

    def __init__(self, queue: TinkerQueue, engine: Counting) -> None:
        self.queue, self.engine = queue, engine


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    redis = connect(redis_url)
    await redis.flushdb()
    queue = TinkerQueue(redis)
    sessions = TinkerSessions(redis, queue)
    engine = Counting()
    await engine.start()
    trainer = Trainer(Base(tiny_model(), device="cpu", dtype="float32"), "tiny", tmp_path, ManualClock())
    working = [
        asyncio.create_task(TrainingWorker(queue, sessions, trainer).run()),
        asyncio.create_task(SamplingWorker(queue, sessions, engine, tiny_model(), tmp_path, 64).run()),
    ]
    try:
        async with asyncio.timeout(SECONDS):
            yield Fleet(queue, engine)
        assert not any(each.done() for each in working)
    finally:
        for each in working:
            each.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await engine.close()
        await redis.aclose()


async def test_eight_models_of_different_ranks_learn_side_by_side_as_each_alone(fleet: Fleet) -> None:
    loops = [Loop(fleet.queue, rank) for rank in RANKS]
    ended = asyncio.create_task(loops[3].run())

    async def gone() -> None:
        """End one client in the middle of its second step."""
        while not loops[3].losses:
            await asyncio.sleep(0.01)
        ended.cancel()

    others = [loop for loop in loops if loop is not loops[3]]
    await asyncio.gather(gone(), *(loop.run() for loop in others))

    assert ended.cancelled() or ended.cancelling()
    assert len(loops[3].losses) < STEPS
    for loop in others:
        assert np.mean(loop.rewards[-3:]) > np.mean(loop.rewards[:2]) + 0.08, (loop.rank, loop.rewards)
    await asyncio.gather(*(loop.samples(f"{loop.saved}/0", seed=100, tokens=LONG) for loop in others))
    assert fleet.engine.num_loads == 0
    assert fleet.engine.most > 1


async def test_a_model_has_the_losses_beside_others_that_it_has_alone(fleet: Fleet) -> None:
    beside = [Loop(fleet.queue, each) for each in RANKS]
    await asyncio.gather(*(loop.run(2) for loop in beside))

    for one in (beside[0], beside[-1]):
        alone = Loop(fleet.queue, one.rank)
        again = f"again{one.rank}"
        alone.model = alone.model.model_copy(update={"model_id": f"{again}:train:0", "session_id": again})
        await alone.run(2)
        assert (alone.losses, alone.rewards) == (one.losses, one.rewards)
