"""Requests of the Tinker API in a real Redis: in order, once, and answered by the latest process alone."""

from collections.abc import AsyncIterator

import pytest

from flotilla.shared.errors import ClaimLost, Conflict, NotFound, TooManyRequests
from flotilla.shared.schemas.tinker import TinkerLedger
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.queue import Answer, Bounds, Form, Made, Request, TinkerQueue, Work
from flotilla.shared.tinker.records import Category, Failure, Model, Sampler, Session, Update, Verb
from flotilla.shared.tinker.sessions import TinkerSessions
from flotilla.shared.tinker.store import key, request_id_of

MODEL = "s:train:0"
NOW = 5.0
ME = "me"


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[TinkerQueue]:
    redis = connect(redis_url)
    await redis.flushdb()
    yield TinkerQueue(redis, Bounds(requests=4, num_bytes=100, answer_bytes=100))
    await redis.aclose()


@pytest.fixture
async def sessions(redis_url: str, queue: TinkerQueue) -> AsyncIterator[TinkerSessions]:
    redis = connect(redis_url)
    yield TinkerSessions(redis, queue)
    await redis.aclose()


def a_request(seq: int, body: bytes = b"x", verb: Verb = Verb.OPTIM_STEP, owner: str = ME) -> Request:
    return Request(request_id_of(MODEL, seq), "", Verb.CREATE if seq == 0 else verb, seq, MODEL, body, owner)


async def make(queue: TinkerQueue) -> None:
    model = Model(model_id=MODEL, session_id="s", owner="me", created=1.0)
    await queue.submit(a_request(0), "d0", NOW, model)


async def waiting(queue: TinkerQueue, work: Work = Work.TRAIN, owner: str = ME) -> list[Request]:
    return await queue.waiting(work, owner, "0", 100)


async def answered(queue: TinkerQueue, answer: Answer = Answer.json({})) -> None:  # noqa: B008
    mine = await queue.begin(Work.TRAIN)
    for request in await waiting(queue):
        await queue.reply(Work.TRAIN, mine, request, answer)


async def test_requests_that_come_out_of_order_are_handed_on_in_order(queue: TinkerQueue) -> None:
    await make(queue)

    for seq in (3, 2):
        await queue.submit(a_request(seq), f"d{seq}", NOW)
    held_back = [each.seq for each in await waiting(queue)]
    await queue.submit(a_request(1), "d1", NOW)

    assert held_back == [0]
    assert [(each.seq, each.body) for each in await waiting(queue)] == [(0, b"x"), (1, b"x"), (2, b"x"), (3, b"x")]


async def test_an_owner_has_no_more_models_than_it_may_in_all_sessions_together(
    queue: TinkerQueue, sessions: TinkerSessions, redis_url: str
) -> None:
    redis = connect(redis_url)
    bounded = TinkerQueue(redis, Bounds(models=2))

    async def make_one(session: str, owner: str) -> None:
        name = f"{session}:train:0"
        request = Request(request_id_of(name, 0), "", Verb.CREATE, 0, name, b"", owner)
        await bounded.submit(request, "d", NOW, Model(model_id=name, session_id=session, owner=owner, created=1.0))

    for session in ("a", "b"):
        await make_one(session, ME)
    with pytest.raises(TooManyRequests, match="at most 2 models: finish sessions"):
        await make_one("c", ME)
    await make_one("d", "another")
    await sessions.close_models("a")
    await sessions.forget_model("a:train:0", keeps_record=False)
    await make_one("c", ME)
    await redis.aclose()


async def test_a_request_that_comes_again_is_the_same_one_and_another_is_refused(queue: TinkerQueue) -> None:
    await make(queue)

    are_new = [await queue.submit(a_request(1), "d1", NOW) for _ in range(2)]

    assert are_new == [True, False]

    assert [each.seq for each in await waiting(queue)] == [0, 1]
    with pytest.raises(Conflict):
        await queue.submit(a_request(1, b"y"), "other", NOW)


async def test_a_model_that_was_not_made_takes_no_request(queue: TinkerQueue) -> None:
    with pytest.raises(NotFound):
        await queue.submit(a_request(1), "d1", NOW)


async def test_an_answer_is_written_once_and_moves_the_model_on(queue: TinkerQueue, sessions: TinkerSessions) -> None:
    await make(queue)
    mine = await queue.begin(Work.TRAIN)
    (request,) = await waiting(queue)

    sampler = Sampler(session_id="s", owner="me", path="tinker://x")
    made = Made(("s:sample:0", sampler), inflight="tinker://newest")
    await queue.reply(Work.TRAIN, mine, request, Answer.json({"a": 1}), made)
    await queue.reply(Work.TRAIN, mine, request, Answer.json({"a": 2}))

    found = await queue.answer(request.id)
    assert found == Answer.json({"a": 1})
    assert await queue.progress(MODEL) == 0
    assert await waiting(queue) == []
    assert await sessions.sampler("s:sample:0") == sampler
    assert await sessions.inflight(MODEL) == "tinker://newest"
    assert (await queue.done_since("0"))[1][0] == request.id


async def test_each_update_is_noted_once_with_the_losses_whose_gradients_it_used(
    queue: TinkerQueue, sessions: TinkerSessions
) -> None:
    await make(queue)
    mine = await queue.begin(Work.TRAIN)
    update = Update(step=1, grad_norm=0.25, learning_rate=1e-5)
    refused = Answer.failed(Failure(error="not finite", category=Category.USER))
    passed, updated, loaded = Verb.FORWARD_BACKWARD, Verb.OPTIM_STEP, Verb.LOAD
    asked: list[tuple[Verb, Answer]] = [
        (Verb.CREATE, Answer.json({})),
        (passed, Answer(Form.PROTOBUF, b"", loss=0.1)),
        (passed, Answer(Form.PROTOBUF, b"", loss=0.2)),
        (passed, Answer(Form.PROTOBUF, b"", loss=float("inf"))),
        (updated, Answer(Form.JSON, b"{}", update=update)),
        (passed, Answer(Form.PROTOBUF, b"", loss=7.0)),
        (updated, refused),
        (passed, Answer(Form.PROTOBUF, b"", loss=8.0)),
        (loaded, Answer.json({})),
        (updated, Answer(Form.JSON, b"{}", update=update.model_copy(update={"step": 2}))),
    ]
    for seq, (verb, answer) in enumerate(asked):
        if seq:
            await queue.submit(a_request(seq, verb=verb), f"d{seq}", NOW)
        (request,) = await waiting(queue)
        for _ in range(2):
            await queue.reply(Work.TRAIN, mine, request, answer)

    count, found = await sessions.updates(MODEL)

    assert (count, [(each.step, each.loss) for each in found]) == (2, [(1, 0.1 + 0.2), (2, None)])
    assert (found[0].grad_norm, found[0].learning_rate) == (0.25, 1e-5)
    assert found[0].seconds > 1_000_000_000
    assert [each.step for each in (await sessions.updates(MODEL, 1))[1]] == [2]
    await sessions.forget_model(MODEL, keeps_record=False)
    assert await sessions.updates(MODEL) == (0, [])


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
    await queue.ask("q", b"body", "d", ME, is_scored=True)
    sampling, scoring = await queue.begin(Work.SAMPLE), await queue.begin(Work.SCORE)
    (to_sample,), (to_score,) = await waiting(queue, Work.SAMPLE), await waiting(queue, Work.SCORE)

    await queue.reply(Work.SAMPLE, sampling, to_sample, Answer.json({"part": 1}))
    await queue.reply(Work.SCORE, scoring, to_score, Answer.json({"part": 2}))

    assert (to_sample.body, to_score.body) == (b"body", b"body")
    assert await queue.answer("q") == Answer.json({"part": 1})
    assert await queue.answer("q", Work.SCORE) == Answer.json({"part": 2})
    with pytest.raises(Conflict):
        await queue.ask("q", b"other", "other", ME, is_scored=True)


async def test_what_one_owner_has_waiting_is_bounded_and_another_has_its_own_bound(queue: TinkerQueue) -> None:
    await make(queue)
    await queue.submit(a_request(1, b"x" * 80), "d1", NOW)

    with pytest.raises(TooManyRequests, match="100 bytes"):
        await queue.submit(a_request(2, b"x" * 40), "d2", NOW)
    for number in range(2):
        await queue.ask(f"q{number}", b"x", "d", ME, is_scored=False)
    with pytest.raises(TooManyRequests, match="4 requests"):
        await queue.ask("q2", b"x", "d", ME, is_scored=False)
    await queue.ask("q3", b"x" * 99, "d", "other", is_scored=False)

    await answered(queue)
    await queue.submit(a_request(2, b"x" * 40), "d2", NOW)


async def test_what_waits_for_an_earlier_request_does_not_keep_it_out(queue: TinkerQueue) -> None:
    await make(queue)
    for seq in (2, 3, 4):
        await queue.submit(a_request(seq, b"x" * 25), f"d{seq}", NOW)
    with pytest.raises(TooManyRequests):
        await queue.submit(a_request(5), "d5", NOW)

    await queue.submit(a_request(1, b"x" * 25), "d1", NOW)

    assert [each.seq for each in await waiting(queue)] == [0, 1, 2, 3, 4]


async def test_bodies_that_nobody_does_again_are_not_kept(queue: TinkerQueue) -> None:
    await make(queue)
    for seq, verb in enumerate((Verb.FORWARD, Verb.FORWARD_BACKWARD), 1):
        await queue.submit(a_request(seq, b"x", verb), f"d{seq}", NOW)
    await answered(queue)
    await queue.submit(a_request(3, b"x", Verb.FORWARD_BACKWARD), "d3", NOW)
    await queue.submit(a_request(4, b"x", Verb.OPTIM_STEP), "d4", NOW)

    await answered(queue, Answer.failed(Failure(error="no", category=Category.USER)))

    found = [(each.body, each.failed) async for each in queue.past(MODEL, 1, 4)]
    assert found == [(b"", ""), (b"x", ""), (b"", "user"), (b"x", "user")]


async def test_requests_that_were_taken_are_done_or_failed_or_wait(queue: TinkerQueue) -> None:
    await make(queue)
    await queue.ask("q", b"body", "d", ME, is_scored=True)
    await answered(queue, Answer.failed(Failure(error="no", category=Category.USER)))
    sampling = await queue.begin(Work.SAMPLE)
    (to_sample,) = await waiting(queue, Work.SAMPLE)
    for _ in range(2):
        await queue.reply(Work.SAMPLE, sampling, to_sample, Answer.json({}))
    half = await queue.ledger(ME)

    scoring = await queue.begin(Work.SCORE)
    (to_score,) = await waiting(queue, Work.SCORE)
    await queue.reply(Work.SCORE, scoring, to_score, Answer.json({}))

    assert half == TinkerLedger(owner=ME, accepted=2, done=0, failed=1, waiting=1, waiting_bytes=4)
    assert await queue.ledger(ME) == TinkerLedger(owner=ME, accepted=2, done=1, failed=1, waiting=0, waiting_bytes=0)
    assert await queue.owners(Work.SAMPLE) == []


async def test_the_oldest_answers_go_first_where_one_owner_has_too_many(queue: TinkerQueue) -> None:
    mine = await queue.begin(Work.SAMPLE)
    for number in range(3):
        await queue.ask(f"q{number}", b"x", "d", ME, is_scored=False)
        (request,) = await waiting(queue, Work.SAMPLE)
        await queue.reply(Work.SAMPLE, mine, request, Answer.json({"a": "x" * 40}))

    assert not await queue.knows("q0")
    assert await queue.answer("q0") is None
    assert await queue.answer("q2") is not None
    # It may be asked for again.
    await queue.ask("q0", b"x", "d", ME, is_scored=False)


async def test_an_answer_that_is_no_longer_kept_is_not_waited_for(queue: TinkerQueue) -> None:
    await make(queue)
    await answered(queue, Answer.json({"a": "x" * 40}))
    for seq in (1, 2):
        await queue.submit(a_request(seq), f"d{seq}", NOW)
        await answered(queue, Answer.json({"a": "x" * 40}))

    with pytest.raises(NotFound, match="no longer kept"):
        await queue.answer(request_id_of(MODEL, 0))


async def test_a_session_that_ended_leaves_nothing(queue: TinkerQueue, sessions: TinkerSessions) -> None:
    session = Session(owner="me", created=NOW)
    await sessions.put_session("s", session, ME)
    await make(queue)
    await queue.submit(a_request(2), "d2", NOW)
    await sessions.put_sampler("s:sample:0", Sampler(session_id="s", owner="me"))
    await sessions.seen("s", ME, NOW + 10)
    assert await sessions.unseen_since(NOW + 5) == []

    await sessions.end("s", session, ME, NOW)
    assert await sessions.unseen_since(NOW + 5) == [("s", ME)]
    assert await sessions.close_models("s") == [MODEL]
    with pytest.raises(NotFound, match="session ended"):
        await queue.submit(a_request(1), "d1", NOW)
    is_idle = await sessions.is_idle(MODEL)
    await answered(queue)
    assert (is_idle, await sessions.is_idle(MODEL)) == (False, True)
    await sessions.forget_model(MODEL, keeps_record=False)
    await sessions.forget_session("s", ME)

    assert await sessions.runs() == (0, [])
    assert (await sessions.session("s"), await sessions.sampler("s:sample:0")) == (None, None)
    assert await queue.ledger(ME) == TinkerLedger(owner=ME, accepted=2, done=1, failed=1, waiting=0, waiting_bytes=0)
    assert await queue.is_closed(MODEL)


async def test_what_waits_behind_lost_requests_goes_on_where_those_were_done(
    queue: TinkerQueue, sessions: TinkerSessions
) -> None:
    await make(queue)
    await queue.submit(a_request(3), "d3", NOW)
    (gap,) = await sessions.gaps()

    await sessions.skip(MODEL, 1, 2)

    assert (gap.model_id, gap.next, gap.first) == (MODEL, 1, 3)
    assert [each.seq for each in await waiting(queue)] == [0, 3]
    assert (await queue.progress(MODEL), await sessions.gaps()) == (2, [])
    with pytest.raises(NotFound, match="is over"):
        await queue.submit(a_request(2), "d2", NOW)
    await answered(queue)
    assert await queue.ledger(ME) == TinkerLedger(owner=ME, accepted=2, done=2, failed=0, waiting=0, waiting_bytes=0)


async def test_what_waits_behind_lost_requests_is_answered_where_those_were_not_done(
    queue: TinkerQueue, sessions: TinkerSessions
) -> None:
    await make(queue)
    await queue.submit(a_request(3), "d3", NOW)

    await sessions.give_up(MODEL, "request 1 was lost")

    found = await queue.answer(request_id_of(MODEL, 3))
    assert found == Answer.failed(Failure(error="request 1 was lost", category=Category.SERVER))
    assert await sessions.gaps() == []
    with pytest.raises(NotFound, match="request 1 was lost"):
        await queue.submit(a_request(4), "d4", NOW)
    ledger = await queue.ledger(ME)
    assert (ledger.accepted, ledger.failed, ledger.waiting, ledger.waiting_bytes) == (2, 1, 1, 1)


async def test_what_became_of_a_models_requests_balances_at_every_read(
    queue: TinkerQueue, sessions: TinkerSessions
) -> None:
    await sessions.put_session("s", Session(owner="me", created=NOW), ME)

    async def ledger() -> tuple[int, int, int, int]:
        _, (run,) = await sessions.runs(MODEL)
        assert run.accepted == run.answered + run.failed + run.waiting
        return run.accepted, run.answered, run.failed, run.waiting

    await make(queue)
    found = [await ledger()]
    await queue.submit(a_request(3), "d3", NOW)
    found.append(await ledger())
    await answered(queue)
    found.append(await ledger())
    await queue.submit(a_request(1), "d1", NOW)
    await answered(queue, Answer.failed(Failure(error="no", category=Category.USER)))
    found.append(await ledger())
    await sessions.skip(MODEL, 2, 2)
    await answered(queue)
    found.append(await ledger())
    await queue.submit(a_request(9), "d9", NOW)
    await sessions.give_up(MODEL, "request 4 was lost")
    found.append(await ledger())

    assert found == [(1, 0, 0, 1), (2, 0, 0, 2), (2, 1, 0, 1), (3, 1, 1, 1), (3, 2, 1, 0), (4, 2, 2, 0)]
    _, (run,) = await sessions.runs()
    assert (run.updates, run.is_open, run.closed) == (1, False, "request 4 was lost")


@pytest.mark.parametrize("again", [(1, 2), (2,)])
async def test_what_was_sent_again_since_the_gap_was_seen_is_not_passed_over(
    queue: TinkerQueue, sessions: TinkerSessions, again: tuple[int, ...]
) -> None:
    await make(queue)
    await queue.submit(a_request(3), "d3", NOW)
    for seq in again:
        await queue.submit(a_request(seq), f"d{seq}", NOW)
    before = [each.seq for each in await waiting(queue)]

    assert not await sessions.skip(MODEL, 1, 2)

    assert [each.seq for each in await waiting(queue)] == before
    assert await queue.progress(MODEL) == -1


async def test_a_gap_grows_older_however_much_comes_behind_it(
    redis_url: str, queue: TinkerQueue, sessions: TinkerSessions
) -> None:
    await make(queue)
    await queue.submit(a_request(2), "d2", NOW)
    redis = connect(redis_url)
    await redis.zadd(key("gaps"), {MODEL: 1.0})
    await redis.aclose()

    await queue.submit(a_request(3), "d3", NOW)

    (gap,) = await sessions.gaps()
    assert gap.seconds > 1e6


async def test_models_are_read_a_page_at_a_time_newest_first_and_of_one_owner_alone(
    redis_url: str, queue: TinkerQueue, sessions: TinkerSessions
) -> None:
    for number, owner in enumerate((ME, "other", ME)):
        name = f"s:train:{number}"
        model = Model(model_id=name, session_id="s", owner=owner, created=float(number))
        request = Request(request_id_of(name, 0), "", Verb.CREATE, 0, name, b"x", owner)
        await queue.submit(request, "d", float(number), model)
    redis = connect(redis_url)
    # As an earlier release kept the first one.
    await redis.zrem(key("created"), MODEL)
    await redis.zrem(key("created", ME), MODEL)
    await redis.sadd(key("models"), MODEL)
    await redis.aclose()

    async def page(owner: str, offset: int, limit: int) -> tuple[int, list[str]]:
        count, found = await sessions.runs("", owner, offset, limit)
        return count, [each.model.model_id for each in found]

    assert await page("", 0, 2) == (3, ["s:train:2", "s:train:1"])
    assert await page("", 2, 2) == (3, ["s:train:0"])
    assert await page(ME, 0, 9) == (2, ["s:train:2", "s:train:0"])


async def test_a_gap_that_is_filled_is_none(queue: TinkerQueue, sessions: TinkerSessions) -> None:
    await make(queue)
    for seq in (2, 1):
        await queue.submit(a_request(seq), f"d{seq}", NOW)

    assert await sessions.gaps() == []


async def test_one_owner_opens_no_more_sessions_than_it_may(
    sessions: TinkerSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla.shared.tinker.sessions.MOST_SESSIONS", 2)
    for number in range(2):
        await sessions.put_session(f"s{number}", Session(owner="me", created=NOW), ME)

    with pytest.raises(TooManyRequests, match="2 sessions"):
        await sessions.put_session("s2", Session(owner="me", created=NOW), ME)
    await sessions.put_session("t", Session(owner="other", created=NOW), "other")
