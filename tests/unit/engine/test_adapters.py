"""What each adapter took of an engine only grows, and all of it is somebody's."""

from collections import Counter

import pytest

from flotilla.services.rollout.engines.embedded.adapters import AdapterShares


def test_what_one_took_does_not_shrink_while_another_samples() -> None:
    shares = AdapterShares()
    shares.account({"mine": 100}, 10.0)
    before = shares.cpu_seconds("mine")
    shares.account({"mine": 100, "theirs": 900}, 20.0)

    assert before == shares.cpu_seconds("mine") == 10.0
    assert shares.cpu_seconds("theirs") == 10.0


def test_time_between_two_looks_is_divided_by_the_tokens_of_that_time() -> None:
    shares = AdapterShares()
    shares.account({"mine": 1000, None: 0}, 5.0)
    shares.prefilled["theirs"] += 30
    shares.account({"mine": 1010, None: 0}, 9.0)

    assert shares.cpu_seconds("mine") == pytest.approx(5.0 + 1.0)
    assert shares.cpu_seconds("theirs") == pytest.approx(3.0)


def test_time_without_a_token_waits_for_who_computes_next() -> None:
    shares = AdapterShares()
    shares.account({}, 5.0)
    shares.account({"mine": 1}, 6.0)

    assert shares.cpu_seconds("mine") == 6.0


def test_of_a_forgotten_adapter_only_the_sums_stay() -> None:
    shares = AdapterShares()
    shares.prefilled["gone"] += 5
    sampled = Counter[str | None]({"gone": 5})
    shares.account(sampled, 2.0)

    shares.forget("gone", sampled)
    sampled["mine"] += 10
    shares.account(sampled, 4.0)

    assert sampled == {None: 5, "mine": 10}
    assert shares.prefilled.total() == 5
    assert "gone" not in shares.prefilled | shares._seen
    assert set(shares._cpu_seconds) == {None, "mine"}
    assert (shares.cpu_seconds(None), shares.cpu_seconds("mine")) == (2.0, 2.0)
