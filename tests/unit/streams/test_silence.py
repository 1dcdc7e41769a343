"""A service reports that Redis does not answer, and nothing of the kind where a caller only gave up."""

import time

import pytest

from flotilla.shared.streams.redis import connection
from flotilla.shared.streams.redis.connection import SILENT_GAUGE, connect, note_attempt, silence


def test_a_server_that_does_not_answer_is_silent_since_it_was_first_asked_and_until_it_answers() -> None:
    redis, now = connect("redis://127.0.0.1:1/0"), time.monotonic()

    note_attempt(redis, is_answered=False, has_failed=True, began_at=now - 7)
    note_attempt(redis, is_answered=False, has_failed=True, began_at=now - 1)
    assert silence(redis)[SILENT_GAUGE] == pytest.approx(7, abs=0.5)

    note_attempt(redis, is_answered=True, has_failed=False, began_at=now)
    assert silence(redis) == {}


def test_an_attempt_that_its_caller_gave_up_says_nothing_of_the_server() -> None:
    redis, now = connect("redis://127.0.0.1:1/0"), time.monotonic()

    note_attempt(redis, is_answered=False, has_failed=False, began_at=now - 0.5)
    assert silence(redis) == {}

    note_attempt(redis, is_answered=False, has_failed=False, began_at=now - 6)
    assert silence(redis)[SILENT_GAUGE] == pytest.approx(6, abs=0.5)


def test_a_service_that_asks_nothing_any_more_reports_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    redis, now = connect("redis://127.0.0.1:1/0"), time.monotonic()
    note_attempt(redis, is_answered=False, has_failed=True, began_at=now - 7)

    monkeypatch.setattr(connection, "ANSWER_SECONDS", -1.0)

    assert silence(redis) == {}
