"""Requests of the Tinker API in a real Redis: in order, once, and answered by the latest process alone."""

from collections.abc import AsyncIterator

import pytest

from flotilla.shared.errors import ClaimLost, Conflict, NotFound
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.queue import Answer, Request, TinkerQueue, Work, request_id_of
from flotilla.shared.tinker.records import Model, Sampler, Verb

MODEL = "s:train:0"
NOW = 5.0


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[TinkerQueue]:
    redis = connect(redis_url)
    await redis.flushdb()
    yield TinkerQueue(redis)
    await redis.aclose()


def a_request(seq: int, body: bytes = b"x") -> Request:
    verb = Verb.CREATE if seq == 0 else Verb.OPTIM_STEP
    return Request(request_id_of(MODEL, seq), "", verb, seq, MODEL, body)


async def make(queue: TinkerQueue) -> None:
    model = Model(model_id=MODEL, session_id="s", owner="me", created=1.0)
    await queue.submit(a_request(0), "d0", NOW, model)


async def waiting(queue: TinkerQueue, work: Work = Work.TRAIN) -> list[Request]:
    return await queue.waiting(work, "0", 100, blocks=False)


async def test_requests_that_come_out_of_order_are_handed_on_in_order(queue: TinkerQueue) -> None:
    await make(queue)

    for seq in (3, 2):
        await queue.submit(a_request(seq), f"d{seq}", NOW)
    held_back = [each.seq for each in await waiting(queue)]
    await queue.submit(a_request(1), "d1", NOW)

    assert held_back == [0]
    assert [(each.seq, each.body) for each in await waiting(queue)] == [(0, b"x"), (1, b"x"), (2, b"x"), (3, b"x")]
    assert await queue.models() == [(MODEL, NOW)]


async def test_a_request_that_comes_again_is_the_same_one_and_another_is_refused(queue: TinkerQueue) -> None:
    await make(queue)

    for _ in range(2):
        await queue.submit(a_request(1), "d1", NOW)

    assert [each.seq for each in await waiting(queue)] == [0, 1]
    with pytest.raises(Conflict):
        await queue.submit(a_request(1, b"y"), "other", NOW)


async def test_a_model_that_was_not_made_takes_no_request(queue: TinkerQueue) -> None:
    with pytest.raises(NotFound):
        await queue.submit(a_request(1), "d1", NOW)


async def test_an_answer_is_written_once_and_moves_the_model_on(queue: TinkerQueue) -> None:
    await make(queue)
    mine = await queue.begin(Work.TRAIN)
    (request,) = await waiting(queue)

    sampler = Sampler(session_id="s", owner="me", path="tinker://x")
    await queue.reply(Work.TRAIN, mine, request, Answer.json({"a": 1}), ("s:sample:0", sampler))
    await queue.reply(Work.TRAIN, mine, request, Answer.json({"a": 2}))

    found = await queue.answer(request.id)
    assert found == Answer.json({"a": 1})
    assert await queue.progress(MODEL) == 0
    assert await waiting(queue) == []
    assert await queue.sampler("s:sample:0") == sampler
    assert (await queue.done_since("0"))[1][0] == request.id


async def test_a_process_that_was_replaced_answers_nothing(queue: TinkerQueue) -> None:
    await make(queue)
    old = await queue.begin(Work.TRAIN)
    new = await queue.begin(Work.TRAIN)
    (request,) = await waiting(queue)

    with pytest.raises(ClaimLost):
        await queue.reply(Work.TRAIN, old, request, Answer.json({}))
    assert await queue.answer(request.id) is None
    await queue.reply(Work.TRAIN, new, request, Answer.json({}))


async def test_past_requests_are_read_again_until_their_bodies_are_let_go(queue: TinkerQueue) -> None:
    await make(queue)
    for seq in (1, 2):
        await queue.submit(a_request(seq), f"d{seq}", NOW)

    await queue.forget_bodies(MODEL, 0, 1)

    assert [(each.seq, each.body) async for each in queue.past(MODEL, 0, 2)] == [(0, b""), (1, b""), (2, b"x")]
    # Its place stays taken.
    await queue.submit(a_request(1), "d1", NOW)
    with pytest.raises(Conflict):
        await queue.submit(a_request(1), "other", NOW)


async def test_attempts_are_counted_of_each_kind_of_work_and_of_known_requests(queue: TinkerQueue) -> None:
    await make(queue)
    (request,) = await waiting(queue)

    found = [await queue.attempt(request, work) for work in (Work.TRAIN, Work.TRAIN, Work.SCORE, Work.TRAIN)]

    assert found == [1, 2, 1, 3]
    assert await queue.attempt(a_request(9), Work.TRAIN) == 1
    assert not await queue.knows(a_request(9).id)


async def test_a_sample_that_is_scored_has_two_parts(queue: TinkerQueue) -> None:
    await queue.ask("q", b"body", "d", is_scored=True)
    sampling, scoring = await queue.begin(Work.SAMPLE), await queue.begin(Work.SCORE)
    (to_sample,), (to_score,) = await waiting(queue, Work.SAMPLE), await waiting(queue, Work.SCORE)

    await queue.reply(Work.SAMPLE, sampling, to_sample, Answer.json({"part": 1}))
    await queue.reply(Work.SCORE, scoring, to_score, Answer.json({"part": 2}))

    assert (to_sample.body, to_score.body) == (b"body", b"body")
    assert await queue.answer("q") == Answer.json({"part": 1})
    assert await queue.answer("q", Work.SCORE) == Answer.json({"part": 2})
    with pytest.raises(Conflict):
        await queue.ask("q", b"other", "other", is_scored=True)
