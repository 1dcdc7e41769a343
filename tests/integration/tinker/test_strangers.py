"""Nothing of one key's sessions, models, answers and saved models is there for another; what ended leaves nothing."""

import json
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.tinker.bodies import (
    AskSample,
    CreateModel,
    CreateSampler,
    LoadWeights,
    OfModel,
    OptimStep,
    SaveForSampler,
    SaveWeights,
)
from flotilla.services.gateway.tinker.opening import EndedSessions
from flotilla.services.gateway.tinker.tinker import GRACE_SECONDS, SESSION_SECONDS, Gone, Tinker
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import FlotillaError, NotFound
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.messages import put_bytes, put_int
from flotilla.shared.tinker.paths import Kind, SavedPath, state_of
from flotilla.shared.tinker.queue import Answer, Made, TinkerQueue, Work
from flotilla.shared.tinker.records import (
    MANIFEST,
    AdamStep,
    Chunk,
    Lora,
    Prompt,
    Sampled,
    SampledSequences,
    Saved,
)
from flotilla.shared.tinker.sessions import TinkerSessions
from flotilla.shared.tinker.store import PREFIX, short_name

ME, STRANGER = Principal(Scope.TINKER, "me"), Principal(Scope.TINKER, "stranger")
PROMPT = Prompt(chunks=[Chunk(tokens=[1, 2, 3])])


@dataclass
class Served:
    """The gateway's side, on a real Redis."""

    tinker: Tinker
    queue: TinkerQueue
    sessions: TinkerSessions
    clock: ManualClock
    data: Path
    redis: Any

    async def answer(self, work: Work, owner: Principal = ME, made: Made | None = None) -> None:
        """Answer all that waits."""
        incarnation = await self.queue.begin(work)
        for request in await self.queue.waiting(work, short_name(owner.actor), "0", 100):
            await self.queue.reply(work, incarnation, request, Answer.json({}), made or Made())

    def save(self, path: SavedPath, *, is_public: bool = False) -> None:
        """Put a saved model of mine on the disk."""
        directory = path.below(self.data)
        directory.mkdir(parents=True)
        saved = Saved(
            path=str(path), owner=ME.actor, created=0.0, step=1, num_bytes=1, lora=Lora(rank=1), is_public=is_public
        )
        (directory / MANIFEST).write_text(saved.model_dump_json(), encoding="utf-8")


@pytest.fixture
async def served(redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    redis = connect(redis_url)
    await redis.flushdb()
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    queue, clock = TinkerQueue(redis), ManualClock()
    sessions = TinkerSessions(redis, queue)
    yield Served(Tinker(tmp_path, tmp_path, queue, sessions, clock), queue, sessions, clock, tmp_path, redis)
    await redis.aclose()


async def opened(served: Served) -> tuple[str, str, str]:
    """Open a session with a model and a sampling session; returns their ids."""
    session = await served.tinker.create_session(ME, [], "")
    made = CreateModel(session_id=session, model_seq_id=0, base_model=served.data.name, lora_config=Lora(rank=1))
    model = (await served.tinker.create_model(ME, made)).model_id
    opening = CreateSampler(session_id=session, sampling_session_seq_id=0, base_model=served.data.name)
    return session, model, await served.tinker.create_sampler(ME, opening)


async def test_a_stranger_reaches_nothing_by_the_ids_of_another(served: Served) -> None:
    tinker = served.tinker
    session, model, sampler = await opened(served)
    asked = AskSample(prompt=PROMPT, sampling_session_id=sampler, seq_id=1)
    request_id, (sequence_id,) = await tinker.sample(ME, asked)
    runs = SampledSequences(sequences=[[Sampled(first_token=0)]]).model_dump_json()
    await served.answer(Work.SAMPLE, made=Made(sampled=runs))
    await served.answer(Work.TRAIN)
    mine = SavedPath(model, Kind.SAMPLER, "mine")
    served.save(mine)
    training = SavedPath(model, Kind.TRAINING, "mine")
    served.save(training)
    theirs = await tinker.create_session(STRANGER, [], "")
    raw = put_bytes(1, model.encode()) + put_int(2, 1)
    of_model = OfModel(model_id=model)

    def reaches(who: Principal) -> list[Awaitable[object]]:
        mine_here = session if who is ME else theirs
        return [
            tinker.session(who, session),
            tinker.heartbeat(who, session),
            tinker.model(who, model),
            tinker.sampler(who, sampler),
            tinker.sampled(who, sequence_id),
            tinker.answer(who, request_id),
            tinker.answer(who, f"{model}:0"),
            tinker.create_model(who, CreateModel(session_id=session, model_seq_id=7, base_model=served.data.name)),
            tinker.forward_backward(who, raw),
            tinker.optim_step(
                who,
                OptimStep(model_id=model, seq_id=2, optim_params=AdamStep()),  # type: ignore[call-arg]
            ),
            tinker.save(who, SaveWeights(model_id=model, seq_id=3)),
            tinker.save_for_sampler(who, SaveForSampler(model_id=model, seq_id=4, path="x")),
            tinker.unload(who, of_model.model_copy(update={"seq_id": 5})),
            tinker.load(who, LoadWeights(path=str(training), session_id=mine_here, model_seq_id=9)),
            tinker.create_sampler(
                who, CreateSampler(session_id=mine_here, sampling_session_seq_id=1, model_path=str(mine))
            ),
            tinker.sample(who, AskSample(prompt=PROMPT, model_path=str(mine))),
            tinker.sample(who, AskSample(prompt=PROMPT, sampling_session_id=sampler, seq_id=2)),
            tinker.finish_session(who, session),
        ]

    for each in reaches(STRANGER):
        with pytest.raises((NotFound, Gone)):
            await each
    assert [each.waiting for each in await tinker.ledgers(STRANGER)] == [0]
    assert await tinker.runs(STRANGER) == (0, [])
    # The same calls are right where they are one's own.
    for each in reaches(ME):
        await each


async def test_what_is_published_is_read_and_not_changed_by_a_stranger(served: Served) -> None:
    _, model, _ = await opened(served)
    path = SavedPath(model, Kind.SAMPLER, "mine")
    served.save(path, is_public=True)

    assert served.tinker.saved.read(STRANGER, path).path == str(path)
    with pytest.raises(NotFound):
        served.tinker.saved.change(STRANGER, path, is_public=False)
    with pytest.raises(NotFound):
        served.tinker.saved.delete(STRANGER, path)


async def test_a_session_that_is_not_heard_of_leaves_what_was_saved_under_a_name_and_nothing_else(
    served: Served,
) -> None:
    session, model, sampler = await opened(served)
    await served.tinker.sample(ME, AskSample(prompt=PROMPT, sampling_session_id=sampler, seq_id=1))
    named = SavedPath(model, Kind.TRAINING, "mine")
    for path in (named, SavedPath(model, Kind.EPHEMERAL, "1")):
        served.save(path)
    state_of(served.data, model).mkdir(parents=True)
    ended = EndedSessions(served.sessions, served.tinker.saved, served.clock)
    served.clock.advance(SESSION_SECONDS - 1)
    assert await ended.let_go() == 0

    served.clock.advance(2)
    assert await ended.let_go() == 0, "a request is being done"
    await served.answer(Work.TRAIN)
    await served.answer(Work.SAMPLE)
    assert await ended.let_go() == 1

    with pytest.raises(Gone):
        await served.tinker.heartbeat(ME, session)
    assert [each.name for each in (served.data / "tinker" / "saved" / model).iterdir()] == [Kind.TRAINING]
    assert not state_of(served.data, model).exists()
    _, mine = await served.tinker.runs(ME)
    assert [each.model.model_id for each in mine] == [model]
    with pytest.raises(FlotillaError):
        await served.tinker.optim_step(
            ME,
            OptimStep(model_id=model, seq_id=1, optim_params=AdamStep()),  # type: ignore[call-arg]
        )


async def test_a_finished_session_is_kept_for_a_moment_and_a_heard_one_for_ever(served: Served) -> None:
    session, _, _ = await opened(served)
    other = await served.tinker.create_session(ME, [], "")
    await served.answer(Work.TRAIN)
    ended = EndedSessions(served.sessions, served.tinker.saved, served.clock)
    await served.tinker.finish_session(ME, session)

    served.clock.advance(GRACE_SECONDS - 1)
    assert await ended.let_go() == 0
    served.clock.advance(2)
    assert await ended.let_go() == 1
    served.clock.advance(SESSION_SECONDS - GRACE_SECONDS - 2)
    await served.tinker.heartbeat(ME, other)
    served.clock.advance(SESSION_SECONDS - 1)
    assert await ended.let_go() == 0

    left = {key.decode().removeprefix(PREFIX) for key in await served.redis.keys("*")}
    assert not {key for key in left if session in key and not key.startswith(("request:", "answer:"))}
