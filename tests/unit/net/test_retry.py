"""A call is repeated while its errors pass by themselves, with growing pauses, until a deadline if there is one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.net import retry as module
from flotilla.shared.net.retry import Backoff, is_passing, retry


class Time:
    """A clock that sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr(module.asyncio, "sleep", self.sleep)
        monkeypatch.setattr(module.random, "uniform", lambda low, high: high)

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.pauses.append(seconds)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def failing(*errors: Exception) -> Callable[[], Awaitable[str]]:
    left = list(errors)

    async def call() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return call


async def test_what_passes_is_waited_for_with_growing_pauses(time: Time) -> None:
    call = failing(*[Unavailable("gone")] * 7)

    assert await retry(call, waiting_for="them", now=time.now) == "answer"

    assert time.pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


async def test_what_does_not_pass_leaves_at_once(time: Time) -> None:
    with pytest.raises(InvalidRequest):
        await retry(failing(InvalidRequest("wrong")), waiting_for="them", now=time.now)

    assert time.pauses == []


async def test_the_last_error_leaves_when_no_attempt_can_begin_before_the_deadline(time: Time) -> None:
    call = failing(*(Unavailable(str(number)) for number in range(100)))

    with pytest.raises(Unavailable) as raised:
        await retry(call, waiting_for="them", deadline_seconds=1.0, now=time.now)

    assert time.seconds == pytest.approx(0.75)
    assert raised.value.detail == "4"


async def test_the_other_side_may_ask_for_longer_pauses_and_progress_begins_again(time: Time) -> None:
    backoff = Backoff(1.0, 8.0, pause_at_least=lambda error: 5.0 if str(error) == "later" else 0.0)

    await retry(failing(Unavailable("later"), Unavailable("gone")), waiting_for="them", backoff=backoff, now=time.now)
    backoff.reset()

    assert time.pauses == [5.0, 2.0]
    assert backoff.after(Unavailable("gone")) == 1.0


async def test_pauses_are_bounded_whatever_their_number() -> None:
    backoff = Backoff(0.5, 4.0)

    pauses = [backoff.after(OSError()) for _ in range(2000)]

    assert all(2.0 <= pause <= 4.0 for pause in pauses[3:])


async def test_a_long_wait_is_named_now_and_then_and_so_is_its_end(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    await retry(failing(*[Unavailable("gone")] * 60), waiting_for="them", now=time.now)

    assert [record.message for record in caplog.records] == ["waiting for an answer"] * 2 + ["answered again"]
    assert {record.__dict__["waiting_for"] for record in caplog.records} == {"them"}


async def test_an_answer_at_once_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    await retry(failing(), waiting_for="them")

    assert caplog.records == []


async def test_cancelling_ends_the_wait() -> None:
    async def call() -> None:
        raise Unavailable("gone")

    waiting = asyncio.create_task(retry(call, waiting_for="them"))
    await asyncio.sleep(0)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_errors_say_themselves_whether_they_pass() -> None:
    assert [is_passing(error) for error in (Unavailable(""), InvalidRequest(""), OSError())] == [True, False, False]
