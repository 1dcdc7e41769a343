import pytest

from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger, length_field

COUNTERS = {
    "issued": 20,
    "planned": 2,
    "trained": 3,
    "filtered:zero variance": 1,
    "dropped:too old": 2,
    "failed:timeout": 1,
    "failed:worker died": 1,
    "tokens:trained": 500,
}


def versions_of(groups: int) -> dict[int, int]:
    """Make outstanding groups, every other one of version 4."""
    return {group: 3 + group % 2 for group in range(groups)}


TEN = versions_of(10)
DEPTHS = {HopName.TASKS: (4, 2), HopName.GENERATED: (0, 3), HopName.SCORED: (1, 0)}


def test_a_balanced_ledger_accounts_for_every_group() -> None:
    ledger = Ledger.from_counters(COUNTERS, DEPTHS, outstanding=TEN, consumed=2)

    assert ledger.balanced
    assert ledger.failed == {"timeout": 1, "worker died": 1}
    assert (ledger.waiting.total, ledger.claimed.total, ledger.tokens.trained) == (5, 5, 500)


@pytest.mark.parametrize(
    ("change", "outstanding"),
    [({"issued": 21}, 10), ({"planned": 3}, 10), ({"failed:timeout": 2}, 10), ({}, 9), ({"trained": -1}, 10)],
)
def test_one_group_too_many_or_too_few_shows(change: dict[str, int], outstanding: int) -> None:
    assert not Ledger.from_counters(
        COUNTERS | change, DEPTHS, outstanding=versions_of(outstanding), consumed=2
    ).balanced


def test_what_is_outstanding_is_counted_by_version() -> None:
    ledger = Ledger.from_counters(COUNTERS, DEPTHS, outstanding=TEN, consumed=2)

    found = [(each.version, each.groups, each.first_group) for each in ledger.by_version]
    assert (ledger.outstanding, found) == (10, [(3, 5, 0), (4, 5, 1)])


def test_counts_below_zero_never_balance() -> None:
    depths = DEPTHS | {HopName.TASKS: (7, -1)}

    assert not Ledger.from_counters(COUNTERS, depths, outstanding=TEN, consumed=2).balanced


def test_it_travels_as_json() -> None:
    ledger = Ledger.from_counters(COUNTERS, DEPTHS, outstanding=TEN, consumed=2)
    wire = ledger.model_dump(mode="json")

    assert wire["balanced"] is True
    assert wire["waiting"] == {"tasks": 4, "generated": 0, "scored": 1}
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger


def test_lengths_are_in_order_by_kind_and_reason() -> None:
    counters = {"length:dropped:too old:256": 1, "length:dropped:too old:32": 1, "length:failed:timeout:0": 1}

    ledger = Ledger.from_counters(COUNTERS | counters, DEPTHS, outstanding=TEN, consumed=2)

    assert ledger.lengths == {"dropped": {"too old": {32: 1, 256: 1}}, "failed": {"timeout": {0: 1}}}
    assert list(ledger.lengths["dropped"]["too old"]) == [32, 256]
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (256, 256), (257, 512)])
def test_a_length_counts_up_to_a_power_of_two(tokens: int, bucket: int) -> None:
    assert length_field("dropped:too old", tokens) == f"length:dropped:too old:{bucket}"


def test_an_empty_ledger_balances() -> None:
    assert Ledger.from_counters({}, dict.fromkeys(HopName, (0, 0)), outstanding={}, consumed=0).balanced
