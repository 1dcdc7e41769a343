"""The filter of idempotency keys."""

from flotilla.services.gateway.store.seen_keys import SeenKeys


def test_every_key_that_was_added_is_known_and_few_others_are() -> None:
    keys = SeenKeys()
    for number in range(20_000):
        keys.add(f"added {number}")

    assert all(f"added {number}" in keys for number in range(20_000))
    assert sum(f"other {number}" in keys for number in range(20_000)) < 20


def test_a_key_that_is_no_unicode_is_taken() -> None:
    keys = SeenKeys()
    keys.add("\ud800")

    assert "\ud800" in keys
    assert "" not in keys
