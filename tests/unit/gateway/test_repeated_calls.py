"""What the gateway remembers of agents' calls with a key of idempotency."""

import pytest

from flotilla.services.gateway.episodes import episodes
from flotilla.shared.net.authorisation.access import Principal, Scope
from tests.unit.gateway.builders import a_gateway


def test_of_many_calls_the_one_that_was_made_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MOST_CALLS", 2)
    found, who = a_gateway().episodes, Principal(Scope.AGENT, "an agent")
    found._recalls_until = 0.0

    calls = [found._call_of("tiny-1", who, key, 0.0) for key in ("first", "second", "first", "third", "first")]

    assert [each.may_be_repeated for each in calls] == [False, False, True, False, True]
    assert len(found._calls) == 2
