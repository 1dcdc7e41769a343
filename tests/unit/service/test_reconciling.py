"""Pauses between failed starts grow up to a bound; the wait ends by news or by the pause, each once."""

import asyncio

import pytest

from flotilla.shared.children.restarts import LONGEST_PAUSE_SECONDS
from flotilla.shared.service import reconciling
from flotilla.shared.service.reconciling import StartBackoff


async def test_pauses_double_up_to_a_bound_and_begin_again_after_a_success() -> None:
    backoff = StartBackoff()

    pauses = [backoff.postpone() for _ in range(100)]

    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_SECONDS
    backoff.reset()
    assert backoff.postpone() == 0.5


async def test_news_end_the_wait_and_leave_the_pause_as_it_is() -> None:
    backoff, changed = StartBackoff(), asyncio.Event()
    backoff.postpone()
    changed.set()

    await backoff.wait(changed)

    assert not changed.is_set()
    assert not backoff.is_due


async def test_the_end_of_a_pause_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciling, "FIRST_PAUSE_SECONDS", 0.0)
    backoff, changed = StartBackoff(), asyncio.Event()
    backoff.postpone()

    await backoff.wait(changed)

    assert backoff.is_due
    waiting = asyncio.create_task(backoff.wait(changed))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "a start that is due but not wanted must not spin"
    changed.set()
    await waiting
